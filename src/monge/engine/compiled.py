"""The compiled backend: a network's step over tree nodes as machine code, without Python or dispatch between its operations."""

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from monge.core.errors import BackendError
from monge.engine.apart import apart
from monge.engine.cache import TreeCache
from monge.engine.compiled_export import export_step
from monge.engine.compiled_program import build_program, load_program
from monge.engine.compiled_store import StoredProgram, find_program, program_key
from monge.engine.masks import chain_visibility
from monge.engine.network_facts import chooses_logits
from monge.engine.step import Notify, StepOutput, StepSpec
from monge.engine.step_check import largest_difference, refusing, require_agreement, step_obstacle, step_spec
from monge.engine.step_module import Step

_PROMPT: Final = 384  # tokens of prompts: with more, what lies between products takes longer on one thread than in Python


class CompiledStep:
    """A compiled step, a `NodeStep`. One program serves all numbers of rows, nodes and columns: decoding compiles nothing.

    Args:
        stored: The program.
        module: What it was made of, which holds the weights.
        spec: What it reads and gives.
        prompt_tokens: As of `PromptStep`; 0 where the program gives logits of all nodes.

    Attributes:
        module: As given.
        spec: As given.
    """

    name = "compiled"

    def __init__(self, stored: StoredProgram, module: Step, spec: StepSpec, prompt_tokens: int = 0) -> None:
        self._run = load_program(stored, module.tensors())
        self.layers, self.module, self.spec = spec.layers, module, spec
        self.prompt_tokens = prompt_tokens

    def __call__(self, token_ids: Tensor, positions: Tensor, masks: Sequence[Tensor], cache: TreeCache) -> StepOutput:
        return self._read(token_ids, positions, _places(token_ids.shape[1]), masks, cache)

    def read_prompt(self, token_ids: Tensor, positions: Tensor, masks: Sequence[Tensor], cache: TreeCache) -> StepOutput:
        return self._read(token_ids, positions, _places(1), masks, cache)

    def read_chain(self, token_ids: Sequence[int], start: int, cache: TreeCache) -> StepOutput:
        places = torch.arange(start, start + len(token_ids))[None]
        mask = chain_visibility(len(token_ids), start)[None].contiguous()
        if self.spec.mask_dtype != torch.bool:
            mask = torch.where(mask, 0.0, torch.finfo(self.spec.mask_dtype).min).to(self.spec.mask_dtype)
        masks = [mask] * len(self.spec.kinds)
        return self._output([torch.tensor([token_ids]), places, places, _places(len(token_ids)), *masks, *cache.kept()])

    def _read(
        self, token_ids: Tensor, positions: Tensor, shown: Tensor, masks: Sequence[Tensor], cache: TreeCache
    ) -> StepOutput:
        # The program does not ask for strides: masks of chains are windows onto a wider one, and must be cut out.
        dense = (mask.contiguous() for mask in masks)
        return self._output([token_ids, positions, cache.columns(token_ids.shape[1]), shown, *dense, *cache.kept()])

    def _output(self, inputs: list[Tensor]) -> StepOutput:
        logits, *states = self._run(inputs)
        return StepOutput(logits=logits, states=tuple(states))


@cache
def _places(count: int) -> Tensor:
    """The first so many nodes."""
    return torch.arange(count)


def compile_step(network: PreTrainedModel, notify: Notify, layers: tuple[int, ...] = ()) -> CompiledStep:
    """A network's step, compiled, or loaded where that was done before; either way checked against the network.

    Args:
        network: A network in evaluation mode.
        notify: Told what takes long.
        layers: Hidden states that come with the logits.

    Raises:
        BackendError: If the network cannot be compiled here; the message says why.
    """
    if (reason := obstacle(network)) is not None:
        raise BackendError(reason)
    name = type(network).__name__
    with refusing(f"{name} cannot be compiled"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer's and the compiler's own, about themselves
        compiled = _load_or_build(network, step_spec(network, layers), name, notify)
        difference = apart(lambda: largest_difference(network, compiled))
    require_agreement(network, compiled, "compiled", difference)
    return compiled


def obstacle(network: PreTrainedModel) -> str | None:
    """Why a network cannot be compiled, where that is known before trying."""
    if (reason := step_obstacle(network, "compiled")) is not None:
        return reason
    if network.device.type != "cpu":
        return f"{type(network).__name__} is on {network.device}, and steps are compiled for the CPU only"
    return compiler_obstacle()


def compiler_obstacle() -> str | None:
    """Why nothing can be compiled on this machine."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler on this machine; install g++ or clang++, or name one in the environment variable CXX"
    return None


def _load_or_build(network: PreTrainedModel, spec: StepSpec, name: str, notify: Notify) -> CompiledStep:
    step = Step(network, spec)
    key = program_key(network, spec)
    stored, damage = find_program(key, ".pt2")
    if damage is not None:
        notify(f"the stored program of {name} cannot be used: {damage}")
    if network.dtype == torch.bfloat16 and torch.backends.cpu.get_cpu_capability() == "AVX2":
        notify(f"this processor has no bfloat16 instructions: {name} is several times faster with dtype='float32'")
    if stored is None:
        what = f"{name} with its hidden states" if spec.layers else name
        notify(f"compiling {what}, once for this machine; it can take minutes")
        stored = _build(step, spec, key)
    return CompiledStep(stored, step, spec, _PROMPT if chooses_logits(network) else 0)


def _build(step: Step, spec: StepSpec, key: str) -> StoredProgram:
    return build_program(export_step(step, spec), step.tensors(), key)
