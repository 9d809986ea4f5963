"""Record a run while it decodes, without touching the loop.

Two seams are enough. The draws of a request see every uniform, every node that draws its children,
and the beginning of every round. A verifier around the real one sees the tree, the target's laws and
the verdict.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch
from jaxtyping import Float64
from torch import Tensor
from transformers import PreTrainedModel

from monge.audit.certificate import KINDS, Arrays, Certificate, law_fields, part_text, tree_fields
from monge.core.child_draws import ChildDraws
from monge.core.draws import ClockDraws, Draws, RequestDraws
from monge.core.errors import NonFiniteLogitsError, OptionError
from monge.core.law import DenseLaw, Law, LawSequence
from monge.core.model import SequenceModel, dtype_of
from monge.core.proposal import Deterministic, Proposal
from monge.core.tree import TokenTree
from monge.core.verdict import StepRecord, Verdict
from monge.engine.backends.base import NetworkModel, backend_of, rounded_weights_of
from monge.engine.batch import decode
from monge.engine.decoder import Decoder, Prompt
from monge.engine.result import GenerationResult, result_of
from monge.engine.sampling import NodeLaws
from monge.engine.session import Request, Session
from monge.engine.sharding import is_sharded
from monge.verify.base import Rule, Verifier, as_verifier
from monge.verify.problem import ScoredTree
from monge.verify.registry import VERIFIERS

_PACKAGES: Final = ("monge", "torch", "transformers", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildrenDrawn:
    """The children that one node drew.

    Args:
        path: Drafted tokens from the root's child down to the node.
        start: Uniforms of the request that were drawn before.
        stop: The same afterwards.
        tokens: The children in drawing order, repeats kept.
    """

    path: tuple[int, ...]
    start: int
    stop: int
    tokens: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class RoundTape:
    """What is seen of one round.

    Attributes:
        start: Uniforms that were drawn before the round.
        children: Nodes that drew their children, in order.
        tree: The tree.
        laws: Target laws that the verifier looked at, by node, with the logits of their tokens.
        verify: Uniforms drawn before and after the verdict.
        verdict: The verdict; `None` where there was none.
        verifier: Who decided.
    """

    start: int
    children: list[ChildrenDrawn] = field(default_factory=list[ChildrenDrawn])
    tree: TokenTree | None = None
    laws: dict[int, tuple[Law, Tensor | None]] = field(
        default_factory=dict[int, tuple[Law, Tensor | None]]
    )
    verify: tuple[int, int] = (0, 0)
    verdict: Verdict | None = None
    verifier: str = ""


class RecordingDraws(ClockDraws, ChildDraws):
    """The draws of a request, the same as those of its seed and row, and a tape of them.

    Args:
        seed: As for `RequestDraws`.
        row: Likewise.

    Attributes:
        place: Uniforms drawn so far.
        rounds: One tape a round.
    """

    def __init__(self, seed: int, row: int = 0) -> None:
        self._own = RequestDraws(seed, row)
        self.place, self._marked = 0, (0, 0)
        self.rounds: list[RoundTape] = []

    def uniform(self) -> float:
        self.place += 1
        return self._own.uniform()

    def bernoulli(self, prob: float) -> bool:
        return self.uniform() < prob

    def categorical(self, law: Law) -> int:
        return law.quantile(self.uniform())

    def peek(self, count: int) -> list[float]:
        """See `PeekableDraws`."""
        return self._own.peek(count)

    def mark(self) -> None:
        """See `RewindableDraws`."""
        self._marked = self.place, len(self.rounds[-1].children) if self.rounds else 0
        self._own.mark()

    def rewind(self) -> None:
        """See `RewindableDraws`."""
        self._own.rewind()
        self.place, count = self._marked
        if self.rounds:
            del self.rounds[-1].children[count:]

    @property
    def has_drawn(self) -> bool:
        """See `RewindableDraws`."""
        return self._own.has_drawn

    def clocks(self, depth: int, draft: int, num_tokens: int) -> Float64[Tensor, " vocab"]:
        return self._own.clocks(depth, draft, num_tokens)

    def move_to(self, place: int) -> None:
        self._own.move_to(place)
        self.rounds.append(RoundTape(start=self.place))

    def draw_children(self, path: tuple[int, ...], proposal: Proposal) -> tuple[int, ...]:
        start, tokens = self.place, proposal.draw(self)
        if not isinstance(proposal, Deterministic):
            self.rounds[-1].children.append(
                ChildrenDrawn(path=path, start=start, stop=self.place, tokens=tokens)
            )
        return tokens


class RecordingVerifier(Verifier):
    """A verifier whose verdicts are taped.

    Args:
        rule: The verifier or node rule that decides.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule, self._own = rule, as_verifier(rule)
        self.accepts, self.max_width = rule.accepts, rule.max_width
        self.is_lossless, self.is_enumerable = rule.is_lossless, rule.is_enumerable
        self.invariant_for = rule.invariant_for
        self.text = rule_text(rule)

    @property
    def title(self) -> str:
        return self.rule.title

    def verify(self, tree: TokenTree, target_laws: LawSequence, draws: Draws) -> Verdict:
        (outcome,) = self.verify_many([ScoredTree(tree=tree, target_laws=target_laws, draws=draws)])
        if isinstance(outcome, NonFiniteLogitsError):
            raise outcome
        return outcome

    def verify_many(self, scored: Sequence[ScoredTree]) -> Sequence[Verdict | NonFiniteLogitsError]:
        watched = [_WatchedLaws(one.target_laws) for one in scored]
        starts = [_place(one.draws) for one in scored]
        outcomes = self._own.verify_many(
            [replace(one, target_laws=laws) for one, laws in zip(scored, watched, strict=True)]
        )
        for one, laws, start, outcome in zip(scored, watched, starts, outcomes, strict=True):
            if isinstance(one.draws, RecordingDraws) and isinstance(outcome, Verdict):
                tape = one.draws.rounds[-1]
                tape.tree, tape.verdict, tape.verifier = one.tree, outcome, self.text
                tape.laws = laws.with_logits()
                tape.verify = start, one.draws.place
        return outcomes


class _WatchedLaws:
    """Laws by node, and which of them were looked at."""

    def __init__(self, laws: LawSequence) -> None:
        self._laws = laws
        self.seen: dict[int, Law] = {}

    def __len__(self) -> int:
        return len(self._laws)

    def __getitem__(self, node: int) -> Law:
        if node not in self.seen:
            self.seen[node] = self._laws[node]
        return self.seen[node]

    def with_logits(self) -> dict[int, tuple[Law, Tensor | None]]:
        """The laws that were looked at, each with a copy of the logits of its tokens."""
        laws = self._laws
        if not isinstance(laws, NodeLaws):
            return {node: (law, None) for node, law in self.seen.items()}
        # Copies, since a backend may write the next logits to the same place.
        return {
            node: (law, _logits_of(law, laws.logits[node]).detach().cpu().clone())
            for node, law in self.seen.items()
        }


class Recorder:
    """Records what a decoder does, for `monge certify`.

    Args:
        decoder: The decoder. It must not decode anything else meanwhile.
        target: Name of the target, for people.
        loading: Arguments of `load` that make the drafter again; `None` where they are unknown, so
            that its draft laws are taken as declared.

    Attributes:
        decoder: The same decoder with taped verdicts; it decodes the sessions of this recorder.

    Raises:
        OptionError: If its runs cannot be recorded: the verifier is lossy, candidates are of an
            unknown kind, weights are rounded by the backend, or lie in several processes.
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
            "drafter": repr(parts.drafter),
            "backend": backend_of(parts.target),
            "max_batch_size": decoder.max_batch_size,
            "loading": None if loading is None else dict(loading),
            "versions": {name: _version(name) for name in _PACKAGES},
        }

    def sessions(self, prompts: Prompt | Sequence[Prompt], **options: Any) -> list[Session]:
        """Recorded sessions; arguments and errors as for `Decoder.sessions`.

        Raises:
            OptionError: If a request has logits processors, which no file can hold.
        """
        made = [self._session(request) for request in self.decoder.requests_of(prompts, **options)]
        self._sessions += made
        return made

    def generate(
        self, prompts: Prompt | Sequence[Prompt], **options: Any
    ) -> list[GenerationResult]:
        """Complete prompts as `Decoder.generate` does, and record it."""
        sessions = self.sessions(prompts, **options)
        decoder = self.decoder
        for _ in decode(sessions, decoder.components, max_batch_size=decoder.max_batch_size):
            pass
        return [result_of(session, decoder.backend) for session in sessions]

    def certificate(self) -> Certificate:
        """The record of all sessions so far."""
        arrays = Arrays()
        requests = tuple(self._request(session, arrays) for session in self._sessions)
        return Certificate(header=self._header, requests=requests, arrays=arrays).sealed()

    def _session(self, request: Request) -> Session:
        if request.processors:
            raise OptionError(
                "a certificate cannot hold logits processors: leave them out, and penalties, logit_bias and min_tokens too"
            )
        draws = RecordingDraws(request.seed, request.row)
        return self.decoder.session(replace(request, draws=draws))

    def _request(self, session: Session, arrays: Arrays) -> dict[str, Any]:
        request, draws = session.request, session.draws
        assert isinstance(draws, RecordingDraws), "made by this recorder"
        # A round that failed has a tape and no record.
        tapes = draws.rounds[: len(session.records)]
        return {
            "prompt_ids": list(request.prompt_ids),
            "seed": request.seed,
            "row": request.row,
            "rules": asdict(request.rules),
            "max_new_tokens": request.max_new_tokens,
            "eos_ids": sorted(request.eos_ids),
            "stop": list(request.stop),
            "controller": repr(self._parts.planner(request.controller).controller),
            "verifier": tapes[0].verifier if tapes else "",
            "finish_reason": session.finish_reason,
            "token_ids": list(session.completion_ids),
            "rounds": [
                _round(tape, record, arrays)
                for tape, record in zip(tapes, session.records, strict=True)
            ],
        }


def rule_text(rule: Rule) -> str:
    """What a user writes for a verifier; its class in angle brackets if it has no name."""
    try:
        return part_text(VERIFIERS, rule)
    except OptionError:
        return f"<{rule.title}>"


def target_fields(target: SequenceModel, name: str) -> dict[str, Any]:
    """Which target a model is: name, vocabulary, type and digest of its weights."""
    dtype = dtype_of(target)
    return {
        "name": name,
        "vocab_size": target.vocab_size,
        "dtype": str(torch.float64 if dtype is None else dtype).removeprefix("torch."),
        "digest": weights_digest(target.network) if isinstance(target, NetworkModel) else "",
    }


def weights_digest(network: PreTrainedModel) -> str:
    """Digest of all weights of a network, in the type that they have."""
    digest = hashlib.blake2b(digest_size=16)
    for name, weight in sorted(network.named_parameters()):
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
    if rounded_weights_of(parts.target) is not None:
        raise OptionError(
            f"the backend ({backend_of(parts.target)}) rounds the target's weights, so what it "
            "decodes cannot be compared with the checkpoint; use 'eager' or 'compiled'"
        )
    if isinstance(parts.target, NetworkModel) and is_sharded(parts.target.network):
        raise OptionError(
            "the target's weights lie in several processes, and a certificate needs their digest; "
            "leave --tensor-parallel out"
        )


def _place(draws: Draws) -> int:
    return draws.place if isinstance(draws, RecordingDraws) else 0


def _round(tape: RoundTape, record: StepRecord, arrays: Arrays) -> dict[str, Any]:
    tree, verdict = tape.tree, tape.verdict
    assert tree is not None and verdict is not None, "a round with a record has a verdict"
    return {
        "context_length": record.context_length,
        "batch_size": record.batch_size,
        "plan": asdict(record.plan),
        "drafter": record.drafter,
        "tree": tree_fields(tree, arrays),
        "start": tape.start,
        "draws": [asdict(one) for one in tape.children],
        "verify": list(tape.verify),
        "laws": [
            [node, _target_fields(law, logits, arrays)]
            for node, (law, logits) in sorted(tape.laws.items())
        ],
        "verdict": {
            "path": list(verdict.path),
            "next_token": verdict.next_token,
            "next_kind": verdict.next_kind,
            "examined": list(verdict.examined),
        },
        "token_ids": list(record.token_ids),
    }


def _target_fields(law: Law, logits: Tensor | None, arrays: Arrays) -> dict[str, Any]:
    """A target law, with the logits of its tokens.

    A law of all tokens is a function of its logits, which take half the room.
    """
    if logits is None:
        return law_fields(law, arrays)
    own = {} if isinstance(law, DenseLaw) else law_fields(law, arrays)
    return {**own, "logits": arrays.put(logits)}


def _logits_of(law: Law, logits: Tensor) -> Tensor:
    return logits if isinstance(law, DenseLaw) else logits[law.sparse().token_ids]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
