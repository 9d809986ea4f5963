"""The server around OpenVINO GenAI: what it asks of the engine, and what it answers."""

import importlib.util
import json
import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from lab.peers import workers

END = 0


class FakePipeline:
    """Writes the number of requests of the batch, and ends texts of seed 7 after one token."""

    def __init__(self, *given):
        self.given, self.batches, self.configs = given, [], []

    def get_tokenizer(self):
        return SimpleNamespace(
            encode=lambda text: SimpleNamespace(input_ids=[[ord(one) for one in text]]),
            decode=lambda ids: "".join(map(chr, ids)),
            get_eos_token_id=lambda: END,
        )

    def get_config(self):
        return SimpleNamespace(stop_token_ids=set())

    def generate(self, ids, configs):
        self.batches.append([one[0] for one in ids])
        self.configs += configs
        if any(one == [[6]] for one in ids):
            raise RuntimeError("out of blocks")
        texts = [
            [65, END] if getattr(config, "rng_seed", None) == 7 else [65] * config.max_new_tokens
            for config in configs
        ]
        return [SimpleNamespace(m_generation_ids=[text]) for text in texts]


@pytest.fixture
def engine(monkeypatch):
    pipelines = []
    make = lambda *given: pipelines.append(FakePipeline(*given)) or pipelines[0]  # noqa: E731
    draft = lambda folder, device, **options: (folder, options)  # noqa: E731
    host = SimpleNamespace(ContinuousBatchingPipeline=make, draft_model=draft)
    host.GenerationConfig = host.SchedulerConfig = SimpleNamespace
    monkeypatch.setitem(sys.modules, "openvino_genai", host)
    tensors = SimpleNamespace(Tensor=lambda array: array.tolist())
    monkeypatch.setitem(sys.modules, "openvino", tensors)
    path = Path(workers.__file__).with_name("openvino_server.py")
    spec = importlib.util.spec_from_file_location("openvino_server", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    options = {"options": {"a": 1}, "speculation": {"num_assistant_tokens": 4}}
    completions = module.Completions("target", "draft", is_lookup=False, **options)
    server = ThreadingHTTPServer(("127.0.0.1", 0), module.handler(completions, "small"))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}/v1", pipeline=pipelines[0])
    server.shutdown()
    server.server_close()


def ask(engine, **fields):
    request = Request(f"{engine.url}/completions", data=json.dumps(fields).encode())
    with urlopen(request, timeout=10) as answer:
        (choice,) = json.load(answer)["choices"]
        return choice


def test_models_text_and_ids(engine):
    with urlopen(f"{engine.url}/models", timeout=10) as answer:
        assert [one["id"] for one in json.load(answer)["data"]] == ["small"]
    assert engine.pipeline.given[-1] == {"a": 1, "draft_model": ("draft", {"a": 1})}
    choice = ask(engine, prompt="ab", max_tokens=2, logprobs=1)
    assert (choice["text"], choice["finish_reason"]) == ("AA", "length")
    assert choice["logprobs"]["tokens"] == ["A", "A"]
    by_id = {"logprobs": 1, "return_tokens_as_token_ids": True, "n": 1}
    choice = ask(engine, prompt=[5, 9], max_tokens=3, **by_id)
    assert choice["logprobs"]["tokens"] == ["token_id:65"] * 3
    choice = ask(engine, prompt="a", max_tokens=2, seed=7)
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    assert engine.pipeline.batches == [[[97, 98]], [[5, 9]], [[97]]]


def test_sampling_rules(engine):
    ask(engine, prompt="a", temperature=0)
    ask(engine, prompt="a")
    ask(engine, prompt="a")
    ask(engine, prompt="a", temperature=0.5, top_p=0.8, top_k=3, seed=11)
    greedy, plain, other, ruled = engine.pipeline.configs
    assert plain.rng_seed != other.rng_seed, "texts without a seed differ"
    assert not greedy.do_sample
    assert (plain.do_sample, plain.temperature, plain.top_p, plain.top_k) == (True, 1.0, 1.0, 2**31)
    assert (ruled.temperature, ruled.top_p, ruled.top_k, ruled.rng_seed) == (0.5, 0.8, 3, 11)
    assert ruled.num_assistant_tokens == 4


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"prompt": "a", "stop": ["b"]}, 400, "unknown fields"),
        ({"prompt": "a", "n": 2}, 400, "n must be 1; got 2"),
        ({}, 400, "KeyError: 'prompt'"),
        ({"prompt": [6]}, 500, "RuntimeError: out of blocks"),
    ],
)
def test_refusals(engine, fields, status, message):
    with pytest.raises(HTTPError) as error:
        ask(engine, **fields)
    assert error.value.code == status
    assert message in json.load(error.value)["error"]["message"]
