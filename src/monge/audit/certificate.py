"""The record of a run that `monge certify` replays: plain JSON, sealed round by round.

A certificate holds a header, requests with their rounds, and a table of arrays. An array is named by
its digest, so equal laws are stored once. Every seal is a digest of the seal before it and of what
it closes: a header, a request, a round. Seals find damage. They are no signature, since anybody can
seal a document.
"""

import base64
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from monge.core.errors import MongeError, OptionError
from monge.core.files import write_text
from monge.core.law import DenseLaw, Law, PointLaw, SparseLaw, one_hot
from monge.core.proposal import Deterministic, PathDraws, Proposal
from monge.core.proposal_kinds import PROPOSALS
from monge.core.tree import TokenTree
from monge.core.verdict import Verdict

VERSION: Final = 1
_DIGEST_BYTES: Final = 16
_FORMAT: Final = "monge certificate"
_DTYPES: Final = {
    name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16", "int64")
}
PLAIN: Final = "fixed(max_depth=0)"
"""The controller of a request that nothing is drafted for."""
KINDS: Final = {kind.__name__: kind for kind in (*PROPOSALS, PathDraws)}
"""Proposals that a certificate can hold."""
_VERDICT: Final = ("path", "next_token", "next_kind", "examined")


class CertificateError(MongeError, ValueError):
    """A file is no certificate of this release, or belongs to something else."""


@dataclass(slots=True)
class Arrays:
    """One-dimensional arrays by digest.

    Args:
        stored: By digest: type of the numbers, and their bytes, shuffled, compressed, in base 64.
    """

    stored: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])

    def put(self, array: Tensor) -> str:
        """Store an array and return its digest."""
        array = array.detach().cpu().contiguous()
        dtype = str(array.dtype).removeprefix("torch.")
        data = array.view(torch.uint8).numpy().tobytes()
        name = _array_digest(dtype, data)
        if name not in self.stored:
            # Bytes of equal significance side by side compress better.
            planes = np.frombuffer(data, np.uint8).reshape(-1, array.element_size()).T.tobytes()
            packed = base64.b64encode(zlib.compress(planes, 1)).decode()
            self.stored[name] = {"dtype": dtype, "data": packed}
        return name

    def get(self, name: str) -> Tensor:
        """Return an array, or raise `CertificateError` if it is missing or not what its digest names."""
        if name not in self.stored:
            raise CertificateError(f"array {name!r} is missing")
        try:
            dtype = _DTYPES[self.stored[name]["dtype"]]
            size = torch.empty(0, dtype=dtype).element_size()
            planes = zlib.decompress(base64.b64decode(self.stored[name]["data"], validate=True))
            data = np.frombuffer(planes, np.uint8).reshape(size, -1).T.tobytes()
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            raise CertificateError(f"array {name!r} cannot be read: {error}") from error
        if _array_digest(self.stored[name]["dtype"], data) != name:
            raise CertificateError(f"array {name!r} is not what its digest names")
        return torch.frombuffer(bytearray(data), dtype=dtype)


def held(array: Tensor) -> Tensor:
    """Return an array on the host, without the rest of a larger one that it is a part of."""
    array = array.detach().cpu()
    return array if array.untyped_storage().nbytes() == array.nbytes else array.clone()


def num_bytes(part: object) -> int:
    """Return the memory of the arrays in fields."""
    if isinstance(part, Tensor):
        return part.nbytes
    values = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return sum(map(num_bytes, values))


def encoded(part: Any, arrays: Arrays) -> Any:  # noqa: ANN401 (any JSON)
    """Return fields as JSON, with their arrays stored in `arrays`."""
    if isinstance(part, Tensor):
        return arrays.put(part)
    if isinstance(part, dict):
        return {key: encoded(value, arrays) for key, value in part.items()}
    return [encoded(value, arrays) for value in part] if isinstance(part, list) else part


def law_fields(law: Law) -> dict[str, Any]:
    """Return the fields of a law, exact to the last bit; `encoded` stores their arrays."""
    if isinstance(law, PointLaw):
        return {"token": law.token_id}
    if isinstance(law, DenseLaw):
        return {"masses": held(law.probs)}
    part = law.sparse()
    return {"ids": held(part.token_ids), "masses": held(part.probs)}


def law_of(stored: Mapping[str, Any], arrays: Arrays) -> Law:
    """Return the law of these fields, or raise `MongeError`."""
    if "token" in stored:
        return one_hot(stored["token"])
    masses = arrays.get(stored["masses"])
    return SparseLaw(arrays.get(stored["ids"]), masses) if "ids" in stored else DenseLaw(masses)


def proposal_fields(proposal: Proposal) -> dict[str, Any] | None:
    """Return the fields of a proposal, which must be of a known kind; `None` for no candidates."""
    kind = type(proposal)
    if KINDS.get(kind.__name__) is not kind:
        raise OptionError(f"a certificate cannot hold candidates drawn as {kind.__name__}")
    if proposal == Deterministic():
        return None
    assert is_dataclass(proposal), "every kind is a dataclass"
    names = [entry.name for entry in fields(proposal) if entry.init]
    return {"kind": kind.__name__} | {name: _field(getattr(proposal, name)) for name in names}


def _field(value: Any) -> Any:  # noqa: ANN401 (a setting of a proposal)
    if isinstance(value, Law):
        return law_fields(value)
    return [_field(entry) for entry in value] if isinstance(value, tuple) else value


def proposal_of(stored: Mapping[str, Any] | None, arrays: Arrays) -> Proposal:
    """Return the proposal of these fields, or raise `MongeError`."""
    if stored is None:
        return Deterministic()
    if stored["kind"] not in KINDS:
        raise CertificateError(f"unknown kind of candidates: {stored['kind']!r}")
    settings: dict[str, Any] = {}
    for name, value in stored.items():
        if name == "law":
            settings[name] = law_of(value, arrays)
        elif name == "laws":
            settings[name] = tuple(law_of(law, arrays) for law in value)
        elif name != "kind":
            settings[name] = _setting(value)
    return KINDS[stored["kind"]](**settings)


def _setting(value: Any) -> Any:  # noqa: ANN401 (any JSON)
    return tuple(value) if isinstance(value, list) else value


def tree_fields(tree: TokenTree) -> dict[str, Any]:
    """Return the fields of a tree."""
    return {
        "tokens": list(tree.token_ids),
        "parents": list(tree.parents),
        "candidates": [list(children) for children in tree.candidates],
        "proposals": [proposal_fields(proposal) for proposal in tree.proposals],
    }


def tree_of(stored: Mapping[str, Any], arrays: Arrays) -> TokenTree:
    """Return the tree of these fields, or raise `MongeError`."""
    tree = TokenTree(
        token_ids=tuple(stored["tokens"]),
        parents=tuple(stored["parents"]),
        proposals=tuple(proposal_of(proposal, arrays) for proposal in stored["proposals"]),
        candidates=tuple(map(tuple, stored["candidates"])),
    )
    sizes = {len(part) for part in (tree.parents, tree.proposals, tree.candidates)}
    if sizes != {tree.num_nodes} or tree.num_nodes == 0:
        raise CertificateError("the parts of the tree have different sizes")
    for node, parent in enumerate(tree.parents):
        if not (-1 <= parent < node and (parent == -1) == (node == 0)):
            raise CertificateError(f"parent {parent} of node {node} does not come before it")
    for node, candidates in enumerate(tree.candidates):
        children = {child for child, parent in enumerate(tree.parents) if parent == node}
        if set(candidates) != children:
            raise CertificateError(f"candidates of node {node} are not its children")
        if len({tree.token_ids[child] for child in children}) != len(children):
            raise CertificateError(f"two children of node {node} have one token")
    return tree


def verdict_fields(verdict: Verdict) -> dict[str, Any]:
    """Return the fields of a verdict."""
    return {name: _field(getattr(verdict, name)) for name in _VERDICT}


def verdict_of(stored: Mapping[str, Any]) -> Verdict:
    """Return the verdict of these fields."""
    return Verdict(**{name: _setting(stored[name]) for name in _VERDICT})


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The record of a run.

    Args:
        header: Target, parts, versions, and how the drafter is loaded again.
        requests: Requests with their rounds, as JSON; see the module's functions.
        arrays: Laws and logits.
    """

    header: Mapping[str, Any]
    requests: tuple[Mapping[str, Any], ...]
    arrays: Arrays

    def document(self) -> dict[str, Any]:
        """Return the whole as JSON."""
        return {
            "format": _FORMAT,
            "version": VERSION,
            "header": self.header,
            "requests": self.requests,
            "arrays": self.arrays.stored,
        }

    def sealed(self) -> "Certificate":
        """Return the certificate with the seals that fit its contents."""
        seals = (right for _, _, right in self._seals())
        header = {**self.header, "seal": next(seals)}
        requests: list[dict[str, Any]] = []
        for request in self.requests:
            rounds = [{**entry, "seal": next(seals)} for entry in request["rounds"]]
            requests.append({**request, "rounds": rounds, "seal": next(seals)})
        return replace(self, header=header, requests=tuple(requests))

    def broken_seal(self) -> str | None:
        """Return the place of the first seal that does not fit, or `None`."""
        return next((place for place, seal, right in self._seals() if seal != right), None)

    def _seals(self) -> Iterator[tuple[str, str | None, str]]:
        """Yield the place of every seal, what it is, and what it should be."""
        parts: list[tuple[str, Mapping[str, Any]]] = [("header", self.header)]
        for number, request in enumerate(self.requests, start=1):
            name = f"request {number}"
            rounds = enumerate(request["rounds"], start=1)
            parts += [(f"{name}, round {place}", entry) for place, entry in rounds]
            parts.append((name, {key: part for key, part in request.items() if key != "rounds"}))
        right = ""
        for place, part in parts:
            right = _digest(right, {key: value for key, value in part.items() if key != "seal"})
            yield place, part.get("seal"), right

    def write(self, path: Path) -> Path:
        """Write the certificate; a file of that name is replaced.

        Raises:
            OptionError: If it cannot be written.
        """
        return write_text(path, json.dumps(self.document()), "the certificate")


def read_certificate(path: Path) -> Certificate:
    """Read a certificate, without checking it.

    Raises:
        CertificateError: If there is no such file, it is cut off, or it is of another version.
    """
    again = "make one with `monge generate --certificate FILE`"
    if not path.is_file():
        raise CertificateError(f"{path}: no such file; {again}")
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CertificateError(
            f"{path}: cut off or damaged: it is no JSON ({error}); copy the file again, or {again}"
        ) from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise CertificateError(f"{path}: not a certificate of this library; {again}")
    if document.get("version") != VERSION:
        raise CertificateError(
            f"{path}: field 'version': got {document.get('version')!r}, this release reads "
            f"{VERSION}; {again}"
        )
    entries: list[Any] = [document.get(name) for name in ("header", "requests", "arrays")]
    header, requests, arrays = entries
    parts = [header, arrays, *requests] if isinstance(requests, list) else [None]
    if not all(isinstance(part, dict) for part in parts):
        raise CertificateError(
            f"{path}: 'header', 'requests' or 'arrays' is missing or malformed; {again}"
        )
    return Certificate(header=header, requests=tuple(requests), arrays=Arrays(arrays))


def _digest(before: str, part: Mapping[str, Any]) -> str:
    text = json.dumps(part, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(f"{before}\n{text}".encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _array_digest(dtype: str, data: bytes) -> str:
    return hashlib.blake2b(dtype.encode() + data, digest_size=_DIGEST_BYTES).hexdigest()
