"""The device, and the networks that are measured on it, each loaded when a row asks for it."""

import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch

from lab.grow.network import grown, num_parameters, shape_for
from monge.api import built_in
from monge.bench.pair import Pair, load_pair
from monge.bench.provenance import provenance
from monge.bench.runner import Work
from monge.core.errors import OptionError, unknown_name
from monge.loading.networks import as_sequence_model, usable_device
from monge.networks.base import NodeBlock, SequenceModel
from monge.networks.hf_tree import make_models_ready
from monge.prompts import encode, interleaved, shipped

_STRIDE: Final = 7919  # a prime, so that no token repeats
_SEQUENCE: Final = -1  # requests of decoders count from 0
_FORWARDS: Final = 3  # the last one is timed: the first one behind a text may move the cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured.

    Args:
        params: Parameters to which the built-in target is grown; `None` takes the built-in draft
            model in its place.
        context: Tokens of the text before measured forwards, and most tokens of a prompt.
        tokens: New tokens of a text.
        vocab: Vocabulary of measured verification.
        copied: Bytes of the block whose copies give the bandwidth.
        repeats: Turns of every measurement.
    """

    params: str | None
    context: int = 512
    tokens: int = 96
    vocab: int = 131072
    copied: int = 2 << 30
    repeats: int = 5


SIZES: Final = {
    "8b": Size(params="8B"),
    "small": Size(params="1B"),
    "tiny": Size(params=None, context=16, tokens=6, vocab=512, copied=1 << 22, repeats=2),
}


@dataclass(eq=False)
class Machine:
    """A device and the networks on it."""

    device: torch.device
    size: Size

    @cached_property
    def pair(self) -> Pair:
        """The built-in pair, its target grown."""
        params = self.size.params
        names = (str(built_in(which)) for which in ("target" if params else "draft", "draft"))
        pair, backend = self._loaded(*names, backend="eager"), self._backend
        network = pair.target
        if params is not None:
            network = grown(network, shape_for(network, num_parameters(params)))
        # The target is compiled once, at its own size.
        models = [as_sequence_model(one, backend=backend) for one in (network, pair.draft) if one]
        make_models_ready(models)
        target_model, draft_model = models
        return replace(
            pair,
            target=network,
            target_model=target_model,
            draft_model=draft_model,
            backend=backend,
        )

    @cached_property
    def headed(self) -> Pair:
        """SmolLM2 with its head; in the tiny size, the built-in target with its head."""
        names = (
            (None, str(built_in("shape")))
            if self.size.params is None
            else ("smollm2", "smollm2-head")
        )
        return self._loaded(*names, backend=self._backend)

    @property
    def _backend(self) -> str:
        # Programs of a CPU would take minutes to compile.
        return "eager" if self.device.type == "cpu" else "compiled"

    def _loaded(self, target: str | None, draft: str, *, backend: str) -> Pair:
        dtype = "float32" if self.device.type == "cpu" else "bfloat16"
        return load_pair(target, draft, backend=backend, dtype=dtype, device=self.device)

    def prompts(self, pair: Pair, count: int) -> tuple[tuple[int, ...], ...]:
        """Return so many of the shipped prompts, from the first again after the last."""
        texts = [prompt.text for prompt in interleaved(shipped())]
        chosen = (encode(pair.tokenizer, texts[row % len(texts)]) for row in range(count))
        return tuple(ids[: self.size.context] for ids in chosen)

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds until the device has done the work."""
        wait = torch.cuda.synchronize if self.device.type == "cuda" else lambda _: None
        wait(self.device)
        start = time.perf_counter()
        work()
        wait(self.device)
        return time.perf_counter() - start

    def forward(self, model: SequenceModel, context: int, nodes: int) -> Work:
        """Return forwards of a chain of so many nodes behind a text, which is forgotten again."""
        text = distinct(model.vocab_size, context + nodes)
        blocks = {_SEQUENCE: NodeBlock.chain(text[context:])}

        def forward_s() -> float:
            # Beside an open text, a request would be decoded with another number of rows.
            model.open({_SEQUENCE: text[:context]})
            seconds = 0.0
            try:
                for _ in range(_FORWARDS):
                    seconds = self.seconds(lambda: model.extend(blocks))
                    model.commit({_SEQUENCE: ()})
                return seconds
            finally:
                model.close(_SEQUENCE)

        return forward_s

    def described(self) -> dict[str, Any]:
        """Return commit, versions, card and driver, as plain values."""
        found = provenance(self.device) | {"driver": None}
        program = shutil.which("nvidia-smi") if self.device.type == "cuda" else None
        if program is not None:
            asked = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
            done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=30)
            found["driver"] = next(iter(done.stdout.splitlines()), None)
        return found


def distinct(vocab_size: int, length: int) -> tuple[int, ...]:
    """Return a text in which no token repeats while the vocabulary lasts."""
    return tuple(_STRIDE * (column + 1) % vocab_size for column in range(length))


def machine_of(device: str, size: str) -> Machine:
    """Return the machine of a device.

    Raises:
        OptionError: If there is no such device or size, or they do not go together.
    """
    if size not in SIZES:
        raise unknown_name("size", size, SIZES)
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise OptionError(
            f"torch {torch.__version__} finds no CUDA device. If nvidia-smi lists one, install a "
            "build of torch for CUDA; without one, try --device cpu --size tiny --minutes 1"
        )
    found = usable_device(device)
    if found.type == "cpu" and SIZES[size].params is not None:
        raise OptionError(f"--size {size} is for a GPU; on the CPU, take --size tiny")
    return Machine(found, SIZES[size])
