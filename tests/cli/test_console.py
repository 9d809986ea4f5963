"""Tables, messages within streamed text, and places of output that are refused before the work is done."""

import io
import os
import pty
import sys
import termios
from contextlib import suppress

import pytest

from monge.cli.console import as_markdown, notes, plain_table, print_tables, streaming
from monge.cli.options import check_out_file, check_out_folder
from monge.core.errors import OptionError
from monge.core.files import write_text

NAMES = ("model best_first(num_nodes=16, depth=6) on_the_fly", "ngram fixed(max_depth=4)")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_no_cell_is_cut(monkeypatch, capsys, width):
    monkeypatch.setenv("COLUMNS", str(width))
    table = plain_table("title", "configuration", ("tokens a round", "tokens/s", "speed-up"))
    for name in NAMES:
        table.add_row(name, "3.429 (3.43..3.43)", "112.6", "1.21x")
    print_tables([table])
    text = capsys.readouterr().out
    assert "…" not in text
    for cell in ("3.429 (3.43..3.43)", "112.6", "1.21x"):
        assert text.count(cell) == len(NAMES)
    if width >= len(NAMES[0]):
        assert all(name in text for name in NAMES)
    assert all(len(line) <= width for line in text.splitlines())


def test_markdown():
    table = plain_table("title [bold]here[/]", "name", ["a|b"])
    table.add_row("x | y", "1")
    table.caption = "said of\nit"
    rows = [r"| name | a\|b |", "|---|--:|", r"| x \| y | 1 |"]
    assert as_markdown(table).splitlines() == ["**title here**", "", *rows, "", "said of it"]


@pytest.mark.parametrize("err", [Terminal, io.StringIO])
@pytest.mark.parametrize("out", [Terminal, io.StringIO])
def test_messages_within_streamed_text(monkeypatch, out, err):
    """On one terminal they begin a line; else they stay out of the text, and wait for its end in a pipe."""
    told, said = out(), err()
    monkeypatch.setattr(sys, "stdout", told)
    monkeypatch.setattr(sys, "stderr", said)
    with streaming() as write:
        write("in the ")
        notes().print("compiling")
        now = said.getvalue()
        write("United States")
    assert said.getvalue() == "compiling\n"
    cut = "\n" if told.isatty() and said.isatty() else ""
    assert told.getvalue() == f"in the {cut}United States\n"
    assert now == ("compiling\n" if told.isatty() else "")


def test_places_of_output(tmp_path, monkeypatch):
    check_out_folder(tmp_path / "deep" / "er")
    check_out_file(tmp_path / "deep" / "run.mlog")
    assert list(tmp_path.iterdir()) == [], "nothing is made"
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "deep"):
        refused = r"--out .*: cannot write results: '.*/file' is a file; name a folder"
        with pytest.raises(OptionError, match=refused):
            check_out_folder(folder)
    with pytest.raises(OptionError, match=r"is a folder; name a file in it"):
        check_out_file(tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(OptionError, match="no permission to write to"):
        check_out_folder(tmp_path / "deep")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("bench micro --threads 0", "--threads must be at least 1; got 0"),
        ("train shape --threads 0 --out OUT", "--threads must be at least 1; got 0"),
        ("train shape --out FILE", "is a file; name a folder"),
    ],
)
def test_refused_before_any_text_is_written(run, tmp_path, arguments, message):
    places = {"FILE": tmp_path / "file", "OUT": tmp_path / "out"}
    places["FILE"].touch()
    result = run(*(places.get(word, word) for word in arguments.split()))
    assert result.exit_code == 2
    assert message in result.stderr
    assert not places["OUT"].exists()


def test_files_that_cannot_be_written_are_errors_of_the_user(tmp_path):
    assert write_text(tmp_path / "new" / "page.html", "é", "the page").read_bytes() == "é".encode()
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=r"cannot write the page to '.*/file/page\.html'"):
        write_text(tmp_path / "file" / "page.html", "", "the page")


class TestTyping:
    """What is typed while text is written."""

    @pytest.fixture
    def terminal(self, monkeypatch):
        parent, child = pty.openpty()
        with os.fdopen(child) as file:
            monkeypatch.setattr(sys, "stdin", file)
            yield file
        os.close(parent)

    @pytest.mark.parametrize("error", [None, KeyboardInterrupt, BrokenPipeError])
    def test_is_not_shown(self, terminal, error):
        before = termios.tcgetattr(terminal)
        assert before[3] & termios.ECHO
        with suppress(*[error] * (error is not None)), streaming() as write:
            write("Once ")
            modes = termios.tcgetattr(terminal)
            assert not modes[3] & termios.ECHO
            assert modes[3] & termios.ISIG, "Ctrl-C is heard"
            if error is not None:
                raise error
        assert termios.tcgetattr(terminal) == before

    def test_leaves_the_terminal_of_another_process_alone(self, terminal, monkeypatch):
        monkeypatch.setattr("os.tcgetpgrp", lambda _: -1)
        before = termios.tcgetattr(terminal)
        with streaming():
            assert termios.tcgetattr(terminal) == before
