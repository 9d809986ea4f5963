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
        ("gpu --out FILE", "is a file; name a folder"),
        ("never_slower --out FILE", "is a file; name a folder"),
        ("never_slower --way slow --out OUT", "unknown way 'slow'"),
        ("shape --out FILE", "is a file; name a folder"),
        ("acceptance --temperature 0 --no-plots --out OUT", "needs temperatures above 0"),
        ("acceptance --candidates 0 --no-plots --out OUT", "--candidates must lie in 1..32; got 0"),
        ("acceptance --nodes 1 --no-plots --out OUT", "a node budget must be at least 2; got 1"),
        ("control --rounds 0", "rounds must be at least 1"),
        ("grow OUT --params large", "cannot read the size 'large'"),
        ("verify --quick --rules optimum", "unknown verifier 'optimum'"),
        ("verify --quick --candidates 0", "widths must be positive"),
        ("verify --quick --tree bush", "unknown tree 'bush'"),
        ("verify --quick --repeats 0", "repeats must be at least 1"),
    ],
)
def test_refused_before_any_text_is_written(lab, tmp_path, arguments, message):
    places = {"FILE": tmp_path / "file", "EMPTY": tmp_path / "empty", "OUT": tmp_path / "out"}
    places["FILE"].touch()
    places["EMPTY"].mkdir()
    result = lab(*(places.get(word, word) for word in arguments.split()))
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert not places["OUT"].exists()
