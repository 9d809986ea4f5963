import io
import json
import sys

import pytest
from rich.console import Console
from rich.text import Text
from tqdm import auto as tqdm_auto
from tqdm import tqdm

from monge.cli.console import notes
from monge.cli.progress import QUIET_S, Stage, Work, call_bar, duration, figures, working
from monge.runtime.notices import waiting


class FakeClock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return FakeClock()


def work_on(clock, *, is_terminal=False, **options):
    console = Console(
        file=io.StringIO(), force_terminal=is_terminal, width=100, color_system=None, **options
    )
    return Work(console, clock), console.file


def test_lines_where_there_is_no_terminal(clock):
    work, said = work_on(clock)
    stage = work.stage("rows", 30)
    for _ in range(30):
        clock.now += 1
        stage.advance()
        work.tick()
    clock.now += 2 * QUIET_S
    work.tick()
    assert said.getvalue().splitlines() == [
        "rows: 10 of 30, 10 s so far, about 20 s left",
        "rows: 20 of 30, 20 s so far, about 10 s left",
    ], "nothing is said of complete work"


def test_estimates(clock):
    work, _ = work_on(clock)
    stage = work.stage("steps", 5)
    for _ in range(2):
        clock.now += 60  # an estimate from the last seconds alone would know no speed
        stage.advance()
    assert figures(stage.task) == "2 of 5, 2 min so far, about 3 min left"
    stage = work.stage("training steps", 100, is_begun=False)
    stage.advance(80)  # kept by an earlier run
    clock.now += 10
    stage.advance(5)
    assert figures(stage.task) == "85 of 100, 10 s so far, about 30 s left"
    stage.restart("rows", 50, done=40)
    clock.now += 10
    stage.reach(45)
    assert figures(stage.task) == "45 of 50, 10 s so far, about 10 s left"


def test_expected_seconds_pass_by_themselves(clock):
    work, said = work_on(clock)
    with work.waiting("compiling", 25):
        for seconds in (10, 20):
            clock.now += seconds
            work.tick()
    clock.now += 20
    work.tick()
    with work.waiting("loading the models"):
        clock.now += 75
        work.tick()
    assert said.getvalue().splitlines() == [
        "compiling: 10 s so far, about 15 s left",
        "compiling: 30 s so far, 25 s were expected",
        "loading the models: 1 min 15 s so far",
    ]


def test_lines_become_rare_and_say_once_that_an_estimate_was_wrong(clock):
    work, said = work_on(clock)
    with work.waiting("compiling", 15):
        for _ in range(100):
            clock.now += 1
            work.tick()
    assert said.getvalue().splitlines() == [
        "compiling: 10 s so far, about 5 s left",
        "compiling: 20 s so far, 15 s were expected",
        "compiling: 40 s so far",
        "compiling: 1 min 20 s so far",
    ]


def test_a_bar_on_a_terminal(clock):
    work, said = work_on(clock, is_terminal=True, force_interactive=True)
    with work:
        stage = work.stage("rows", 40)
        clock.now += 10
        stage.advance(10)
        work.tick()
    shown = said.getvalue()
    assert "10 of 40, 10 s so far, about 30 s left" in shown
    assert "━" in shown


def test_the_library_says_what_takes_long(monkeypatch):
    shown = []
    with working() as work:
        stage = work.stage
        monkeypatch.setattr(work, "stage", lambda *a, **k: shown.append(a) or stage(*a, **k))
        with waiting("compiling", 60):
            pass
        with working("within") as inner:
            assert inner is work
    with waiting("compiling alone", 60):
        pass
    assert shown == [("compiling",), ("within",)]


def test_calls_are_counted():
    with call_bar() as on_call, working() as work:
        on_call("tuning")
        on_call("starting", 3)
        for name in ("plain", "monge", "monge"):
            on_call(name)
        (task,) = work.tasks
        assert (task.description, task.completed, task.total) == ("monge", 2, 3)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0 s"), (59.6, "1 min"), (200, "3 min 20 s"), (3600, "1 h"), (7500, "2 h 5 min")],
)
def test_durations(seconds, said):
    assert duration(seconds) == said


def test_a_batch_is_counted_and_streamed_text_is_not(generate, monkeypatch):
    """Every line of progress is due at once, and none is printed within the text."""
    monkeypatch.setattr("monge.cli.progress.QUIET_S", -1.0)
    advance, told = Stage.advance, []

    def noted(stage, count=1):
        advance(stage, count)
        told.append((stage.task.description, stage.task.completed, stage.task.total))

    monkeypatch.setattr(Stage, "advance", noted)
    result = generate("Once", "--max-new-tokens", 6, "--ignore-eos")
    assert result.exit_code == 0
    assert result.stdout.strip()
    assert "decoding tokens" not in [*(name for name, *_ in told), result.stderr]
    assert json.loads(generate("Once", "--max-new-tokens", 2, "--json").stdout)["token_ids"]
    assert told[-1] == ("decoding tokens", 2, 2)


def test_the_host_draws_no_bars_where_ours_are(capsys):
    with working():
        assert list(tqdm([1, 2], desc="Converting")) == [1, 2]
        assert list(tqdm_auto.tqdm([1], desc="Loading")) == [1]
    assert capsys.readouterr().err == ""
    assert list(tqdm([1], desc="Own")) == [1]
    assert "Own" in capsys.readouterr().err


def test_messages_stand_above_bars(monkeypatch):
    """Each on lines of its own, between two drawings of the bar."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with working() as work:
        work.stage("reading a model with a name that is longer than most", 40).advance(10)
        work.refresh()
        notes().print("what takes long is said")
        sys.stderr.write("a warning of the host\n")
        work.refresh()
    lines = [Text.from_ansi(line).plain.strip() for line in terminal.getvalue().splitlines()]
    assert "what takes long is said" in lines
    assert "a warning of the host" in lines
