"""Metrics for Prometheus: with vLLM's name if vLLM has one, else with the prefix `monge:`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Final, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from monge.serve.generation import GenerationFinish, Measure, Snapshot, Speculation

_LABELS: Final = ("engine", "model_name")
Gather = Callable[[Sequence[Metric]], Sequence[Metric]]
"""Takes the metrics of this server and returns those of all servers."""
Asked = Literal["default", "options", "off"]
"""The `speculation` field of a request: absent or true, an object, or false."""
_REASONS: Final[Mapping[GenerationFinish, str]] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "cancelled": "abort",
    "deadline": "abort",
    "oversized": "abort",
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
_ROUND: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_TOKENS: Final = _buckets("1 2 5 10 20 50 100 200 500 1000 2000 5000 10000 20000 50000 100000")

_HISTOGRAMS: Final[Mapping[Measure, tuple[str, str, tuple[float, ...]]]] = {
    "first_token_s": (
        "vllm:time_to_first_token_seconds",
        "From submission to the first token.",
        _FIRST_TOKEN,
    ),
    "inter_token_s": (
        "vllm:inter_token_latency_seconds",
        "Between two rounds of a request.",
        _BETWEEN,
    ),
    "time_per_output_token_s": (
        "vllm:request_time_per_output_token_seconds",
        "Decoding time per token after the first, one value a request.",
        _BETWEEN,
    ),
    "total_s": ("vllm:e2e_request_latency_seconds", "From submission to the end.", _WHOLE),
    "queue_s": ("vllm:request_queue_time_seconds", "Waiting for room.", _WHOLE),
    "inference_s": ("vllm:request_inference_time_seconds", "Prefill and decoding.", _WHOLE),
    "prefill_s": ("vllm:request_prefill_time_seconds", "Reading the prompt.", _WHOLE),
    "decode_s": ("vllm:request_decode_time_seconds", "From the first token to the last.", _WHOLE),
    "round_tokens": (
        "vllm:iteration_tokens_total",
        "Prompt tokens read and tokens committed, per round.",
        _ROUND,
    ),
    "prompt_tokens": ("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS),
    "generated_tokens": (
        "vllm:request_generation_tokens",
        "Generated tokens of a request.",
        _TOKENS,
    ),
}

_COUNTERS: Final = (
    ("vllm:spec_decode_num_drafts", "Rounds with candidates.", "speculation.num_drafts"),
    ("vllm:spec_decode_num_draft_tokens", "Candidates verified.", "speculation.num_draft_tokens"),
    (
        "vllm:spec_decode_num_accepted_tokens",
        "Candidates accepted.",
        "speculation.num_accepted_tokens",
    ),
    ("vllm:prompt_tokens", "Prompt tokens read.", "num_prompt_tokens"),
    ("vllm:generation_tokens", "Tokens generated.", "num_generated_tokens"),
    ("vllm:num_preemptions", "Requests put off after they were started.", "num_preemptions"),
    ("vllm:prefix_cache_queries", "Tokens looked up; there is no prefix cache.", None),
    ("vllm:prefix_cache_hits", "Tokens found; there is no prefix cache.", None),
    ("monge:target_rounds", "Rounds: target forwards after the prompt.", "speculation.num_rounds"),
)
_GAUGES: Final = (
    ("vllm:num_requests_running", "Requests being read or decoded.", "num_joined"),
    ("vllm:num_requests_waiting", "Requests in the queue.", "num_waiting"),
    ("vllm:kv_cache_usage_perc", "Share of the cache that is reserved, 1 for all.", "kv_share"),
    ("monge:num_requests_prefilling", "Requests whose prompt is being read.", "num_prefilling"),
    ("monge:kv_reserved_tokens", "Tokens reserved in the cache.", "kv_used_tokens"),
    ("monge:kv_budget_tokens", "Tokens that may be reserved.", "kv_budget_tokens"),
)
"""Names and texts of figures, and where a snapshot has them; 0 where it has none."""

_BY_CONTROLLER: Final[Mapping[str, tuple[str, Callable[[Speculation], int]]]] = {
    "monge:rounds_by_controller": (
        "Rounds, by the controller that planned them.",
        lambda one: one.num_rounds,
    ),
    "monge:drafts_by_controller": ("Rounds with candidates, likewise.", lambda one: one.num_drafts),
    "monge:draft_tokens_by_controller": (
        "Candidates verified, likewise.",
        lambda one: one.num_draft_tokens,
    ),
    "monge:accepted_tokens_by_controller": (
        "Candidates accepted, likewise.",
        lambda one: one.num_accepted_tokens,
    ),
}


class ServerMetrics:
    """All metrics of one server, in its own registry.

    Args:
        model_name: Label of the metrics; without blanks.
        engine: Label of the metrics that distinguishes servers of one model; without blanks.
        gather: Adds the metrics of other servers.
    """

    def __init__(self, model_name: str, *, engine: str = "0", gather: Gather | None = None) -> None:
        self._registry, self._gather = CollectorRegistry(), gather
        labels = {"engine": engine, "model_name": model_name}
        self._histograms = {
            measure: Histogram(
                name, text, _LABELS, buckets=buckets, registry=self._registry
            ).labels(**labels)
            for measure, (name, text, buckets) in _HISTOGRAMS.items()
        }
        self._requests = Counter(
            "monge:http_requests",
            "Answers, by endpoint, status and error code.",
            ("engine", "endpoint", "status", "code"),
            registry=self._registry,
        )
        self._drafting = Counter(
            "monge:requests_by_speculation",
            "Requests taken, by what they say about speculation.",
            (*_LABELS, "speculation"),
            registry=self._registry,
        )
        self._planning = Counter(
            "monge:requests_by_controller",
            "Requests taken, by the controller that plans for them.",
            (*_LABELS, "controller"),
            registry=self._registry,
        )
        self._model = Gauge(
            "monge:model_info",
            "1; the label `backend` names what runs the target, with its rounded weights if any.",
            (*_LABELS, "backend"),
            registry=self._registry,
        )
        self._engine, self._model_name = engine, model_name
        for asked in get_args(Asked):
            self._drafting.labels(engine, model_name, asked)

    def describe(self, backend: str) -> None:
        """Name what runs the target."""
        self._model.labels(self._engine, self._model_name, backend).set(1)

    def observe(self, measure: Measure, value: float | int) -> None:
        """Record one observation; this is the sink of the scheduler."""
        self._histograms[measure].observe(value)

    def count_answer(self, endpoint: str, status: int, code: str) -> None:
        """Count one HTTP answer."""
        self._requests.labels(self._engine, endpoint, str(status), code).inc()

    def count_request(self, asked: Asked, controller: str) -> None:
        """Count one accepted request."""
        self._drafting.labels(self._engine, self._model_name, asked).inc()
        self._planning.labels(self._engine, self._model_name, controller).inc()

    def watch(self, snapshot: Callable[[], Snapshot]) -> None:
        """Read counters and gauges from a scheduler at each scrape."""
        for controller in snapshot().by_controller:
            self._planning.labels(self._engine, self._model_name, controller)
        self._registry.register(_SchedulerState(snapshot, (self._engine, self._model_name)))

    def families(self) -> list[Metric]:
        """Return the metrics of this server."""
        return list(self._registry.collect())

    def text(self) -> bytes:
        """Return the exposition; this may wait for other servers."""
        if self._gather is None:
            return generate_latest(self._registry)
        exposed = CollectorRegistry(auto_describe=False)
        exposed.register(_Families(self._gather(self.families())))
        return generate_latest(exposed)


class _Families(Collector):
    """Metrics that were collected before, perhaps by another server."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        return self._families


class _SchedulerState(Collector):
    """Counters and gauges of a scheduler, from one snapshot, so that they are consistent."""

    def __init__(self, snapshot: Callable[[], Snapshot], labels: tuple[str, str]) -> None:
        self._snapshot, self._labels = snapshot, labels

    def collect(self) -> Iterator[Metric]:
        now = self._snapshot()
        for kind, figures in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for name, text, place in figures:
                family = kind(name, text, labels=_LABELS)
                value = 0 if place is None else attrgetter(place)(now)
                family.add_metric(self._labels, value)
                yield family
        yield self._by_position(now.speculation.accepted_by_position)
        yield self._finished(now.finished)
        for name, (text, figure) in _BY_CONTROLLER.items():
            counts = {controller: figure(one) for controller, one in now.by_controller.items()}
            yield self._by_label(name, text, "controller", counts)

    def _by_position(self, accepted: tuple[int, ...]) -> Metric:
        counts = {str(position): count for position, count in enumerate(accepted)}
        text = "Drafts that accepted a candidate at this depth."
        return self._by_label(
            "vllm:spec_decode_num_accepted_tokens_per_pos", text, "position", counts
        )

    def _finished(self, finished: Mapping[GenerationFinish, int]) -> Metric:
        counts = {
            word: sum(finished.get(reason, 0) for reason, name in _REASONS.items() if name == word)
            for word in dict.fromkeys(_REASONS.values())
        }
        return self._by_label(
            "vllm:request_success", "Requests that ended.", "finished_reason", counts
        )

    def _by_label(self, name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*_LABELS, label))
        for value, count in counts.items():
            family.add_metric((*self._labels, value), count)
        return family
