"""One target over several processes, as `transformers` shards it; rank 0 controls all ranks."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Final

import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from monge.api import load
from monge.backends.registry import Backend, Eager
from monge.core.errors import OptionError, OutOfStepError
from monge.core.extras import require
from monge.core.model import NodeBlock, SequenceModel, draft_length, dtype_of
from monge.engine.decoder import Decoder
from monge.loading.networks import is_sharded, load_network, prepare
from monge.loading.sources import ModelSource

Send = Callable[[str, Any], None]

_END: Final = "end"
_PATIENCE: Final = timedelta(days=365)
"""Timeout for the next call: a server may be idle, and torchrun notices a dead rank."""


class RankZeroModel:
    """The whole network on rank 0: a `SequenceModel` whose calls run on every rank.

    Only rank 0 drafts, draws, verifies and plans, because logits may differ between ranks in their
    last bits, and clocks differ. The other ranks take part in every forward.

    Args:
        model: The part of this rank.
        num_ranks: Number of ranks.
        send: Sends the name of a method and its argument to all other ranks.
    """

    def __init__(self, model: SequenceModel, num_ranks: int, send: Send) -> None:
        self._model, self._num_ranks, self._send = model, num_ranks, send
        self._failure: str | None = None
        self.vocab_size, self.max_length = model.vocab_size, model.max_length
        self.dtype, self.draft_length = dtype_of(model), draft_length(model)
        self.no_tree_reason, self.no_draft_reason = model.no_tree_reason, model.no_draft_reason

    def __repr__(self) -> str:
        return f"RankZeroModel({self._model!r}, {self._num_ranks} ranks)"

    @property
    def forward_s(self) -> float:
        return self._model.forward_s

    def open(self, prefixes: Mapping[int, Sequence[int]]) -> None:
        self._on_all_ranks("open", dict(prefixes))

    def append(self, pieces: Mapping[int, Sequence[int]]) -> None:
        self._on_all_ranks("append", dict(pieces))

    def extend(self, blocks: Mapping[int, NodeBlock]) -> Mapping[int, Float[Tensor, "nodes vocab"]]:
        # Other ranks do not see what a device of this one still draws.
        known = {name: NodeBlock(block.token_ids, block.parents) for name, block in blocks.items()}
        return self._on_all_ranks("extend", known)

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        self._on_all_ranks("commit", dict(paths))

    def length(self, sequence: int) -> int:
        return self._model.length(sequence)

    def close(self, sequence: int) -> None:
        self._on_all_ranks("close", sequence)

    def _on_all_ranks(self, call: str, argument: Any) -> Any:  # noqa: ANN401
        if self._failure is not None:
            raise OutOfStepError(f"the ranks are out of step since {self._failure}; start again")
        try:
            self._send(call, argument)
            return getattr(self._model, call)(argument)
        except Exception as error:
            # The other ranks are left in the middle of this call.
            self._failure = f"{call} failed on rank 0: {type(error).__name__}: {error}"
            raise OutOfStepError(
                f"the ranks are out of step since {self._failure}; start again"
            ) from error


def follow(model: SequenceModel, receive: Callable[[], tuple[str, Any]]) -> None:
    """Repeat the calls of rank 0 on this part of the network, until rank 0 ends."""
    while (received := receive())[0] != _END:
        call, argument = received
        getattr(model, call)(argument)


@dataclass(frozen=True, slots=True)
class RankZeroBackend(Backend):
    """Runs a sharded target on all ranks and everything else on rank 0.

    Args:
        num_ranks: Number of ranks.
        send: As for `RankZeroModel`.
    """

    reads_shards: ClassVar[bool] = True

    num_ranks: int
    send: Send

    def sequence_model(self, network: PreTrainedModel) -> SequenceModel:
        model = Eager().sequence_model(network)
        return RankZeroModel(model, self.num_ranks, self.send) if is_sharded(network) else model


@contextmanager
def tensor_parallel(
    target: str | Path | None = None,
    draft: str | Path | Sequence[str] | None = None,
    **options: Any,
) -> Iterator[Decoder | None]:
    """Yield a decoder whose target is sharded over all processes of this `torchrun`.

    Every process enters. Rank 0 gets the decoder; the draft model is on rank 0 alone. The other
    ranks get `None`, after rank 0 has left.

    Args:
        target: Folder or name; `None` for the built-in target.
        draft: Likewise for the draft model, or several of them.
        **options: As for `monge.load`, except drafters that read the target's hidden states or run
            its layers.

    Raises:
        OptionError: If this process was not started by torchrun, or an option cannot be honoured.
        ModelLoadError: If the target cannot be loaded or sharded.
    """
    for name in ("backend", "device"):
        if options.pop(name, None) is not None:
            raise OptionError(
                f"{name} cannot be chosen with tensor parallelism: every rank runs "
                "eagerly on its own device"
            )
    # Without it the host does not shard.
    require("distributed", "tensor parallelism", "accelerate")
    missing = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name not in os.environ]
    if missing or int(os.environ["WORLD_SIZE"]) < 2:
        raise OptionError(
            "tensor parallelism needs several processes, which torchrun starts: "
            "torchrun --nproc-per-node 2 -m monge generate ... --tensor-parallel"
        )
    num_ranks = int(os.environ["WORLD_SIZE"])
    source = prepare(ModelSource.of(target), "eager")
    trust = {"trust_remote_code": options.get("trust_remote_code", False)}
    loading = {name: options[name] for name in ("dtype", "attention") if name in options}
    # The host creates the process group.
    network = load_network(source, tensor_parallel=num_ranks, **loading, **trust)
    # Calls are Python objects, so they use gloo, whatever the tensors use.
    group: Any = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def send(call: str, argument: object) -> None:
        dist.broadcast_object_list([(call, argument)], src=0, group=group)

    def receive() -> tuple[str, Any]:
        received: list[Any] = [None]
        dist.broadcast_object_list(received, src=0, group=group)
        return received[0]

    try:
        if dist.get_rank() > 0:
            follow(Eager().sequence_model(network), receive)
            yield None
            return
        try:
            # A head reads hidden states, which this rank does not have.
            loaded = replace(source, network=network, head=None)
            backend = RankZeroBackend(num_ranks, send)
            yield load(loaded, draft, backend=backend, **options)
        finally:
            with suppress(RuntimeError):  # the others are gone already
                send(_END, None)
    finally:
        dist.destroy_process_group()
