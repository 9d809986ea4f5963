"""The exposition parses, and says what the scheduler says."""

import re

import pytest

from monge.serve.observe.metrics import ServerMetrics
from monge.serve.scheduling.generation import Speculation
from monge.serve.scheduling.scheduler import Snapshot
from tests.serve.served import samples

STATE = Snapshot(
    num_running=3,
    num_prefilling=1,
    num_waiting=2,
    kv_used_tokens=50,
    kv_budget_tokens=200,
    is_open=True,
    failure=None,
    num_prompt_tokens=11,
    num_generated_tokens=16,
    finished={"eos": 1, "stop": 2, "length": 4, "cancelled": 8, "deadline": 16, "error": 32},
    speculation=Speculation(num_rounds=9, num_draft_tokens=18, acceptance_histogram=(2, 3, 1, 1)),
)
VLLM = re.findall(
    r"\w+",
    """
    spec_decode_num_drafts_total spec_decode_num_draft_tokens_total
    spec_decode_num_accepted_tokens_total spec_decode_num_accepted_tokens_per_pos_total
    prompt_tokens_total generation_tokens_total request_success_total num_preemptions_total
    num_requests_running num_requests_waiting kv_cache_usage_perc
    prefix_cache_queries_total prefix_cache_hits_total
    time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket
    request_time_per_output_token_seconds_bucket e2e_request_latency_seconds_bucket
    request_queue_time_seconds_bucket request_inference_time_seconds_bucket
    request_prefill_time_seconds_bucket request_decode_time_seconds_bucket
    iteration_tokens_total_bucket request_prompt_tokens_bucket request_generation_tokens_bucket
""",
)


@pytest.fixture
def text():
    metrics = ServerMetrics("toy")
    metrics.watch(lambda: STATE, "compiled, int8 weights")
    metrics.observe("first_token_s", 0.03)
    metrics.observe("round_tokens", 5)
    return metrics.text().decode()


def value(text, name, **labels):
    labels |= {"engine": "0", "model_name": "toy"}
    (found,) = [one for one in samples(text) if (one.name, one.labels) == (name, labels)]
    return found.value


def test_vllm_names_are_there_with_vllm_labels(text):
    told = samples(text)
    assert {f"vllm:{name}" for name in VLLM} <= {one.name for one in told}
    for one in told:
        assert {"engine", "model_name"} <= one.labels.keys() or not one.name.startswith("vllm:")


def test_values_are_the_scheduler_s(text):
    position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(text, position, position=str(depth)) for depth in range(3)] == [5, 2, 1]
    for name, expected in {
        "vllm:spec_decode_num_drafts_total": 7,
        "vllm:spec_decode_num_draft_tokens_total": 18,
        "vllm:spec_decode_num_accepted_tokens_total": 8,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:num_requests_running": 4,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:iteration_tokens_total_sum": 5,
    }.items():
        assert value(text, name) == expected
    ends = {"stop": 3, "length": 4, "abort": 24, "error": 32}
    for word, expected in ends.items():
        assert value(text, "vllm:request_success_total", finished_reason=word) == expected
    assert value(text, "monge:model_info", backend="compiled, int8 weights") == 1


def test_a_benchmark_that_adds_up_by_substring_is_not_misled(text):
    """`vllm bench serve` takes lines of `vllm:spec_decode` that end in `_total`, and splits them at blanks."""
    totals = {"num_drafts": 0.0, "num_draft_tokens": 0.0, "num_accepted_tokens_total": 0.0}
    for line in text.splitlines():
        if line.startswith("vllm:spec_decode"):
            name, number = line.split(" ")
            assert re.fullmatch(r"[\d.e+]+", number)
            for counter in totals:
                if counter in name and "per_pos" not in name:
                    totals[counter] += float(number)
    assert totals == {"num_drafts": 7, "num_draft_tokens": 18, "num_accepted_tokens_total": 8}


def test_answers_are_counted_with_bounded_labels(client):
    client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    client.post("/v1/completions", json={"prompt": "a", "nonsense": 1})
    client.get("/some/path/of/mine")
    assert {
        tuple(one.labels[label] for label in ("code", "endpoint", "engine", "status")): one.value
        for one in samples(client.get("/metrics").text)
        if one.name == "monge:http_requests_total"
    } == {
        ("none", "/v1/completions", "0", "200"): 1,
        ("unknown_parameter", "/v1/completions", "0", "400"): 1,
        ("none", "other", "0", "404"): 1,
    }
