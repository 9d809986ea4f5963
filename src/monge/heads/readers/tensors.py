"""Tensors and settings of a checkpoint while a head is built: each tensor is taken once, leftovers are an error."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from monge.core.errors import ModelLoadError
from monge.heads.readers.files import Checkpoint, listed

_QUANTISED: Final = ("weight_scale_inv", "weight_scale", "weight_packed", "qweight", "qzeros")


class Tensors:
    """Tensors under the names of the network.

    Args:
        where: The location, for messages.
        shapes: Shapes by name in the files.
        read: Reads a tensor by its name in the files.
        names: Maps names in the network to names in the files.

    Raises:
        ModelLoadError: If the tensors are quantised.
    """

    def __init__(
        self,
        where: str,
        shapes: Mapping[str, tuple[int, ...]],
        read: Callable[[str], Tensor],
        names: Mapping[str, str],
    ) -> None:
        self.where, self.names = where, tuple(names)
        self._shapes, self._read, self._names = shapes, read, dict(names)
        self._taken: set[str] = set()
        packed = sorted(name for name in names if name.endswith(_QUANTISED))
        if packed:
            raise ModelLoadError(
                f"{where!r} is quantised ({packed[0]!r}, {len(packed)} such tensors); heads are read "
                "unquantised"
            )

    @classmethod
    def of(cls, checkpoint: Checkpoint, names: Mapping[str, str]) -> "Tensors":
        """The tensors of a checkpoint."""
        return cls(str(checkpoint.path), checkpoint.shapes, checkpoint.tensor, names)

    @classmethod
    def in_memory(cls, tensors: Mapping[str, Tensor]) -> "Tensors":
        """Tensors in memory, which the head shares."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        return cls("in memory", shapes, tensors.__getitem__, {name: name for name in tensors})

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor in its file."""
        return self._shapes[self._known(name)]

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor of this shape.

        Raises:
            ModelLoadError: If it is missing, has another shape, or holds numbers that are not
                finite.
        """
        stored = self._known(name)
        self._taken.add(name)
        tensor = self._read(stored)
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"{self.where!r}: {stored} has shape {tuple(tensor.shape)}; the configuration asks "
                f"for {shape}"
            )
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ModelLoadError(
                f"{self.where!r}: {stored} holds numbers that are not finite; fetch it again"
            )
        return tensor

    def maybe(self, name: str, *shape: int) -> Tensor | None:
        """Like `take`, or `None` if there is no such tensor."""
        return self.take(name, *shape) if name in self else None

    def leave(self, *prefixes: str) -> None:
        """Mark tensors as known but not needed."""
        self._taken |= {name for name in self._names if name.startswith(prefixes)}

    def finish(self) -> None:
        """Refuse tensors that were not taken.

        Raises:
            ModelLoadError: If tensors are left over.
        """
        surplus = [self._names[name] for name in self._names.keys() - self._taken]
        if surplus:
            raise ModelLoadError(
                f"{self.where!r} holds tensors that this format does not have: {listed(surplus)}; "
                "is the configuration that of another version?"
            )

    def _known(self, name: str) -> str:
        if name not in self._names:
            raise ModelLoadError(
                f"{self.where!r} lacks tensor {name!r}; it has {listed(self._names)}"
            )
        return self._names[name]


class Settings:
    """The configuration of a head. Its readers raise `ModelLoadError` that names the key.

    Args:
        config: Keys and values.
        where: The folder, for messages.
    """

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where

    @property
    def hidden(self) -> int:
        """Width of a state."""
        return self.number("hidden_size")

    @property
    def eps(self) -> float:
        """Epsilon of the norms."""
        return self.real("rms_norm_eps", 1e-6)

    def number(self, *names: str, default: int | None = None) -> int:
        """A non-negative integer, under the first of the names that is set; required without a default."""
        found = next((name for name in names if self.config.get(name) is not None), None)
        if found is None and default is None:
            raise self.refuse(f"the configuration lacks {' or '.join(names)}")
        if found is None:
            assert default is not None
            return default
        return self._checked(found, "a whole number", _is_size)

    def real(self, name: str, default: float) -> float:
        """A number."""
        if self.config.get(name) is None:
            return default
        return float(self._checked(name, "a number", _is_real))

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A boolean."""
        if self.config.get(name) is None:
            return default
        return self._checked(name, "true or false", lambda value: isinstance(value, bool))

    def numbers(self, name: str) -> tuple[int, ...] | None:
        """A list of integers; `None` if it is not set."""
        if self.config.get(name) is None:
            return None
        return tuple(self._checked(name, "a list of whole numbers", _are_whole))

    def refuse(self, reason: str) -> ModelLoadError:
        """The error that refuses this head."""
        return ModelLoadError(f"{self.where!r}: {reason}")

    def _checked(self, name: str, kind: str, is_fine: Callable[[object], bool]) -> Any:  # noqa: ANN401
        value = self.config[name]
        if not is_fine(value):
            raise self.refuse(f"{name} must be {kind}; got {value!r}")
        return value


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_real(value: object) -> bool:
    return _is_whole(value) or isinstance(value, float)


def _are_whole(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_whole, value))
