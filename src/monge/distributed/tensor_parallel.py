"""One target over several processes, as `transformers` shards it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist
from transformers import PreTrainedModel

from monge.api import built_in, default_draft, load
from monge.backends.base import Backend
from monge.backends.registry import Eager
from monge.core.errors import OptionError
from monge.core.extras import require
from monge.core.model import SequenceModel
from monge.distributed.rank_zero_model import RankZeroModel, follow, release
from monge.distributed.ranks import Ranks
from monge.engine.decoder import Decoder
from monge.loading.networks import load_network, load_tokenizer
from monge.loading.sharding import is_sharded


@dataclass(frozen=True, slots=True)
class RankZeroBackend(Backend):
    """Runs a sharded target on all ranks and everything else on rank 0.

    Args:
        ranks: All processes.
    """

    reads_shards: ClassVar[bool] = True

    ranks: Ranks

    def sequence_model(self, network: PreTrainedModel) -> SequenceModel:
        model = Eager().sequence_model(network)
        return RankZeroModel(model, self.ranks) if is_sharded(network) else model


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
    ranks = Ranks()
    source = built_in("target") if target is None else target
    usual = default_draft(None, None, options.get("drafter")) if target is None else None
    trust = {"trust_remote_code": options.get("trust_remote_code", False)}
    loading = {name: options[name] for name in ("dtype", "attention") if name in options}
    network = load_network(source, tensor_parallel=ranks.size, **loading, **trust)
    ranks.join()
    try:
        if ranks.rank > 0:
            follow(Eager().sequence_model(network), ranks)
            yield None
            return
        try:
            yield load(
                network,
                draft if draft is not None else usual,
                tokenizer=load_tokenizer(source, **trust),
                backend=RankZeroBackend(ranks),
                **options,
            )
        finally:
            with suppress(RuntimeError):  # the others are gone already
                release(ranks)
    finally:
        dist.destroy_process_group()
