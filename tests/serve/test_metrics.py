"""The exposition parses, and says what the scheduler says."""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from monge.serve.generation import Snapshot, Speculation
from monge.serve.metrics import ServerMetrics

SPEC = Speculation(
    num_rounds=9,
    num_draft_tokens=18,
    acceptance_histogram=(2, 3, 1, 1),
)
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
    speculation=SPEC,
)
VLLM = [
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "num_preemptions_total",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "request_time_per_output_token_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "request_inference_time_seconds_bucket",
    "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket",
    "iteration_tokens_total_bucket",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
]


@pytest.fixture
def text():
    metrics = ServerMetrics("toy")
    metrics.watch(lambda: STATE)
    metrics.observe("first_token_s", 0.03)
    metrics.observe("round_tokens", 5)
    metrics.count_answer("/v1/completions", 400, "unknown_parameter")
    return metrics.text().decode()


def samples(text):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(text, name, **labels):
    return samples(text)[name, *sorted((labels | {"engine": "0", "model_name": "toy"}).items())]


@pytest.mark.parametrize("name", VLLM)
def test_vllm_names_are_there_with_vllm_labels(text, name):
    found = [key for key in samples(text) if key[0] == f"vllm:{name}"]
    assert found
    assert all({"engine", "model_name"} <= {label for label, _ in key[1:]} for key in found)


def test_values_are_the_scheduler_s(text):
    assert value(text, "vllm:spec_decode_num_drafts_total") == 7
    assert value(text, "vllm:spec_decode_num_draft_tokens_total") == 18
    assert value(text, "vllm:spec_decode_num_accepted_tokens_total") == 8
    by_position = [
        value(text, "vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(depth))
        for depth in range(3)
    ]
    assert by_position == [5, 2, 1]
    assert sum(by_position) == 8
    assert value(text, "vllm:kv_cache_usage_perc") == 0.25
    assert value(text, "vllm:num_requests_running") == 4
    finished = {
        word: value(text, "vllm:request_success_total", finished_reason=word)
        for word in ("stop", "length", "abort", "error")
    }
    assert finished == {"stop": 3, "length": 4, "abort": 24, "error": 32}
    assert value(text, "vllm:time_to_first_token_seconds_count") == 1
    assert value(text, "vllm:iteration_tokens_total_sum") == 5
    assert (
        samples(text)[
            "monge:http_requests_total",
            ("code", "unknown_parameter"),
            ("endpoint", "/v1/completions"),
            ("engine", "0"),
            ("status", "400"),
        ]
        == 1
    )


def test_a_benchmark_that_adds_up_by_substring_is_not_misled(text):
    """`vllm bench serve` takes every line that starts with `vllm:spec_decode` and ends in `_total`, and splits it at blanks."""
    totals = {"num_drafts": 0.0, "num_draft_tokens": 0.0, "num_accepted_tokens_total": 0.0}
    for line in text.splitlines():
        if line.startswith("vllm:spec_decode"):
            name, *rest = line.split(" ")
            assert len(rest) == 1
            assert re.fullmatch(r"[\d.e+]+", rest[0])
            for counter in totals:
                if counter in name and "per_pos" not in name:
                    totals[counter] += float(rest[0])
    assert totals == {"num_drafts": 7, "num_draft_tokens": 18, "num_accepted_tokens_total": 8}


def test_servers_do_not_share_metrics():
    first, second = ServerMetrics("a"), ServerMetrics("b")
    first.observe("total_s", 1.0)
    assert (
        'e2e_request_latency_seconds_count{engine="0",model_name="b"} 0.0' in second.text().decode()
    )


def test_what_runs_the_target_is_named():
    metrics = ServerMetrics("toy")
    metrics.describe("compiled, int8 weights")
    line = 'monge:model_info{backend="compiled, int8 weights",engine="0",model_name="toy"} 1.0'
    assert line in metrics.text().decode()
