"""Processor time is that of a process and its descendants."""

import os

from monge.bench.processor_time import tree_seconds


def test_a_tree_is_summed_whatever_its_names_are(tmp_path):
    tick = os.sysconf("SC_CLK_TCK")
    for pid, parent, name, ticks in (
        (7, 1, "server", 3),
        (8, 7, "a) R 1 (b", 4),
        (9, 8, "c", 5),
        (10, 1, "other", 100),
    ):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(
            f"{pid} ({name}) S {parent} {'0 ' * 9}{ticks * tick} {tick} 0 0"
        )
    assert tree_seconds(7, tmp_path) == 3 + 4 + 5 + 3
    assert tree_seconds(9, tmp_path) == 6
    assert tree_seconds(99, tmp_path) is None
