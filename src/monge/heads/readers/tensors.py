"""Tensors of a checkpoint while a head is built.

Each tensor is taken once; leftovers are an error.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from monge.core.errors import ModelLoadError
from monge.heads.readers.files import Source, listed

_QUANTISED: Final = ("weight_scale_inv", "weight_scale", "weight_packed", "qweight", "qzeros")


class Tensors:
    """Tensors under the names of the network.

    Args:
        source: The checkpoint.
        names: Maps names in the network to names in the files.

    Raises:
        ModelLoadError: If the tensors are quantised.
    """

    def __init__(self, source: Source, names: Mapping[str, str]) -> None:
        self.where = str(source.path)
        self._source, self._names = source, dict(names)
        self._taken: set[str] = set()
        packed = sorted(name for name in self._names if name.endswith(_QUANTISED))
        if packed:
            raise ModelLoadError(
                f"{self.where!r} is quantised ({packed[0]!r}, {len(packed)} such tensors); heads "
                "are read unquantised"
            )

    def __contains__(self, name: object) -> bool:
        return name in self._names

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the network."""
        return tuple(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor in its file."""
        self._check_known(name)
        return self._source.shapes[self._names[name]]

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor of this shape.

        Raises:
            ModelLoadError: If it is missing, has another shape, or holds numbers that are not
                finite.
        """
        self._check_known(name)
        self._taken.add(name)
        tensor = self._source.tensor(self._names[name])
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"{self.where!r}: {self._names[name]} has shape {tuple(tensor.shape)}; the "
                f"configuration asks for {shape}"
            )
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ModelLoadError(
                f"{self.where!r}: {self._names[name]} holds numbers that are not "
                "finite; fetch it again"
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
        surplus = sorted(self._names[name] for name in self._names.keys() - self._taken)
        if surplus:
            raise ModelLoadError(
                f"{self.where!r} holds tensors that this format does not have: "
                f"{listed(iter(surplus))}; is the configuration "
                "that of another version?"
            )

    def _check_known(self, name: str) -> None:
        if name not in self._names:
            raise ModelLoadError(
                f"{self.where!r} lacks tensor {name!r}; it has {listed(self._names)}"
            )


class Settings:
    """The configuration of a head; errors name the missing key.

    Args:
        config: Keys and values.
        where: The folder, for messages.
    """

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def number(self, *names: str, default: int | None = None) -> int:
        """A non-negative integer, under the first of the names that is set.

        Raises:
            ModelLoadError: If it is missing or not such a number.
        """
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ModelLoadError(
                    f"{self.where!r}: {name} must be a whole number; got {value!r}"
                )
            return value
        if default is None:
            raise ModelLoadError(f"{self.where!r}: the configuration lacks {' or '.join(names)}")
        return default

    def real(self, name: str, default: float) -> float:
        """A number.

        Raises:
            ModelLoadError: If it is not a number.
        """
        value = self.config.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelLoadError(f"{self.where!r}: {name} must be a number; got {value!r}")
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A boolean.

        Raises:
            ModelLoadError: If it is not a boolean.
        """
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelLoadError(f"{self.where!r}: {name} must be true or false; got {value!r}")
        return value

    def numbers(self, name: str) -> tuple[int, ...] | None:
        """A list of integers; `None` if it is not set.

        Raises:
            ModelLoadError: If it is not such a list.
        """
        value = self.config.get(name)
        if value is None:
            return None
        if (
            not isinstance(value, list)
            or not value
            or not all(isinstance(one, int) for one in value)
        ):
            raise ModelLoadError(
                f"{self.where!r}: {name} must be a list of whole numbers; got {value!r}"
            )
        return tuple(value)

    def refuse(self, reason: str) -> ModelLoadError:
        """The error that refuses this head."""
        return ModelLoadError(f"{self.where!r}: {reason}")
