"""`python -m lab.gpu`: every row in the tiny size on the CPU, failures and missing time told, goals beside figures."""

import json
import subprocess
import time

import pytest
import torch

from lab.gpu import gpu_tests
from lab.gpu.__main__ import ROWS
from lab.gpu.figures import Figure
from lab.gpu.gpu_tests import failed_tests
from lab.gpu.machine import machine_of
from lab.gpu.report import markdown, tables
from lab.gpu.rows import Outcome, Row, run_rows
from monge.core.errors import MongeError

ON_CPU = "--device cpu --size tiny"


def report(lab, folder, *arguments):
    result = lab("gpu", ON_CPU, "--out", folder, *arguments)
    assert result.exit_code == 0, result.output
    document = json.loads((folder / "report.json").read_text())
    return {row["row"]: row for row in document["rows"]}, (folder / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked_types")
def test_every_row_is_measured(lab, tmp_path):
    names = [row.name for row in ROWS[1:]]  # the first runs tests
    rows, page = report(lab, tmp_path, "--minutes 3", *(f"--rows {name}" for name in names))
    assert {name: row["missing"] for name, row in rows.items()} == dict.fromkeys(names)
    assert "| figure | measured | goal | verdict | detail |" in page
    for row in rows.values():
        assert row["figures"]
        for figure in row["figures"]:
            assert figure["goal"] is not None or figure["unit"] in {"TB/s", "ms"}
            assert min(figure["values"]) >= 0.0
            assert f"| {figure['name']} | " in page
    assert "python -m lab.gpu --device cpu --size tiny --minutes 3 --rows forward " in page


MARKED = """
import pytest

pytestmark = pytest.mark.gpu

def test_holds(): pass

@pytest.mark.parametrize("one", ["with a space"])
def test_fails(one): assert False

@pytest.mark.skip
def test_is_skipped(): pass
"""


def test_marked_tests_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_tests, "_ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text(MARKED)
    (tmp_path / "tests" / "test_other.py").write_text("assert False, 'it has no marked test'")
    (figure,) = failed_tests(machine_of("cpu", "tiny"), time.perf_counter() + 300.0)
    assert (figure.values, figure.goal) == ((1,), 0)
    assert figure.detail == "1 failed, 1 passed, 1 skipped; test_one.py::test_fails[with a space]"


def test_tests_are_counted_as_far_as_the_time_goes(monkeypatch):
    def run(command, **options):
        told = b"tests/test_one.py::test_holds PASSED [ 50%]\ntests/test_one.py::test_long "
        raise subprocess.TimeoutExpired(command, options["timeout"], output=told)

    monkeypatch.setattr(gpu_tests.subprocess, "run", run)
    (figure,) = failed_tests(machine_of("cpu", "tiny"), time.perf_counter())
    assert (figure.values, figure.detail) == ((0,), "1 passed, stopped after 0 s")


def test_no_test_is_no_success(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_tests, "_ROOT", tmp_path)
    with pytest.raises(MongeError, match="no test ran"):
        failed_tests(machine_of("cpu", "tiny"), time.perf_counter() + 300.0)


def test_without_time_everything_is_listed(lab, tmp_path):
    rows, page = report(lab, tmp_path, "--minutes 0")
    assert list(rows) == [row.name for row in ROWS]
    assert all(row["missing"].startswith("not measured: 0 s of 0 s") for row in rows.values())
    assert all(f"| {name} | not measured" in page for name in rows)


def test_only_rows_that_are_named(lab, tmp_path):
    rows, page = report(lab, tmp_path, "--rows verify --rows waits --rows verify --minutes 0")
    assert list(rows) == ["verify", "waits"]
    assert "--rows verify --rows waits" in page


def test_a_row_that_raises_does_not_stop_the_others():
    def raises(machine, until):
        torch.ones(2, 3) @ torch.ones(2, 3)

    def warns(machine, until):
        import warnings

        warnings.warn("it runs eagerly", stacklevel=1)
        return [Figure(name="one", values=(2.0, 4.0, 3.0), goal=4.0, is_least=True)]

    rows = [Row(name=work.__name__, measure=work, seconds=0) for work in (raises, warns)]
    failed, told = run_rows(rows, machine_of("cpu", "tiny"), 60.0, lambda _: None)
    assert failed.missing.startswith("failed: RuntimeError: mat1 and mat2 shapes")
    assert (told.missing, told.warnings) == (None, ["it runs eagerly"])
    about = {"versions": dict.fromkeys(("monge", "torch", "transformers")), "device": "cpu"}
    about |= dict.fromkeys(("driver", "commit", "dirty", "time_utc"))
    page = markdown({"provenance": about, "size": "tiny", "command": ""}, [failed, told])
    assert "| one | 3 (2 to 4) | ≥ 4 | missed 1.33x |" in page
    assert "| raises | failed: RuntimeError" in page
    assert "| warns | it runs eagerly |" in page


def test_the_largest_loss_is_first():
    figures = [
        Figure(name="free", values=(1.0,)),
        Figure(name="met", values=(1.0,), goal=1.0, detail="test_a[b]"),
        Figure(name="slow", values=(3.0,), goal=2.0),
        Figure(name="low", values=(1.0,), goal=2.0, is_least=True),
        Figure(name="none", values=(1.0,), goal=0.0),
        Figure(name="nothing", values=(0.0,), goal=1.0, is_least=True),
    ]
    (table,) = tables([Outcome(row="a", figures=figures)])
    assert list(table.columns[0].cells) == ["none", "nothing", "low", "slow", "met", "free"]
    assert list(table.columns[4].cells)[4] == "test_a\\[b]"
    verdicts = [cell.split()[0] for cell in table.columns[3].cells if cell]
    assert verdicts == ["missed"] * 4 + ["met"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            "",
            "finds no CUDA device. If nvidia-smi lists one",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device"),
        ),
        ("--device cpu", "--size 8b is for a GPU; on the CPU, take --size tiny"),
        ("--device cpu --size huge", "unknown size 'huge'"),
        ("--rows forwards", "unknown row 'forwards'; did you mean 'forward'"),
        ("--minutes -1", "--minutes must not be negative; got -1"),
        ("--minutes nan", "--minutes must not be negative; got nan"),
    ],
)
def test_what_cannot_be_measured_is_refused(lab, tmp_path, arguments, message):
    result = lab("gpu", arguments, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()
