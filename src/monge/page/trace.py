"""The trace of a run: what the page shows of it, as plain values for JSON.

The document of `monge generate --html` has

- `format` and `version`; `drafters`, a list of names; `verifier` and `controller`;
- `runs`: an object for each completion, with `prompt`, `text`, `finish_reason`, `seed`, `error`,
  `backend`, `stats` (see `GenerationStats`) and `rounds`.

A server adds `rounds` to the choices of a request that sends `trace: true`; in a stream, every chunk
has the rounds that are new. `RunTrace.round` describes a round.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, get_args

from monge.core.verdict import StepRecord
from monge.draft.base import AnyDrafter, Capabilities
from monge.draft.pool import Pool
from monge.engine.decoder import Decoder
from monge.requests.grammar import FORCED
from monge.requests.text import PlacedTexts, Tokenizer, TokenTexts

FORMAT: Final = "monge trace"
VERSION: Final = 1

Origin = Literal["lookup", "draft", "head", "grammar", "correction", "bonus", "target"]
"""Where a token comes from: accepted from a lookup, a draft model, a head or a grammar; drawn after a
rejection, after a path that was accepted to its end, or in a round without candidates."""
ORIGINS: Final[tuple[Origin, ...]] = get_args(Origin)
Origins = Mapping[str | None, Origin]


def origins_of(drafter: AnyDrafter) -> Origins:
    """Return the origin of accepted tokens, by `StepRecord.drafter`."""
    members = drafter.drafters if isinstance(drafter, Pool) else {None: drafter}
    return {
        FORCED: "grammar",
        **{name: _origin(member.capabilities) for name, member in members.items()},
    }


def drafters_of(origins: Origins) -> list[str]:
    """Return the names of the drafters; a drafter outside a pool has the name of its kind."""
    return [name or kind for name, kind in origins.items() if kind != FORCED]


def _origin(can: Capabilities) -> Origin:
    if not can.runs_network:
        return "lookup"
    return "head" if can.reads_states else "draft"


class RunTrace:
    """Describes the rounds of a completion, in their order.

    Args:
        tokenizer: Gives the texts of tokens; if `None`, their texts are numbers.
        prompt_ids: The prompt.
        origins: See `origins_of`.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt_ids: Sequence[int], origins: Origins
    ) -> None:
        self._texts, self._origins = TokenTexts(tokenizer), origins
        self._placed = PlacedTexts(self._texts, prompt_ids)
        self._num_tokens = 0

    def round(self, record: StepRecord) -> dict[str, Any]:
        """Return the next round.

        Returns:
            `at`: tokens generated before it. `drafter`: name of the drafter of a pool, or `None`.
            `origin`: that of its candidates; `None` if there are none. `window`: largest depth by
            the controller and the tokens that are left; `None` for any. `batch_size`. `seconds` of the round, and of its
            `stages`. `nodes`: `id`, `text`, `parent`, `p` and `q` (see `VerifiedTree`) of every node,
            the root first. `path`: accepted nodes. `tokens`: `id`, `text`, `origin`, `p` and `q` of
            every committed token; the texts of all tokens add up to the completion, so a token that
            ends inside a character has none.
        """
        tree, times = record.tree, record.times
        assert tree is not None, "the request keeps its trees"
        probs = zip(tree.target_probs, tree.draft_probs, strict=True)
        columns = zip(tree.token_ids, tree.parents, probs, strict=True)
        nodes = [
            {"id": token, "text": self._texts.name(token), "parent": parent, "p": p, "q": q}
            for token, parent, (p, q) in columns
        ]
        origin = self._origins.get(record.drafter, "draft") if record.num_nodes else None
        accepted = [(origin, nodes[node]["p"], nodes[node]["q"]) for node in tree.path]
        last = record.next_kind if record.num_nodes else "target"
        sources = zip(record.token_ids, [*accepted, (last, tree.next_prob, None)], strict=False)
        self._num_tokens += len(record.token_ids)
        texts = self._placed.of(record.token_ids, last=False)
        stages = ("draft", "score", "verify", "commit")
        return {
            "at": self._num_tokens - len(record.token_ids),
            "drafter": record.drafter,
            "origin": origin,
            "window": record.plan.max_depth,
            "batch_size": record.batch_size,
            "seconds": times.total_s,
            "stages": {name: getattr(times, f"{name}_s") for name in stages},
            "nodes": nodes,
            "path": list(tree.path),
            "tokens": [
                {"id": token, "text": text, "origin": kind, "p": p, "q": q}
                for (token, (kind, p, q)), (text, _) in zip(sources, texts, strict=True)
            ],
        }


def rounds_of(
    records: Sequence[StepRecord], prompt_ids: Sequence[int], decoder: Decoder
) -> list[dict[str, Any]]:
    """Return the rounds of a completion whose request keeps its trees."""
    trace = RunTrace(decoder.tokenizer, prompt_ids, origins_of(decoder.components.drafter))
    return [trace.round(record) for record in records]


def document(
    runs: Sequence[Mapping[str, Any]], decoder: Decoder, controller: str | None = None
) -> dict[str, Any]:
    """Return the document of runs; `controller` is the name of their controller, if any."""
    parts = decoder.components
    return {
        "format": FORMAT,
        "version": VERSION,
        "drafters": drafters_of(origins_of(parts.drafter)),
        "verifier": parts.rule.title,
        "controller": type(parts.controller_for(controller)).__name__,
        "runs": list(runs),
    }
