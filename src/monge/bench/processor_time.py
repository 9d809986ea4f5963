"""Processor time of other processes, which a busy machine stretches less than it stretches the clock."""

import os
from collections import defaultdict
from pathlib import Path


def tree_seconds(pid: int, processes: Path = Path("/proc")) -> float | None:
    """Processor seconds of a process and all that it started and that still run.

    `None` where the system does not say.

    Args:
        pid: The process.
        processes: Where Linux keeps them.
    """
    children, ticks = defaultdict[int, list[int]](list), dict[int, int]()
    for file in processes.glob("[0-9]*/stat"):
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:  # it has ended
            continue
        # The name, in brackets, may hold anything; after it come state, parent, ..., and from the
        # twelfth on the times.
        words = text.rpartition(")")[2].split()
        own = int(file.parent.name)
        children[int(words[1])].append(own)
        ticks[own] = int(words[11]) + int(words[12])
    if pid not in ticks:
        return None
    total, left = 0, [pid]
    while left:
        one = left.pop()
        total += ticks[one]
        left.extend(children[one])
    return total / os.sysconf("SC_CLK_TCK")
