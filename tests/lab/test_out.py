"""What is refused before any text is written."""

import pytest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("drafters --threads 0 --out OUT", "--threads must be at least 1; got 0"),
        ("heads --threads 0 --out OUT", "--threads must be at least 1; got 0"),
        ("peers --threads 0 --out OUT", "--threads must be at least 1; got 0"),
        ("shape --threads 0 --out OUT", "--threads must be at least 1; got 0"),
        ("drafters --num-prompts 0 --out OUT", "--num-prompts must be at least 1; got 0"),
        ("drafters --head EMPTY --out OUT", "cannot read"),
        ("heads --head EMPTY --out OUT", "cannot read"),
        ("drafters --out FILE", "is a file; name a folder"),
        ("heads --out FILE", "is a file; name a folder"),
        ("peers --out FILE", "is a file; name a folder"),
        ("acceptance --out FILE", "is a file; name a folder"),
        ("shape --out FILE", "is a file; name a folder"),
    ],
)
def test_refused_before_any_text_is_written(lab, tmp_path, arguments, message):
    places = {"FILE": tmp_path / "file", "EMPTY": tmp_path / "empty", "OUT": tmp_path / "out"}
    places["FILE"].touch()
    places["EMPTY"].mkdir()
    result = lab(*(places.get(word, word) for word in arguments.split()))
    assert result.exit_code == 2
    assert message in result.stderr
    assert not places["OUT"].exists()
