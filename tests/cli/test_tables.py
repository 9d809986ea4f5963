import io
import json

import pytest
from rich.console import Console

from monge.cli.tables import as_markdown, plain_table, print_tables

NAMES = ("model best_first(num_nodes=16, depth=6) on_the_fly", "ngram fixed(max_depth=4)")


def numbers():
    columns = ("tokens a round", "tokens/s", "speed-up")
    table = plain_table("title", "configuration", columns)
    for name in NAMES:
        table.add_row(name, "3.429 (3.43..3.43)", "112.6", "1.21x")
    return table


def printed(table, width, **options):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_tables([table], console=console, **options)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_no_cell_is_cut(width):
    text = printed(numbers(), width)
    assert "…" not in text
    for cell in ("3.429 (3.43..3.43)", "112.6", "1.21x"):
        assert text.count(cell) == len(NAMES)
    if width >= len(NAMES[0]):
        assert all(name in text for name in NAMES)
    assert all(len(line) <= width for line in text.splitlines())


def test_names_have_their_own_line_where_the_table_is_too_wide():
    lines = [line.rstrip() for line in printed(numbers(), 60).splitlines()]
    assert NAMES[0] in lines
    header, row = lines[lines.index(NAMES[0]) - 1], lines[lines.index(NAMES[0]) + 1]
    assert len(header) == len(row)
    assert lines[1] == "configuration"


def test_prose_wraps_beside_whole_names():
    table = plain_table("room", "name")
    table.add_column("what it does")
    table.add_row("rrs_without_replacement", "Recursive rejection of candidates, one by one.")
    text = printed(table, 60)
    assert "rrs_without_replacement" in text
    assert "│" in text


def test_markdown():
    table = plain_table("title [bold]here[/]", "name", ["a|b"])
    table.add_row("x | y", "1")
    table.caption = "said of\nit"
    lines = as_markdown(table).splitlines()
    assert lines == [
        "**title here**",
        "",
        r"| name | a\|b |",
        "|---|--:|",
        r"| x \| y | 1 |",
        "",
        "said of it",
    ]


@pytest.mark.parametrize("columns", [80, 200])
def test_list_shows_whole_names(run, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    result = run("list")
    assert result.exit_code == 0
    names = json.loads(run("list", "--json").stdout)
    for room in ("verifiers", "drafters", "trees", "controllers"):
        for part in names[room]:
            assert part["name"] in result.stdout
    assert "WithoutReplacement" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= columns


def test_list_as_markdown(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = run("list", "--markdown")
    assert "| name | what it does | settings and defaults |\n|---|---|---|\n" in result.stdout
    assert "━" not in result.stdout
