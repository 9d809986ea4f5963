"""What a finished round teaches the latency model."""

from collections.abc import Sequence

from monge.core.verdict import RoundTiming, StepRecord
from monge.engine.components import Components


def learn_latency(records: Sequence[StepRecord], components: Components) -> None:
    """Correct the decoder's latency by a round.

    Args:
        records: One record of each request that shared it.
        components: The components.
    """
    latency = components.shared.latency
    if latency is None or not records:
        return
    first = records[0]
    networks = {record.drafter for record in records if record.depth and components.runs_network(record.drafter)}
    # Where two networks drafted for one batch, their times cannot be told apart.
    depths = [record.depth for record in records if record.drafter in networks] if len(networks) == 1 else []
    latency.observe(
        RoundTiming(
            num_nodes=max(record.num_nodes for record in records),
            depth=max(depths, default=0),
            batch_size=first.batch_size,
            context_length=max(record.context_length for record in records),
            draft_s=first.times.draft_s,
            rest_s=first.times.total_s - first.times.draft_s,
            drafter=next(iter(networks), None),
        )
    )
