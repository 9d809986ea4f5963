"""`--out` is refused before the work is done."""

import os

import pytest

from monge.cli.out import check_out_file, check_out_folder
from monge.core.errors import OptionError


def test_nothing_is_made(tmp_path):
    check_out_folder(tmp_path / "deep" / "er")
    check_out_file(tmp_path / "deep" / "run.mlog")
    assert list(tmp_path.iterdir()) == []


def test_files_and_folders_in_each_others_place(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "deep"):
        with pytest.raises(
            OptionError,
            match=r"--out .*: cannot write results: '.*/file' is a "
            r"file; name a folder",
        ):
            check_out_folder(folder)
    with pytest.raises(OptionError, match=r"is a folder; name a file in it"):
        check_out_file(tmp_path)


def test_no_permission(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(OptionError, match="no permission to write to"):
        check_out_folder(tmp_path / "deep")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("bench micro --threads 0", "--threads must be at least 1; got 0"),
        ("train shape --threads 0 --out OUT", "--threads must be at least 1; got 0"),
        ("train shape --out FILE", "is a file; name a folder"),
        ("bench decode --threads 0 --out OUT", "--threads must be at least 1; got 0"),
    ],
)
def test_refused_before_any_text_is_written(run, tmp_path, arguments, message):
    places = {"FILE": tmp_path / "file", "EMPTY": tmp_path / "empty", "OUT": tmp_path / "out"}
    places["FILE"].touch()
    places["EMPTY"].mkdir()
    result = run(*(places.get(word, word) for word in arguments.split()))
    assert result.exit_code == 2
    assert message in result.stderr
    assert not places["OUT"].exists()
