"""Record requests while they are decoded, without touching the loop.

Two seams are enough. The draws of a request see every uniform, every node that draws its children,
and the beginning of every round. A verifier around the real one sees the tree, the target's laws and
the verdict of every request with these draws.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from monge.audit.certificate import (
    KINDS,
    PLAIN,
    Arrays,
    Certificate,
    encoded,
    held,
    law_fields,
    num_bytes,
    tree_fields,
    verdict_fields,
)
from monge.audit.tape import Tape
from monge.backends.cpu.program_cache import machine
from monge.control.registry import CONTROLLERS
from monge.core.draws import Draws
from monge.core.errors import OptionError, RequestError
from monge.core.extras import installed_version
from monge.core.law import DenseLaw, Law, LawSequence
from monge.core.model import SequenceModel, dtype_of
from monge.core.registry import Registry
from monge.core.tree import TokenTree
from monge.core.verdict import Verdict
from monge.engine.decoder import Decoder, Prompt
from monge.engine.models.forward_program import NetworkModel, backend_of, rounded_weights_of
from monge.engine.sampling import NodeLaws
from monge.engine.session import Request, Session
from monge.options import LoadOptions, changed
from monge.verify.base import Rule, Verifier, as_verifier
from monge.verify.problem import ScoredTree
from monge.verify.registry import VERIFIERS

_LOADING: Final = (
    *("drafter", "tree", "verifier", "controller", "draft_temperature", "draft_top_k"),
    *("dtype", "backend", "draft_backend", "cross_tokenizer", "max_batch_size"),
)
_PACKAGES: Final = ("monge", "torch", "transformers", "numpy")


class RecordingVerifier(Verifier):
    """A verifier that lets `rule` decide, and tapes the verdicts of requests with `Tape`."""

    def __init__(self, rule: Rule) -> None:
        self.rule, self._verifier = rule, as_verifier(rule)
        self.accepts, self.max_width = rule.accepts, rule.max_width
        self.is_lossless, self.is_enumerable = rule.is_lossless, rule.is_enumerable
        self.invariant_for = rule.invariant_for
        self.text = part_text(VERIFIERS, rule)

    def __repr__(self) -> str:
        return repr(self.rule)

    @property
    def title(self) -> str:
        return self.rule.title

    def verify(self, tree: TokenTree, target_laws: LawSequence, draws: Draws) -> Verdict:
        (outcome,) = self.verify_many([ScoredTree(tree=tree, target_laws=target_laws, draws=draws)])
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    def verify_many(self, scored: Sequence[ScoredTree]) -> Sequence[Verdict | RequestError]:
        watched = [
            replace(row, target_laws=_WatchedLaws(row.target_laws, row.draws.num_drawn))
            if isinstance(row.draws, Tape)
            else row
            for row in scored
        ]
        outcomes = self._verifier.verify_many(watched)
        for row, verdict in zip(watched, outcomes, strict=True):
            tape, laws = row.draws, row.target_laws
            if isinstance(tape, Tape) and isinstance(verdict, Verdict):
                assert isinstance(laws, _WatchedLaws)
                taped = tape.rounds[-1]
                tape.num_bytes -= num_bytes(taped)  # of a round that is verified again
                taped |= {
                    "tree": tree_fields(row.tree),
                    "laws": laws.fields(),
                    "verify": [laws.start, tape.num_drawn],
                    "verdict": verdict_fields(verdict),
                }
                tape.verifier = self.text
                tape.num_bytes += num_bytes(taped)
        return outcomes


class _WatchedLaws:
    """Laws by node, and which of them were looked at, by a verifier that starts at uniform `start`."""

    def __init__(self, laws: LawSequence, start: int) -> None:
        self._laws, self.start = laws, start
        self.seen: dict[int, Law] = {}

    def __len__(self) -> int:
        return len(self._laws)

    def __getitem__(self, node: int) -> Law:
        if node not in self.seen:
            self.seen[node] = self._laws[node]
        return self.seen[node]

    def fields(self) -> list[list[Any]]:
        """Return the laws that were looked at, with the logits of their tokens if there are any."""
        logits = self._laws.logits if isinstance(self._laws, NodeLaws) else None
        return [
            [node, _target_fields(law, None if logits is None else logits[node])]
            for node, law in sorted(self.seen.items())
        ]


class RunRecorder:
    """Record the rounds of a decoder, for `monge certify`.

    Requests of `sessions` are recorded, and those that `recorded` returned. Other requests may share
    their batches, and are not recorded.

    Args:
        decoder: The decoder. While this one is used, nothing else may use it.
        target: Name of the target, for people.
        loading: Arguments of `load` that make the drafter again; `None` where they are unknown, so
            that its draft laws are taken as declared.

    Attributes:
        decoder: The same decoder with taped verdicts; it decodes the sessions of this recorder.

    Raises:
        OptionError: If its runs cannot be recorded: the verifier is lossy, candidates are of an
            unknown kind, or weights lie in several processes.
    """

    def __init__(
        self, decoder: Decoder, *, target: str = "", loading: Mapping[str, Any] | None = None
    ) -> None:
        parts = decoder.components
        _check(decoder)
        greedy = None if parts.greedy_rule is None else RecordingVerifier(parts.greedy_rule)
        recording = replace(parts, rule=RecordingVerifier(parts.rule), greedy_rule=greedy)
        self.decoder = Decoder(
            recording,
            tokenizer=decoder.tokenizer,
            eos_ids=decoder.eos_ids,
            max_batch_size=decoder.max_batch_size,
            chat=decoder.chat_format,
        )
        self._parts, self._sessions = parts, list[Session]()
        self._header = {
            "target": target_fields(parts.target, target),
            "drafter": type(parts.drafter).__name__,  # its settings may hold folders
            "backend": backend_of(parts.target),
            "max_batch_size": decoder.max_batch_size,
            "loading": None if loading is None else dict(loading),
            "processor": processor_digest(),
            "versions": {name: installed_version(name) for name in _PACKAGES},
        }

    def recorded(self, request: Request) -> Request:
        """Return the request with draws that record it.

        Raises:
            OptionError: If it has logits processors or a grammar, which no file can hold.
        """
        if request.grammar is not None:
            raise OptionError("a certificate cannot hold a grammar: leave one of them out")
        if request.processors:
            raise OptionError(
                "a certificate cannot hold logits processors: leave them out, and penalties, logit_bias "
                "and min_tokens too"
            )
        return replace(request, draws=Tape(request.seed, request.row))

    def sessions(self, prompts: Prompt | Sequence[Prompt], **options: Any) -> list[Session]:
        """Return recorded sessions; arguments and errors as for `Decoder.sessions` and `recorded`."""
        requests = self.decoder.requests(prompts, **options)
        sessions = [self.decoder.session(self.recorded(request)) for request in requests]
        self._sessions += sessions
        return sessions

    def num_bytes(self, session: Session) -> int:
        """Return the memory of the record of a session so far, without its tokens."""
        return _tape_of(session).num_bytes

    def certificate(self, sessions: Sequence[Session] | None = None) -> Certificate:
        """Return the record of sessions, which keep their records.

        Args:
            sessions: The sessions; `None` for all that `sessions` returned.
        """
        arrays = Arrays()
        chosen = self._sessions if sessions is None else sessions
        requests = tuple(self._request(session, arrays) for session in chosen)
        return Certificate(header=self._header, requests=requests, arrays=arrays).sealed()

    def _planned_by(self, request: Request) -> str:
        if not request.speculative:
            return PLAIN
        if not request.adaptive:
            return "fixed"
        return part_text(CONTROLLERS, self._parts.controller_for(request.controller))

    def _request(self, session: Session, arrays: Arrays) -> dict[str, Any]:
        request = session.request
        tape = _tape_of(session)
        return {
            "prompt_ids": list(request.prompt_ids),
            "seed": request.seed,
            "row": request.row,
            "rules": asdict(request.rules),
            "max_new_tokens": request.max_new_tokens,
            "eos_ids": sorted(request.eos_ids),
            "stop": list(request.stop),
            "stop_check": request.stop_check is not None,
            "limits": asdict(request.limits),
            "controller": self._planned_by(request),
            "verifier": tape.verifier if session.records else "",
            "finish_reason": session.finish_reason,
            "token_ids": list(session.completion_ids),
            "rounds": [
                {
                    "context_length": record.context_length,
                    "batch_size": record.batch_size,
                    "plan": asdict(record.plan),
                    "drafter": record.drafter,
                    **encoded(taped, arrays),
                    "token_ids": list(record.token_ids),
                }
                # A round that failed is taped and has no record.
                for taped, record in zip(tape.rounds, session.records, strict=False)
            ],
        }


def recorder_of(
    decoder: Decoder, load: LoadOptions, name_of: Callable[[str | None], str]
) -> RunRecorder:
    """Return a recorder for the decoder that these options load.

    Its certificates have the options that make the drafter again. The backend is one of them: it
    gives a head its hidden states, and may run it in 8 bits.

    Args:
        decoder: The decoder.
        load: The options.
        name_of: Returns the name of a model for people; its argument is `None` for the built-in target.
    """
    loading = {name: value for name, value in changed(load).items() if name in _LOADING}
    drafts = (load.draft,) if isinstance(load.draft, str) else load.draft
    if drafts is not None:
        loading["draft"] = [name_of(draft) for draft in drafts]
    return RunRecorder(decoder, target=name_of(load.target), loading=loading)


def part_text(registry: Registry[Any], part: Any) -> str:  # noqa: ANN401 (any part)
    """Return the name of a part and its settings that are not the defaults.

    A part without a name has its class in angle brackets.
    """
    try:
        name = registry.name_of(part)
    except OptionError:
        return f"<{getattr(part, 'title', type(part).__name__)}>"
    settings = [
        f"{key}={getattr(part, key)!r}"
        for key, default in registry.settings(name).items()
        if getattr(part, key) != default
    ]
    return f"{name}({', '.join(settings)})" if settings else name


def target_fields(target: SequenceModel, name: str) -> dict[str, Any]:
    """Return the identity of a target: name, vocabulary, type, rounding and digest of its weights."""
    dtype = dtype_of(target)
    return {
        "name": name,
        "weights": rounded_weights_of(target) or "exact",
        "vocab_size": target.vocab_size,
        "dtype": str(torch.float64 if dtype is None else dtype).removeprefix("torch."),
        "digest": weights_digest(target.network) if isinstance(target, NetworkModel) else "",
    }


def processor_digest() -> str:
    """Return a digest of this processor's instructions, on which logits of rounded weights depend."""
    return hashlib.blake2b(machine().encode(), digest_size=16).hexdigest()


def weights_digest(network: PreTrainedModel) -> str:
    """Return a digest of all weights of a network, in the form that they have."""
    digest = hashlib.blake2b(digest_size=16)
    panels = [
        (name, tensor) for name, tensor in network.named_buffers() if name.endswith(".panels")
    ]
    for name, weight in sorted([*network.named_parameters(), *panels]):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _check(decoder: Decoder) -> None:
    parts = decoder.components
    if not parts.rule.is_lossless:
        raise OptionError(f"{parts.rule.title} is lossy, so there is nothing to certify")
    kinds = parts.drafter.capabilities.proposes
    unknown = sorted(kind.__name__ for kind in kinds if kind not in KINDS.values())
    if unknown:
        raise OptionError(f"a certificate cannot hold candidates drawn as {', '.join(unknown)}")


def _tape_of(session: Session) -> Tape:
    assert isinstance(session.draws, Tape), "the session of a recorded request"
    return session.draws


def _target_fields(law: Law, logits: Tensor | None) -> dict[str, Any]:
    """Return a target law, with the logits of its tokens.

    A law of all tokens is a function of its logits, which take half the room.
    """
    if logits is None:
        return law_fields(law)
    is_dense = isinstance(law, DenseLaw)
    chosen = logits if is_dense else logits[law.sparse().token_ids]
    # A copy, since a backend may write the next logits to the same place.
    copied = held(chosen.detach().to("cpu", copy=True))
    return {**({} if is_dense else law_fields(law)), "logits": copied}
