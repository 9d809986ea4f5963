"""Load generators and fuzzers that people have, as programs, against a server.

Run by `make test-clients`.
"""

import json
import re
import shutil
import subprocess

import pytest

from monge.api import built_in
from tests.serve.process import ENVIRONMENT, served
from tests.serve.served import live, toy_app, toy_decoder

pytestmark = pytest.mark.clients
TARGET = str(built_in("target"))
OFFLINE = ENVIRONMENT | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def client(name, *arguments, **options):
    """Run a program to its end."""
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"needs the program {name}; make test-clients makes its environment")
    done = subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=600, env=OFFLINE, **options
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def pair():
    """The built-in pair behind `monge serve`."""
    with served() as (_, url):
        yield url


def test_schemathesis_finds_no_server_error(tmp_path):
    with live(
        toy_app(toy_decoder(controller=("fixed", "fsm")), settings={"request_timeout_s": 20})
    ) as url:
        checks = "not_a_server_error,status_code_conformance,unsupported_method"
        arguments = [
            "--checks",
            checks,
            "--max-examples",
            "40",
            "--seed",
            "1",
            "--phases",
            "coverage,fuzzing",
        ]
        output = client("schemathesis", "run", f"{url}/openapi.json", *arguments, cwd=tmp_path)
    assert re.search(r"(\d+) generated", output), output


def test_vllm_bench_reads_the_acceptance(pair, tmp_path):
    arguments = [
        "--backend",
        "openai",
        "--base-url",
        pair,
        "--model",
        "built-in",
        "--tokenizer",
        TARGET,
        "--temperature",
        "0",
    ]
    arguments += [
        "--dataset-name",
        "random",
        "--random-input-len",
        "32",
        "--random-output-len",
        "24",
        "--num-prompts",
        "8",
    ]
    arguments += [
        "--max-concurrency",
        "4",
        "--save-result",
        "--result-dir",
        str(tmp_path),
        "--disable-tqdm",
    ]
    client("vllm", "bench", "serve", *arguments)
    (written,) = tmp_path.glob("*.json")
    result = json.loads(written.read_text())
    assert (result["completed"], result["failed"]) == (8, 0)
    assert 0 < result["spec_decode_accepted_tokens"] <= result["spec_decode_draft_tokens"]
    assert result["spec_decode_acceptance_length"] > 1.0
    assert len(result["spec_decode_per_position_acceptance_rates"]) == 3, (
        "the depth of the default tree"
    )


def test_guidellm_keeps_the_acceptance_of_every_request(pair, tmp_path):
    written = tmp_path / "result.json"
    arguments = [
        "--backend",
        f"kind=openai_http,target={pair},model=built-in",
        "--profile",
        "kind=concurrent,streams=3",
    ]
    arguments += [
        "--constraint",
        "kind=max_requests,count=6",
        "--tokenizer",
        f"kind=hf_auto,model={TARGET}",
    ]
    arguments += [
        "--data",
        "kind=synthetic_text,prompt_tokens=32,output_tokens=24",
        "--output",
        f"kind=json,path={written}",
    ]
    client("guidellm", "run", *arguments, "--disable-console-interactive")
    (benchmark,) = json.loads(written.read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"] == {
        "successful": 6,
        "errored": 0,
        "incomplete": 0,
        "total": 6,
    }
    for request in benchmark["requests"]["successful"]:
        told = request["response_metrics"]["speculative_decoding"]
        assert sum(told["acceptance_histogram"]) == told["num_spec_steps"] > 0
