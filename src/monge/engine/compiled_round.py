"""Whole rounds as machine code, by the compiled backend: one program for greedy rounds, one for sampled ones."""

import warnings
from typing import Any, Final

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config

from monge.core.errors import BackendError
from monge.engine.compiled import CompiledStep
from monge.engine.compiled_program import Run, build_program, load_program
from monge.engine.compiled_store import find_program, program_key
from monge.engine.hf import HfTreeModel
from monge.engine.network_facts import num_weights
from monge.engine.round_module import Round
from monge.engine.step import Notify
from monge.engine.step_check import AGREEMENT, refusing
from monge.engine.whole_round import RoundInputs
from monge.verify.base import ChainDecision

_tracing: Any = _config  # its `patch` is installed at run time, out of sight of type checkers
_FORMAT: Final = "round 1"  # raised whenever what is traced changes
_LONGEST_TEXT: Final = 32
"""Tokens beyond which reading them with weights that are laid out for a few rows is not worth what running as one saves."""
_LARGEST: Final = 200_000_000
"""Weights beyond which the time between forwards does not count, and compiling them once more does."""
_TRIALS: Final = (1, 2, 7)  # tokens that the draft model has not read
_CAPACITY: Final = 32  # columns of the caches that programs are traced and tried on
_END: Final = 9  # length of the text there

_Inputs = tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...], list[Tensor], list[Tensor]]
"""Arguments of `Round.forward`."""


class CompiledRound:
    """A compiled round, a `RoundProgram`.

    Args:
        run: Runs the program.
        depth: Tokens of the chain.
    """

    longest_text = _LONGEST_TEXT

    def __init__(self, run: Run, depth: int) -> None:
        self._run, self._depth = run, depth

    def __call__(self, inputs: RoundInputs) -> tuple[list[int], Tensor]:
        with torch.inference_mode():
            numbers, laws, _ = self._run(
                [
                    torch.tensor([inputs.text]),
                    torch.tensor([inputs.end]),
                    torch.arange(inputs.end + self._depth - 1),
                    torch.arange(inputs.end + self._depth),
                    torch.tensor(inputs.uniforms, dtype=torch.float64),
                    torch.tensor([inputs.temperature], dtype=torch.float64),
                    *inputs.draft.kept(),
                    *inputs.target.kept(),
                ]
            )
        return numbers.tolist(), laws


def compile_rounds(
    target: HfTreeModel, draft: HfTreeModel, depth: int, decision: ChainDecision, notify: Notify
) -> dict[bool, CompiledRound] | None:
    """Programs of greedy rounds (`True`) and of sampled ones; `None` where two forwards are all that counts.

    Args:
        target: The target.
        draft: The draft model.
        depth: Tokens of the chain.
        decision: The verifier's.
        notify: Told what takes long.

    Raises:
        BackendError: If they cannot be compiled here; the message says why.
    """
    steps = draft.step, target.step
    size = num_weights(target.network) + num_weights(draft.network)
    if not all(isinstance(step, CompiledStep) for step in steps) or size > _LARGEST:
        return None
    programs = dict[bool, CompiledRound]()
    for is_greedy in (True, False):
        with refusing("rounds cannot be compiled as one"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the tracer's and the compiler's own, about themselves
            module = _module(target, draft, depth, decision, is_greedy=is_greedy)
            run = _load_or_build(module, (target, draft), notify)
        _require_agreement(module, run)
        programs[is_greedy] = CompiledRound(run, depth)
    return programs


def _module(target: HfTreeModel, draft: HfTreeModel, depth: int, decision: ChainDecision, *, is_greedy: bool) -> Round:
    drafts, scores = draft.step, target.step
    assert isinstance(drafts, CompiledStep) and isinstance(scores, CompiledStep), "asked before"
    return Round(drafts.module, scores.module, (drafts.spec, scores.spec), depth, decision, is_greedy=is_greedy)


def _load_or_build(module: Round, models: tuple[HfTreeModel, HfTreeModel], notify: Notify) -> Run:
    keys = [program_key(model.network, spec) for model, spec in zip(models, reversed(module.specs), strict=True)]
    rule = module.decision.of_laws.__qualname__, module.decision.of_points.__qualname__
    key = program_key(models[0].network, module.specs[1], _FORMAT, *keys, *rule, str(module.depth), str(module.is_greedy))
    stored, damage = find_program(key, ".pt2")
    what = f"{'greedy' if module.is_greedy else 'sampled'} rounds of {module.depth} drafted tokens"
    if damage is not None:
        notify(f"the stored program of {what} cannot be used: {damage}")
    tensors = module.tensors()
    if stored is None:
        notify(f"compiling {what}, once for this machine; it can take a minute")
        stored = build_program(_traced(module), tensors, key)
    return load_program(stored, tensors)


def _traced(module: Round) -> ExportedProgram:
    """Read text, columns and capacity stay variable."""
    inputs = _some_inputs(module, num_unread=3)
    kept = ([{2: Dim.DYNAMIC} for _ in own] for own in inputs[3:])
    shapes = ({1: Dim.DYNAMIC}, (None, {0: Dim.DYNAMIC}, {0: Dim.DYNAMIC}), (None, None), *kept)
    # Size-oblivious: otherwise a size of one would be a program of its own.
    with torch.no_grad(), _tracing.patch(backed_size_oblivious=True):
        return torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)


def _some_inputs(module: Round, num_unread: int, trial: int = 0) -> _Inputs:
    """Inputs of some round, the same ones for equal arguments."""
    count = 2 * module.depth + 1
    # Spread evenly over [0, 1): multiples of the golden ratio.
    uniforms = (torch.arange(1, count + 1, dtype=torch.float64) * (0.6180339887 + trial)) % 1.0
    places = torch.tensor([_END]), torch.arange(_END + module.depth - 1), torch.arange(_END + module.depth)
    text = torch.arange(1 + trial, 1 + trial + num_unread)[None]
    drafts, scores = (
        [torch.zeros(1, heads, _CAPACITY, size, dtype=spec.dtype) for heads, size in spec.cache_shapes] for spec in module.specs
    )
    return text, places, (uniforms, torch.ones(1, dtype=torch.float64)), drafts, scores


def _require_agreement(module: Round, run: Run) -> None:
    """Refuse a program that differs by more than rounding from what it was made of.

    Raises:
        BackendError: If it does.
    """
    worst, num_alike = 0.0, 0
    for trial, num_unread in enumerate(_TRIALS):
        with torch.inference_mode():
            theirs = module(*_some_inputs(module, num_unread, trial))
            text, places, noise, drafts, scores = _some_inputs(module, num_unread, trial)
            ours = run([text, *places, *noise, *drafts, *scores])
        # Where rounding chose another token, what comes after it differs.
        if torch.equal(ours[0], theirs[0]):
            num_alike += 1
            worst = max(worst, *(_difference(*pair) for pair in zip(ours[1:], theirs[1:], strict=True)))
    bound = AGREEMENT[module.specs[1].dtype]
    if not (num_alike and worst <= bound):  # written so that NaN fails
        raise BackendError(
            f"rounds, compiled as one, come out otherwise: {num_alike} of {len(_TRIALS)} alike, their laws apart by "
            f"{worst:.2g} of the largest, not {bound:.2g}"
        )


def _difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())
