"""The table of compatible families says what the code decides."""

import pytest

from tests.docs.compatibility import cells, committed, families
from tests.engine.compiling import require, shared_programs

ROWS = committed()
HOW = "run: python -m tests.docs.compatibility"


def test_the_table_has_every_family():
    assert set(ROWS) == set(families()), HOW


@pytest.mark.filterwarnings("ignore")  # hints to install faster kernels
@pytest.mark.parametrize("name", families())
def test_a_row_is_what_the_code_decides(name):
    assert cells(name, compiles=ROWS[name][-1] == "yes") == ROWS[name], HOW


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_the_compiled_column(tmp_path_factory):
    require("compiled")
    with shared_programs(tmp_path_factory):
        assert {name: cells(name) for name in families()} == ROWS, HOW


def test_a_stale_row_is_found(monkeypatch):
    monkeypatch.setattr("tests.docs.compatibility.HfTreeModel", int)
    assert cells("llama", compiles=True) != ROWS["llama"]
