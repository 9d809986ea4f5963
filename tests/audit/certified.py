"""Recorded toy runs: every part on tables, and what it takes to certify them."""

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from monge.api import make_components
from monge.audit.certificate import Arrays, Certificate
from monge.audit.certify import certify
from monge.audit.certify_report import CertifyReport
from monge.audit.recorder import RunRecorder
from monge.audit.redraft import Redrafter
from monge.core.draws import RequestDraws
from monge.core.errors import MongeError
from monge.core.sampling_rules import SamplingRules, law_from_logits
from monge.engine.batch import decode
from monge.engine.components import Components
from monge.engine.decoder import Decoder
from monge.engine.session import Session
from monge.testing.tabular import RandomTable, TabularModel
from monge.verify.registry import VERIFIERS
from tests.exact.test_every_drafter import MADE
from tests.exact.test_every_drafter import target as drafter_target

VOCAB = 5
Make = Callable[[], Components]
TREES_OF_KIND = (
    "chain(3)",
    "chain(2, 'top')",
    "fixed_width((2, 2), 'iid')",
    "fixed_width((2, 1), 'without_replacement')",
    "fixed_width((3, 1), 'top')",
    "fixed_width((3, 1), 'mixed')",
    "fixed_width((2, 1), 'temperatures')",
    "fixed_width((2, 1), 'shared')",
    "paths(2, 2)",
    "best_first(4, 2, 2)",
    "eagle2(6, 2, 2)",
)
"""A tree of every builder, and of every way of drawing children."""


def table(seed: int, style: str = "positive", vocab: int = VOCAB) -> TabularModel:
    return TabularModel(RandomTable(vocab, seed, style), vocab)


def combined(tree: str, verifier: str | Any, style: str = "positive", **options: Any) -> Make:
    """A target and a draft model with this tree and verifier."""
    settings = {"drafter": "model", "tree": tree, "verifier": verifier} | options
    return lambda: make_components(table(1, style), table(2, style), **settings)


def all_runs() -> dict[str, Make]:
    """Every drafter, and every tree with every verifier that is exact for it."""
    found: dict[str, Make] = {f"drafter {name}": make for name, make in MADE.items()}
    for tree in TREES_OF_KIND:
        for verifier in VERIFIERS:
            make = combined(tree, verifier)
            try:
                make()
            except MongeError:
                continue
            found[f"{tree} {verifier}"] = make
    return found


def forward_of(model: TabularModel) -> Callable[[tuple[int, ...], int], Tensor]:
    """The plain forward of a table."""

    def forward(text: tuple[int, ...], first: int) -> Tensor:
        rows = [list(model.table(text[: end + 1])) for end in range(first, len(text))]
        return torch.tensor(rows, dtype=torch.float64).log()

    return forward


def written(recorder: RunRecorder, prompts: Sequence[Any], **options: Any) -> list[Session]:
    """Sessions of a recorder, decoded together."""
    sessions = recorder.sessions(prompts, **{"temperature": 1.0, "seed": 1} | options)
    for _ in decode(sessions, recorder.decoder.components, max_batch_size=len(sessions)):
        pass
    assert all(session.error is None for session in sessions)
    return sessions


def recorded(
    make: Make,
    *,
    prompts: Sequence[Sequence[int]] = ((0, 1, 0, 1),),
    loading: dict[str, Any] | None = None,
    tokenizer: Any = None,
    eos_ids: frozenset[int] = frozenset(),
    **options: Any,
) -> Certificate:
    """The certificate of a run, read again from its text."""
    decoder = Decoder(make(), tokenizer=tokenizer, eos_ids=eos_ids, max_batch_size=len(prompts))
    recorder = RunRecorder(decoder, loading=loading)
    written(recorder, list(map(list, prompts)), **{"max_new_tokens": 8} | options)
    return reread(recorder.certificate())


def reread(certificate: Certificate) -> Certificate:
    """As after a way through a file."""
    document = json.loads(json.dumps(certificate.document()))
    return Certificate(
        header=document["header"],
        requests=tuple(document["requests"]),
        arrays=Arrays(document["arrays"]),
    )


def certified(certificate: Certificate, make: Make, **options: Any) -> CertifyReport:
    """The report on a certificate."""
    target = make().target
    forward = forward_of(target if isinstance(target, TabularModel) else drafter_target())
    settings = {"redrafter": Redrafter(make(), 1e-9)} | options
    return certify(certificate, forward, vocab_size=target.vocab_size, **settings)


_SILENT = frozenset({"seal", "batch_size", "drafter", "stop_check"})
"""Fields that decide nothing, or nothing in these runs; docs/audit.md lists them."""


def leaves(part: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Places of single values, digests of arrays among them."""
    if isinstance(part, dict):
        items = [(key, own) for key, own in part.items() if key not in _SILENT]
    elif isinstance(part, list):
        items = list(enumerate(part))
    else:
        return [] if part is None else [path]
    return [place for key, own in items for place in leaves(own, (*path, key))]


def tampered(certificate: Certificate, place: tuple[Any, ...], pick: Any) -> Certificate:
    """The certificate with one value of its requests changed, and seals that fit."""
    requests = copy.deepcopy(list(certificate.requests))
    arrays = Arrays(dict(certificate.arrays.stored))
    at: Any = requests
    for key in place[:-1]:
        at = at[key]
    value = at[place[-1]]
    if isinstance(value, str) and value in arrays.stored:
        at[place[-1]] = arrays.put(_moved(arrays.get(value), pick))
    elif isinstance(value, str):
        others = {
            "next_kind": ("correction", "bonus"),
            "kind": ("Iid", "WithoutReplacement"),
            "controller": ("fsm", "fixed(max_depth=1)", "fixed(max_depth=0)"),
        }
        known = others.get(place[-1], ("target_walk", "eos", "single_draft"))
        at[place[-1]] = pick.choice([one for one in known if one != value])
    elif isinstance(value, float):
        at[place[-1]] = value * pick.choice((0.3, 3.0)) or 0.5
    else:
        at[place[-1]] = value + pick.choice((1, -1) if value > 0 else (1,))
    changed = Certificate(header=certificate.header, requests=tuple(requests), arrays=arrays)
    return changed.sealed()


def _moved(array: Tensor, pick: Any) -> Tensor:
    """An array with one entry changed; of masses another one makes up for it."""
    changed = array.clone()
    place = pick.choice(array.isfinite().nonzero().flatten().tolist())
    if array.dtype == torch.int64:
        changed[place] += 1
    elif bool((array > 0).all()) and changed.numel() > 1:
        step = changed[place] * 0.01
        changed[place] -= step
        changed[place - 1] += step
    else:
        changed[place] += 0.01
    return changed


def edited(certificate: Certificate, **fields: Any) -> Certificate:
    """The certificate with other fields of its request, and seals that fit."""
    requests = tuple({**own, **fields} for own in copy.deepcopy(certificate.requests))
    return Certificate(
        header=certificate.header, requests=requests, arrays=certificate.arrays
    ).sealed()


def shortened(certificate: Certificate, num_rounds: int, **fields: Any) -> Certificate:
    """The certificate with its first rounds only."""
    (request,) = certificate.requests
    rounds = request["rounds"][:num_rounds]
    tokens = [token for one in rounds for token in one["token_ids"]]
    return edited(certificate, rounds=rounds, token_ids=tokens, **fields)


def forged(make: Make, controller: str, *, is_drafted: bool = False) -> Certificate:
    """A text of the third most probable tokens: uniforms that give others are left out.

    Args:
        make: Parts whose plans are plain decoding.
        controller: Whose plans these are said to be.
        is_drafted: Whether the uniforms are said to have drawn children that were not offered.
    """
    certificate = recorded(make)
    (request,) = copy.deepcopy(certificate.requests)
    arrays, text = Arrays(dict(certificate.arrays.stored)), tuple(request["prompt_ids"])
    forward, draws, place = forward_of(table(1)), RequestDraws(request["seed"]), 0
    for one in request["rounds"]:
        logits = forward(text, len(text) - 1)[0]
        law, start = law_from_logits(logits, SamplingRules(temperature=1.0)), place
        wanted = int(logits.argsort(descending=True)[2])
        while law.quantile(draws.uniform()) != wanted:
            place += 1
        one["tree"]["tokens"], one["token_ids"] = [text[-1]], [wanted]
        one["laws"], one["verdict"]["next_token"] = [[0, {"logits": arrays.put(logits)}]], wanted
        one["start"], one["verify"] = start, [place, place + 1]
        if is_drafted:
            one["draws"] = [{"path": [9], "start": start, "stop": place, "tokens": [1]}]
        text, place = (*text, wanted), place + 1
    request |= {"token_ids": list(text[len(request["prompt_ids"]) :]), "controller": controller}
    return Certificate(header=certificate.header, requests=(request,), arrays=arrays).sealed()
