"""Shares metrics between the replicas of an application: a scraper reaches a single replica."""

import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from prometheus_client.core import Metric

from monge.distributed.ray_cluster import require_ray
from monge.serve.observe.metrics import ServerMetrics

_PERIOD_S: Final = 2.0
_FORGOTTEN_S: Final = 10.0
"""Seconds of silence after which a replica is left out."""


def metrics_actor_class() -> type:
    """Return the class of the actor that holds the latest metrics of every replica."""

    # A local class is pickled by value, so that its process need not import this package.
    class MetricsActor:
        def __init__(self) -> None:
            self._pages: dict[str, tuple[float, list[Any]]] = {}

        def exchange(self, engine: str, families: list[Any]) -> list[list[Any]]:
            """Store the metrics of a replica, and return those of all live replicas."""
            now = time.monotonic()
            self._pages[engine] = (now, families)
            self._pages = {
                name: page for name, page in self._pages.items() if now - page[0] < _FORGOTTEN_S
            }
            return [page for _, (_, page) in sorted(self._pages.items())]

    return MetricsActor


class SharedMetrics:
    """Exchanges metrics through a Ray actor. If the actor is lost, the next caller creates another.

    Args:
        application: Name of the application.
        engine: Name of the replica.
    """

    def __init__(self, application: str, engine: str) -> None:
        self._ray = require_ray("exceptions")
        self._name, self._engine = f"monge-metrics-{application}", engine
        self._actor: Any = None

    def gather(self, own: Sequence[Metric]) -> Sequence[Metric]:
        """Return these metrics and those of the other replicas, if the actor answers."""
        errors = self._ray.exceptions
        try:
            if self._actor is None:
                actor = self._ray.remote(metrics_actor_class()).options(
                    name=self._name, namespace="monge", get_if_exists=True, num_cpus=0
                )
                self._actor = actor.remote()
            answer = self._actor.exchange.remote(self._engine, list(own))
            return merged(self._ray.get(answer, timeout=_PERIOD_S))
        except errors.GetTimeoutError:  # it is starting, or busy
            return own
        except errors.RayError:
            self._actor = None
            return own

    def keep_publishing(self, metrics: ServerMetrics) -> None:
        """Publish the metrics periodically while the process lives."""

        def run() -> None:
            while True:
                self.gather(metrics.families())
                time.sleep(_PERIOD_S)

        threading.Thread(target=run, name="monge-metrics", daemon=True).start()


def merged(pages: Sequence[Sequence[Metric]]) -> list[Metric]:
    """Return a family for each name, with the samples of all pages."""
    families: dict[str, Metric] = {}
    for page in pages:
        for family in page:
            empty = Metric(family.name, family.documentation, family.type)
            families.setdefault(family.name, empty).samples.extend(family.samples)
    return list(families.values())
