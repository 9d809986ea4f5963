"""What controllers, and the table of costs that they read, take themselves inside a real decoder."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from monge.control.base import AnyController, CostModel, Memory
from monge.engine.clock import now
from monge.engine.parts import Parts

_PLANNING: Final = ("init", "rests", "read", "plan_many", "stands", "is_news", "update", "update_many")
_TABLE: Final = ("is_due", "observe", "observe_whole", "note_tail", "note_reading")
_EMPTY_CALLS: Final = 101


@dataclass(slots=True)
class OwnTime:
    """Seconds so far.

    Attributes:
        planning_s: Of controllers: plans, updates, and what they do when a request begins.
        table_s: Of the table of costs, which learns from rounds whichever controller reads it.
    """

    planning_s: float = 0.0
    table_s: float = 0.0
    _is_running: bool = False
    _empty_s: float = 0.0

    def run(self, name: str, work: Callable[..., Any], *given: Any, **named: Any) -> Any:  # noqa: ANN401 (whatever it gives)
        """Work on the clock; what it calls itself is not counted twice, and what the clock itself takes not at all."""
        if self._is_running:
            return work(*given, **named)
        self._is_running, start = True, now()
        try:
            return work(*given, **named)
        finally:
            setattr(self, name, getattr(self, name) + max(0.0, now() - start - self._empty_s))
            self._is_running = False

    def controllers_of(self, parts: Parts) -> Parts:
        """The parts with controllers that are timed."""
        self._empty_s = _empty_seconds()
        timed = {id(one): _timed(one, self) for one in (parts.controller, *parts.controllers.values())}
        named = {name: timed[id(one)] for name, one in parts.controllers.items()}
        return replace(parts, controller=timed[id(parts.controller)], controllers=named)

    def memory(self, costs: CostModel | None) -> Memory:
        """A memory whose table is timed."""
        if costs is not None:
            for name in _TABLE:
                setattr(costs, name, _bound(getattr(costs, name), "table_s", self))
        return Memory(costs)


def _empty_seconds() -> float:
    """The least that the clock shows where nothing is done: a microsecond, of which a short round has some."""
    seconds = list[float]()
    for _ in range(_EMPTY_CALLS):
        start = now()
        seconds.append(now() - start)
    return min(seconds)


def _timed(controller: AnyController, own: OwnTime) -> AnyController:
    """The controller as one of a class of its own, since the loop asks what kind it is."""
    kind: type[Any] = type(controller)
    methods = {name: _method(getattr(kind, name), own) for name in _PLANNING if hasattr(kind, name)}
    made: Any = object.__new__(type(kind.__name__, (kind,), methods))
    for field in fields(kind):
        object.__setattr__(made, field.name, getattr(controller, field.name))
    return made


def _method(work: Callable[..., Any], own: OwnTime) -> Callable[..., Any]:
    def run(controller: AnyController, *given: Any, **named: Any) -> Any:  # noqa: ANN401 (whatever it gives)
        return own.run("planning_s", work, controller, *given, **named)

    return run


def _bound(work: Callable[..., Any], name: str, own: OwnTime) -> Callable[..., Any]:
    def run(*given: Any, **named: Any) -> Any:  # noqa: ANN401 (whatever it gives)
        return own.run(name, work, *given, **named)

    return run
