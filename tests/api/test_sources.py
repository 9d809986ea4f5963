"""What a model is, is found out once for each model of a `load`."""

import pytest

import monge
from monge.api import built_in
from monge.loading.sources import ModelSource
from tests.api.test_gguf import write


@pytest.fixture
def read_models(monkeypatch):
    """What was given where a source was made."""
    models, of = [], ModelSource.of.__func__

    def noting(cls, model):
        if not isinstance(model, ModelSource):
            models.append(model)
        return of(cls, model)

    monkeypatch.setattr(ModelSource, "of", classmethod(noting))
    return models


def test_a_load_makes_one_source_for_each_model(read_models, tmp_path, monkeypatch):
    monkeypatch.setenv("MONGE_CACHE", str(tmp_path / "cache"))
    file, head = write(tmp_path / "tiny.gguf"), built_in("shape")
    for models, expected in (
        ({}, [None, built_in("draft")]),
        ({"target": file, "draft": str(file), "backend": "eager"}, [file, str(file)]),
        ({"draft": head}, [None, head]),
    ):
        read_models.clear()
        monge.load(**models)
        assert read_models == expected
