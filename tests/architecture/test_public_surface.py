"""The front door is small, complete and typed."""

import types

import monge
from monge.core.parts import PARTS
from tests.architecture.sources import PACKAGE

MAX_NAMES = 35


def test_surface_is_small_and_complete():
    parts = {place.partition(":")[2] for table in PARTS.values() for place in table.values()}
    assert parts < set(monge.__all__), "users construct them"
    assert len(monge.__all__) - len(parts) <= MAX_NAMES
    assert len(set(monge.__all__)) == len(monge.__all__), "a name is listed twice"
    assert [name for name in monge.__all__ if not hasattr(monge, name)] == []
    assert {"load", "Decoder", "speculate"} <= set(monge.__all__)
    assert (PACKAGE / "py.typed").is_file()


def test_every_public_name_of_the_package_is_exported():
    values = {name: value for name, value in vars(monge).items() if not name.startswith("_")}
    names = {name for name, one in values.items() if not isinstance(one, types.ModuleType)}
    assert names <= set(monge.__all__)


def test_public_names_are_documented():
    parts = [getattr(monge, name) for name in monge.__all__]
    kinds = type | types.FunctionType
    assert [one.__qualname__ for one in parts if isinstance(one, kinds) and not one.__doc__] == []
