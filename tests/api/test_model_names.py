"""A wrong name of a model is refused at once: the hub is asked once, or not at all."""

from contextlib import nullcontext

import huggingface_hub
import pytest
from huggingface_hub import errors

import monge
from monge import ModelLoadError
from monge.loading import hub


@pytest.fixture
def asked(monkeypatch):
    """Questions to a hub that cannot be reached."""
    questions = []

    def metadata(url, *, timeout):
        questions.append(url)
        assert timeout <= 5
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
    hub._ask_hub.cache_clear()
    yield questions
    hub._ask_hub.cache_clear()


def test_the_hub_is_asked_once(asked):
    with pytest.raises(ModelLoadError, match=r"'smollm2'\?.*cannot be asked: Name or service"):
        monge.load("smolm2")
    assert len(asked) == 1
    assert asked[0].endswith("/smolm2/resolve/main/config.json")
    with pytest.raises(ModelLoadError, match="cannot be asked"):
        monge.load("smolm2")  # the network may be back
    assert len(asked) == 2


def test_the_nearest_folder_is_named(asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-target").mkdir()
    expected = r"no folder './my-tarket' \(did you mean './my-target'"
    with pytest.raises(ModelLoadError, match=expected):
        monge.load("./my-tarket")
    with pytest.raises(ModelLoadError, match="did you mean 'my-target'"):
        monge.load(draft="my-tarket")
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nobody/nothing", "HF_HUB_OFFLINE"),  # `tests/conftest.py` sets the variable
        ("a/b/c", "NAME or OWNER/NAME"),
        ("two words", "NAME or OWNER/NAME"),
    ],
)
def test_names_that_cannot_be_a_model_are_refused(name, message):
    with pytest.raises(ModelLoadError, match=message):
        monge.load(name)


def test_a_cached_model_is_loaded_without_asking_the_hub(asked, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: "/cached")
    hub.check_model_name("somebody/something")
    assert asked == []


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (errors.RepositoryNotFoundError, "no model of that name"),
        (errors.GatedRepoError, "accounts that asked for it"),
        (errors.EntryNotFoundError, None),  # the host says more
    ],
)
def test_answers_of_the_hub(asked, monkeypatch, kind, reason):
    def metadata(url, *, timeout):
        raise kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
    expected = nullcontext() if reason is None else pytest.raises(ModelLoadError, match=reason)
    with expected:
        hub.check_model_name("somebody/something")
