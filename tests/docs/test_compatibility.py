"""The table of compatible families says what the code decides."""

import pytest

from tests.docs.compatibility import cells, committed, families
from tests.engine.compiling import require, shared_programs

ROWS = committed()
HOW = "run: python -m tests.docs.compatibility"


@pytest.mark.filterwarnings("ignore")  # hints to install faster kernels
@pytest.mark.parametrize("name", families())
def test_the_table_says_what_the_code_decides(name):
    assert cells(name, compiles=ROWS[name][-1] == "yes") == ROWS[name], HOW


def test_the_table_has_no_other_family():
    assert set(ROWS) == set(families()), HOW


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_the_compiled_column(tmp_path_factory):
    require("compiled")
    with shared_programs(tmp_path_factory):
        assert {name: cells(name) for name in families()} == ROWS, HOW
