"""Clients that people have, unchanged, over a real socket.

Load generators and fuzzers are programs, run by `make test-clients`.
"""

import json
import re
import shutil
import subprocess

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from monge.api import built_in
from tests.serve.process import ENVIRONMENT, served
from tests.serve.served import live, toy_app, toy_decoder

PROMPT = "once upon"
TURNS = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def url():
    with live(toy_app(api_keys=("secret",))) as address:
        yield address


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as made:
        yield made


def library_text(prompt=PROMPT, seed=1):
    (result,) = toy_decoder().generate(prompt, seed=seed, temperature=1.0, max_new_tokens=12)
    return result.text


def test_models_and_a_completion(client):
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").owned_by == "monge"
    answer = client.completions.create(model="toy", prompt=PROMPT, seed=1, max_tokens=12)
    assert answer.choices[0].text == library_text()
    assert answer.model_extra["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


def test_the_openai_client_chats_and_streams(client):
    answer = client.chat.completions.create(
        model="toy", messages=TURNS, seed=1, max_completion_tokens=12, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].message.content == library_text("Instruction: hello\nResponse:")
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    fields = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 12}
    chunks = [*client.chat.completions.create(model="toy", messages=TURNS, seed=1, **fields)]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage.total_tokens > 0
    assert chunks[-1].model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


def test_errors_are_the_clients_own(client, url):
    grammar = {"type": "json_object"}
    with pytest.raises(openai.BadRequestError, match="response_format: expected a fast") as caught:
        client.chat.completions.create(model="toy", messages=TURNS, response_format=grammar)
    assert caught.value.param == "response_format"
    with pytest.raises(openai.NotFoundError, match="serves 'toy' and nothing else"):
        client.completions.create(model="gpt-4", prompt="a")
    stranger = client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError, match="needs an API key"):
        stranger.models.list()


TARGET = str(built_in("target"))
OFFLINE = ENVIRONMENT | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def program(line, **options):
    """Run a program to its end."""
    name, *arguments = line.split()
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"needs the program {name}; make test-clients makes its environment")
    done = subprocess.run(
        [path, *arguments], capture_output=True, text=True, timeout=600, env=OFFLINE, **options
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def pair():
    """The built-in pair behind `monge serve`."""
    with served() as (_, url):
        yield url


@pytest.mark.clients
def test_schemathesis_finds_no_server_error(tmp_path):
    with live(toy_app(toy_decoder(controller=("fixed", "fsm")), request_timeout_s=20)) as url:
        output = program(
            f"schemathesis run {url}/openapi.json --max-examples 40 --seed 1 "
            "--phases coverage,fuzzing "
            "--checks not_a_server_error,status_code_conformance,unsupported_method",
            cwd=tmp_path,
        )
    assert re.search(r"(\d+) generated", output), output


@pytest.mark.clients
def test_vllm_bench_reads_the_acceptance(pair, tmp_path):
    program(
        f"vllm bench serve --backend openai --base-url {pair} --model built-in "
        f"--tokenizer {TARGET} --temperature 0 --dataset-name random --random-input-len 32 "
        "--random-output-len 24 --num-prompts 8 --max-concurrency 4 --save-result "
        f"--result-dir {tmp_path} --disable-tqdm"
    )
    (written,) = tmp_path.glob("*.json")
    result = json.loads(written.read_text())
    assert (result["completed"], result["failed"]) == (8, 0)
    assert 0 < result["spec_decode_accepted_tokens"] <= result["spec_decode_draft_tokens"]
    assert result["spec_decode_acceptance_length"] > 1.0
    rates = result["spec_decode_per_position_acceptance_rates"]
    assert len(rates) == 3, "the depth of the default tree"


@pytest.mark.clients
def test_guidellm_keeps_the_acceptance_of_every_request(pair, tmp_path):
    written = tmp_path / "result.json"
    program(
        f"guidellm run --backend kind=openai_http,target={pair},model=built-in "
        "--profile kind=concurrent,streams=3 --constraint kind=max_requests,count=6 "
        f"--tokenizer kind=hf_auto,model={TARGET} "
        "--data kind=synthetic_text,prompt_tokens=32,output_tokens=24 "
        f"--output kind=json,path={written} --disable-console-interactive"
    )
    (benchmark,) = json.loads(written.read_text())["benchmarks"]
    totals = {"successful": 6, "errored": 0, "incomplete": 0, "total": 6}
    assert benchmark["metrics"]["request_totals"] == totals
    for request in benchmark["requests"]["successful"]:
        told = request["response_metrics"]["speculative_decoding"]
        assert sum(told["acceptance_histogram"]) == told["num_spec_steps"] > 0


CHOICES = {"The history of": [" the world", " of of"], "She opened the door and": [" looked out"]}


@pytest.mark.clients
def test_lm_eval_scores_choices_as_the_target_does(pair, tmp_path):
    rows = [
        {"question": text, "choices": [*choices, " zebra"]} for text, choices in CHOICES.items()
    ]
    data = tmp_path / "choices.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "choices",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "0",
        "target_delimiter": "",
    }
    (tmp_path / "choices.yaml").write_text(json.dumps(task))  # JSON is YAML
    program(
        f"lm_eval run --model local-completions --tasks choices --include_path {tmp_path} "
        f"--model_args model=built-in,base_url={pair}/v1/completions,tokenizer={TARGET},num_concurrent=8 "
        f"--log_samples --output_path {tmp_path}"
    )
    (written,) = tmp_path.rglob("samples_choices*.jsonl")
    network = AutoModelForCausalLM.from_pretrained(TARGET, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    for line in written.read_text().splitlines():
        sample = json.loads(line)
        text = sample["doc"]["question"]
        start = len(tokenizer(text).input_ids)
        for choice, ((score, _),) in zip(sample["doc"]["choices"], sample["resps"], strict=True):
            token_ids = torch.tensor([tokenizer(text + choice).input_ids])
            scores = network(token_ids).logits[0].log_softmax(-1)[:-1]
            expected = scores.gather(1, token_ids[0, 1:, None])[start - 1 :].sum().item()
            assert float(score) == pytest.approx(expected, abs=1e-4)
