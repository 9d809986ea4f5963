"""Sampling settings of requests that state none: the checkpoint's, below the operator's and the request's."""

import json

import pytest
from fastapi.testclient import TestClient
from gguf import GGUFWriter

from monge.core.errors import OptionError
from monge.loading.sampling_defaults import sampling_defaults
from monge.options import ServeOptions
from monge.serve.api.request_parser import RequestParser
from monge.serve.api.schemas import CompletionRequest
from monge.serve.http.app import create_app
from monge.serve.settings import checked_options, default_sampling
from tests.serve.served import toy_decoder


@pytest.fixture
def folder(tmp_path):
    stated = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 7}
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def rules(options, folder=None, **body):
    options = checked_options(options, folder and str(folder))
    parser = RequestParser(toy_decoder(), options, max_sequence_tokens=400)
    content = json.dumps({"prompt": "hello", **body}).encode()
    return parser.parse(content, CompletionRequest, "one").choices[0].rules


def test_a_checkpoint_gives_the_defaults_and_a_request_overrides_them(folder):
    stated = rules(ServeOptions(), folder)
    assert (stated.temperature, stated.top_p, stated.top_k) == (0.6, 0.9, 20)
    given = rules(ServeOptions(), folder, temperature=1.0, top_p=1.0, top_k=-1)
    assert (given.temperature, given.top_p, given.top_k) == (1.0, 1.0, None)


def test_the_operator_overrides_or_ignores_the_checkpoint(folder):
    text = '{"temperature": 0.2, "top_k": 0}'
    kept = checked_options(ServeOptions(override_generation_config=text), str(folder))
    assert default_sampling(kept) == {"temperature": 0.2, "top_p": 0.9, "max_new_tokens": 7}
    none = checked_options(ServeOptions(generation_config="none"), str(folder))
    assert default_sampling(none) == {}
    assert rules(ServeOptions()).temperature == 1.0
    override = ServeOptions(override_generation_config='{"top_p": 0.5}')
    assert rules(override).top_p == 0.5


@pytest.mark.parametrize("text", [None, '{"temperature": 0.2, "top_k": 0}'])
def test_the_server_has_the_defaults_that_were_found_with_its_target(folder, text):
    options = checked_options(ServeOptions(override_generation_config=text), str(folder))
    with TestClient(create_app(toy_decoder(), options)) as client:
        (card,) = client.get("/v1/models").json()["data"]
        assert card["default_sampling"] == default_sampling(options)
        assert card["default_sampling"]["top_p"] == 0.9
        messages = [{"role": "user", "content": "hello"}]
        body = {"messages": messages, "ignore_eos": True}
        answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize("text", ["{", "[]", '{"top": 1}', '{"top_p": 0}', '{"temperature": "1"}'])
def test_a_wrong_override_is_refused(text):
    with pytest.raises(OptionError, match="override-generation-config"):
        checked_options(ServeOptions(override_generation_config=text))


def test_greedy_checkpoints_and_headers_are_read(folder):
    (folder / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}')
    assert sampling_defaults(folder) == {"temperature": 0.0}
    (folder / "generation_config.json").unlink()
    assert sampling_defaults(folder) == {}


def test_a_header_of_a_gguf_file_is_read(tmp_path):
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_float32("general.sampling.temp", 0.7)
    writer.add_float32("general.sampling.top_p", 0.95)
    writer.add_int32("general.sampling.top_k", 64)
    writer.add_float32("general.sampling.penalty_repeat", 1.05)
    for name in ("block_count", "embedding_length", "feed_forward_length", "head_count"):
        getattr(writer, f"add_{name}")(1)
    for name in ("context_length", "vocab_size", "rope_dimension_count", "layer_norm_rms_eps"):
        getattr(writer, f"add_{name}")(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = {"temperature": 0.7, "top_p": 0.95, "top_k": 64, "repetition_penalty": 1.05}
    assert sampling_defaults(path) == found
