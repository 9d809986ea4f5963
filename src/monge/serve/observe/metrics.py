"""Metrics for Prometheus, named as in vLLM; metrics that vLLM lacks have the prefix `monge:`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from monge.serve.api.answers import FINISH
from monge.serve.api.schemas import Asked
from monge.serve.scheduling.generation import GenerationFinish
from monge.serve.scheduling.scheduler import Snapshot

_LABELS: Final = ("engine", "model_name")
Gather = Callable[[Sequence[Metric]], Sequence[Metric]]
"""Takes the metrics of this server and returns those of all servers."""
_REASONS: Final[Mapping[GenerationFinish, str]] = {
    **FINISH,
    "cancelled": "abort",
    "deadline": "abort",
    "error": "error",
}


def _buckets(numbers: str) -> tuple[float, ...]:
    return tuple(map(float, numbers.split()))


_FIRST_TOKEN: Final = _buckets(
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
)
_BETWEEN: Final = _buckets(
    "0.001 0.0025 0.005 0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
)
_WHOLE: Final = _buckets(
    "0.05 0.1 0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
)
_ROUND: Final = _buckets("1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384")
_TOKENS: Final = _buckets("1 2 5 10 20 50 100 200 500 1000 2000 5000 10000 20000 50000 100000")

_HISTOGRAMS: Final = (
    ("first_token_s", "time_to_first_token_seconds", "Submission to first token.", _FIRST_TOKEN),
    ("inter_token_s", "inter_token_latency_seconds", "Between rounds of a request.", _BETWEEN),
    (
        "time_per_output_token_s",
        "request_time_per_output_token_seconds",
        "Decoding time per token after the first, one value a request.",
        _BETWEEN,
    ),
    ("total_s", "e2e_request_latency_seconds", "From submission to the end.", _WHOLE),
    ("queue_s", "request_queue_time_seconds", "Waiting for room.", _WHOLE),
    ("inference_s", "request_inference_time_seconds", "Prefill and decoding.", _WHOLE),
    ("prefill_s", "request_prefill_time_seconds", "Reading the prompt.", _WHOLE),
    ("decode_s", "request_decode_time_seconds", "From the first token to the last.", _WHOLE),
    ("round_tokens", "iteration_tokens_total", "Tokens read and committed, per round.", _ROUND),
    ("prompt_tokens", "request_prompt_tokens", "Prompt tokens of a request.", _TOKENS),
    ("generated_tokens", "request_generation_tokens", "Generated tokens of a request.", _TOKENS),
)
"""Measure, name, help and buckets. `inter_token_s` is observed once a round and request, `round_tokens`
once a round, the others once a request."""

_BY_CONTROLLER: Final = {
    "rounds": "Rounds, by the controller that planned them.",
    "drafts": "Rounds with candidates, likewise.",
    "draft_tokens": "Candidates verified, likewise.",
    "accepted_tokens": "Candidates accepted, likewise.",
}


class ServerMetrics:
    """All metrics of a server, in its own registry.

    Args:
        model_name: Label of the metrics; without blanks.
        engine: Label of the metrics that distinguishes servers of the same model; without blanks.
        gather: Adds the metrics of other servers.
    """

    def __init__(self, model_name: str, *, engine: str = "0", gather: Gather | None = None) -> None:
        self._registry, self._gather = CollectorRegistry(), gather
        self._labels = (engine, model_name)
        if gather is None:  # the names of these have no label for several servers
            ProcessCollector(registry=self._registry)
            GCCollector(registry=self._registry)

        def made(kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:  # noqa: ANN401 (a metric)
            return kind(name, text, labels, registry=self._registry, **options)

        self._histograms = {
            measure: made(Histogram, f"vllm:{name}", text, *_LABELS, buckets=buckets).labels(
                *self._labels
            )
            for measure, name, text, buckets in _HISTOGRAMS
        }
        self._answers = made(
            Counter,
            "monge:http_requests",
            "Answers, by endpoint, status, error code and name of the key.",
            *("engine", "endpoint", "status", "code", "key"),
        )
        text = "Tokens of prompts and completions, by name of the key."
        self._tokens = made(Counter, "monge:tokens_by_key", text, *_LABELS, "key", "kind")
        text = "Requests taken, by what they say about speculation."
        self._asked = made(Counter, "monge:requests_by_speculation", text, *_LABELS, "speculation")
        text = "Requests taken, by the controller that plans for them."
        self._planning = made(Counter, "monge:requests_by_controller", text, *_LABELS, "controller")
        text = "1; the label `backend` names what runs the target, with its rounded weights if any."
        self._model = made(Gauge, "monge:model_info", text, *_LABELS, "backend")
        for form in get_args(Asked):
            self._asked.labels(*self._labels, form)

    def observe(self, measure: str, value: float | int) -> None:
        """Record an observation; this is the sink of the scheduler."""
        self._histograms[measure].observe(value)

    def count_answer(self, endpoint: str, status: int, code: str, key: str) -> None:
        """Count an HTTP answer."""
        self._answers.labels(self._labels[0], endpoint, str(status), code, key).inc()

    def count_tokens(self, key: str, figures: Mapping[str, Any]) -> None:
        """Count `prompt_tokens` and `completion_tokens` of a request that brings a key."""
        for kind in ("prompt", "completion"):
            if key and (number := figures.get(f"{kind}_tokens")):
                self._tokens.labels(*self._labels, key, kind).inc(number)

    def count_request(self, asked: Asked, controller: str) -> None:
        """Count an accepted request."""
        self._asked.labels(*self._labels, asked).inc()
        self._planning.labels(*self._labels, controller).inc()

    def watch(self, snapshot: Callable[[], Snapshot], backend: str) -> None:
        """Read counters and gauges from a snapshot at each scrape; name the backend."""
        self._model.labels(*self._labels, backend).set(1)
        for controller in snapshot().by_controller:
            self._planning.labels(*self._labels, controller)
        self._registry.register(_Collected(lambda: _state(snapshot(), self._labels)))

    def families(self) -> list[Metric]:
        """Return the metrics of this server."""
        return list(self._registry.collect())

    def text(self) -> bytes:
        """Return the exposition; this may wait for other servers."""
        gather = self._gather
        if gather is None:
            return generate_latest(self._registry)
        exposed = CollectorRegistry(auto_describe=False)
        exposed.register(_Collected(lambda: gather(self.families())))
        return generate_latest(exposed)


class _Collected(Collector):
    """Metrics that a function returns."""

    def __init__(self, metrics: Callable[[], Iterable[Metric]]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics()


def _state(now: Snapshot, labels: tuple[str, str]) -> Iterator[Metric]:
    """Yield counters and gauges of a scheduler."""
    spec, num_joined = now.speculation, now.num_running + now.num_prefilling
    share = now.kv_used_tokens / max(1, now.kv_budget_tokens)
    accepted = spec.num_accepted_tokens
    looked_up = now.num_prompt_tokens if now.has_prefix_cache else 0
    counters = (
        ("vllm:spec_decode_num_drafts", "Rounds with candidates.", spec.num_drafts),
        ("vllm:spec_decode_num_draft_tokens", "Candidates verified.", spec.num_draft_tokens),
        ("vllm:spec_decode_num_accepted_tokens", "Candidates accepted.", accepted),
        ("vllm:prompt_tokens", "Prompt tokens read.", now.num_prompt_tokens),
        ("vllm:generation_tokens", "Tokens generated.", now.num_generated_tokens),
        ("vllm:num_preemptions", "Requests put off; admitted ones never are.", 0),
        ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", looked_up),
        ("vllm:prefix_cache_hits", "Those of them that it had.", now.num_cached_tokens),
        ("monge:target_rounds", "Target forwards after the prompt.", spec.num_rounds),
    )
    gauges = (
        ("vllm:num_requests_running", "Requests being read or decoded.", num_joined),
        ("vllm:num_requests_waiting", "Requests in the queue.", now.num_waiting),
        ("vllm:kv_cache_usage_perc", "Share of the cache that is reserved, 1 for all.", share),
        ("monge:num_requests_prefilling", "Prompts that are being read.", now.num_prefilling),
        ("monge:kv_reserved_tokens", "Tokens reserved in the cache.", now.kv_used_tokens),
        ("monge:kv_kept_tokens", "Tokens in the prefix cache.", now.kv_kept_tokens),
        ("monge:kv_budget_tokens", "Tokens reserved or kept at most.", now.kv_budget_tokens),
    )
    for kind, figures in ((CounterMetricFamily, counters), (GaugeMetricFamily, gauges)):
        for name, text, value in figures:
            family = kind(name, text, labels=_LABELS)
            family.add_metric(labels, value)
            yield family
    by_reason = dict.fromkeys(_REASONS.values(), 0)
    for reason, number in now.finished.items():
        by_reason[_REASONS[reason]] += number
    by_position = {str(depth): number for depth, number in enumerate(spec.accepted_by_position)}
    text = "Drafts that accepted a candidate at this depth."
    labelled = [
        ("vllm:spec_decode_num_accepted_tokens_per_pos", text, "position", by_position),
        ("vllm:request_success", "Requests that ended.", "finished_reason", by_reason),
    ]
    for figure, text in _BY_CONTROLLER.items():
        values = {name: getattr(sums, f"num_{figure}") for name, sums in now.by_controller.items()}
        labelled.append((f"monge:{figure}_by_controller", text, "controller", values))
    for name, text, label, values in labelled:
        family = CounterMetricFamily(name, text, labels=(*_LABELS, label))
        for key, value in values.items():
            family.add_metric((*labels, key), value)
        yield family
