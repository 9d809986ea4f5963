import io
import json

import pytest
from rich.console import Console

from monge.cli.progress import QUIET_S, Stage, Work, call_bar, duration, working
from monge.engine.notices import waiting


class FakeClock:
    def __init__(self):
        self.now = 100.0

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


def test_a_line_every_ten_seconds(clock):
    work, said = work_on(clock)
    stage = work.stage("rows", 60)
    for _ in range(30):
        clock.now += 1
        stage.advance()
        work.tick()
    assert said.getvalue().splitlines() == [
        "rows: 10 of 60, 10 s so far, about 50 s left",
        "rows: 20 of 60, 20 s so far, about 40 s left",
        "rows: 30 of 60, 30 s so far, about 30 s left",
    ]


def test_nothing_is_said_of_short_or_complete_work(clock):
    work, said = work_on(clock)
    stage = work.stage("rows", 2)
    clock.now += QUIET_S - 1
    work.tick()
    stage.advance(2)
    clock.now += 2 * QUIET_S
    work.tick()
    assert said.getvalue() == ""


def test_slow_steps_have_an_estimate(clock):
    """One step a minute: an estimate from the last seconds alone would know no speed."""
    stage = Stage(name="steps", clock=clock, total=5, began=clock())
    for _ in range(2):
        clock.now += 60
        stage.advance()
    assert stage.remaining_s == 180
    clock.now += 30
    assert stage.remaining_s == 225


def test_what_an_earlier_run_did_is_left_out_of_the_rate(clock):
    stage = Stage(name="training steps", clock=clock, total=100)
    stage.advance(80)  # kept by the earlier run
    clock.now += 10
    stage.advance(5)
    assert stage.done == 85
    assert stage.remaining_s == 30
    stage.restart("rows", 50, done=40)
    clock.now += 10
    stage.reach(45)
    assert stage.remaining_s == 10


def test_expected_seconds_pass_by_themselves(clock):
    work, said = work_on(clock)
    with work.waiting("compiling", 25):
        clock.now += 10
        work.tick()
        clock.now += 20
        work.tick()
    clock.now += 20
    work.tick()
    assert said.getvalue().splitlines() == [
        "compiling: 10 s so far, about 15 s left",
        "compiling: 30 s so far, 25 s were expected",
    ]


def test_unknown_totals_show_what_is_known(clock):
    work, said = work_on(clock)
    with work.waiting("loading the models"):
        clock.now += 75
        work.tick()
    assert said.getvalue() == "loading the models: 1 min 15 s so far\n"


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
    assert shown == [("compiling", 60), ("within", None)]


def test_calls_are_counted():
    with call_bar() as watch, working() as work:
        watch.step("tuning")
        watch.total(3)
        for name in ("plain", "monge", "monge"):
            watch.step(name)
        stage = work._stages[0][0]
        assert (stage.name, stage.done, stage.total) == ("monge", 2, 3)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0 s"), (59.6, "1 min"), (200, "3 min 20 s"), (3600, "1 h"), (7500, "2 h 5 min")],
)
def test_durations(seconds, said):
    assert duration(seconds) == said


def test_generate_tells_how_far_it_is(generate, monkeypatch):
    """Every clock reading is a second later, and no pause is needed between two lines."""
    monkeypatch.setattr("monge.cli.progress.QUIET_S", 0.0)
    monkeypatch.setattr("monge.cli.progress.Work._tell", lambda work: None)
    reach, said = Stage.reach, []

    def told(stage, done, total=None):
        reach(stage, done, total)
        said.append((stage.name, stage.done, stage.total))

    monkeypatch.setattr(Stage, "reach", told)
    result = generate("Once", "--max-new-tokens", 6, "--ignore-eos")
    assert result.exit_code == 0
    assert said[-1] == ("decoding tokens", 6, 6)
    assert result.stdout.strip()
    assert json.loads(generate("Once", "--max-new-tokens", 2, "--json").stdout)["token_ids"]
