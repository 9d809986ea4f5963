"""Tensors and settings of a checkpoint while a head is built: each tensor is taken once, leftovers are an error."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from monge.core.errors import ModelLoadError
from monge.heads.readers.files import Checkpoint, listed

_QUANTISED: Final = ("weight_scale_inv", "weight_scale", "weight_packed", "qweight", "qzeros")


class Source:
    """Tensors under the names of the network, and settings; every error names the folder.

    Args:
        where: The folder, for messages.
        shapes: Shapes by name in the files.
        read: Reads a tensor by its name in the files.
        names: Maps names in the network to names in the files.
        config: Settings.

    Raises:
        ModelLoadError: If the tensors are quantised.
    """

    def __init__(
        self,
        where: str,
        shapes: Mapping[str, tuple[int, ...]],
        read: Callable[[str], Tensor],
        names: Mapping[str, str],
        config: Mapping[str, Any],
    ) -> None:
        self.where, self.names, self.config = where, dict(names), config
        self._shapes, self._read = shapes, read
        self._taken: set[str] = set()
        packed = sorted(name for name in names if name.endswith(_QUANTISED))
        if packed:
            raise self.refuse(
                f"the head is quantised ({packed[0]!r}, {len(packed)} such tensors); heads are read "
                "unquantised"
            )

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        names: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> "Source":
        """A checkpoint, by default under the names and with the settings that it has."""
        names = {name: name for name in checkpoint.shapes} if names is None else names
        config = checkpoint.config if config is None else config
        return cls(str(checkpoint.path), checkpoint.shapes, checkpoint.tensor, names, config)

    @classmethod
    def in_memory(cls, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> "Source":
        """Tensors in memory, which the head shares."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        names = {name: name for name in tensors}
        return cls("in memory", shapes, tensors.__getitem__, names, config)

    def __contains__(self, name: object) -> bool:
        return name in self.names

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
            raise self.refuse(
                f"{stored} has shape {tuple(tensor.shape)}; the configuration asks for {shape}"
            )
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise self.refuse(f"{stored} holds numbers that are not finite; fetch it again")
        return tensor

    def maybe(self, name: str, *shape: int) -> Tensor | None:
        """Like `take`, or `None` if there is no such tensor."""
        return self.take(name, *shape) if name in self else None

    def leave(self, *prefixes: str) -> None:
        """Mark tensors as known but not needed."""
        self._taken |= {name for name in self.names if name.startswith(prefixes)}

    def finish(self) -> None:
        """Refuse tensors that were not taken.

        Raises:
            ModelLoadError: If tensors are left over.
        """
        surplus = [self.names[name] for name in self.names.keys() - self._taken]
        if surplus:
            raise self.refuse(
                f"it holds tensors that this format does not have: {listed(surplus)}; "
                "is the configuration that of another version?"
            )

    def _known(self, name: str) -> str:
        if name not in self.names:
            raise self.refuse(f"lacks tensor {name!r}; it has {listed(self.names)}")
        return self.names[name]

    @property
    def hidden(self) -> int:
        """Width of a state."""
        return self.number("hidden_size")

    def number(self, *names: str, default: int | None = None) -> int:
        """A non-negative integer, under the first of the names that is set; required without a default."""
        name = next((name for name in names if self.config.get(name) is not None), None)
        if name is None:
            if default is None:
                raise self.refuse(f"the configuration lacks {' or '.join(names)}")
            return default
        value = self.config[name]
        self._check(_is_whole(value) and value >= 0, name, "a whole number")
        return value

    def real(self, name: str, default: float) -> float:
        """A number."""
        value = self.config.get(name)
        if value is None:
            return default
        self._check(_is_whole(value) or isinstance(value, float), name, "a number")
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A boolean."""
        value = self.config.get(name)
        if value is None:
            return default
        self._check(isinstance(value, bool), name, "true or false")
        return value

    def numbers(self, name: str) -> tuple[int, ...] | None:
        """A list of integers; `None` if it is not set."""
        value = self.config.get(name)
        if value is None:
            return None
        is_list = isinstance(value, list) and bool(value) and all(map(_is_whole, value))
        self._check(is_list, name, "a list of whole numbers")
        return tuple(value)

    def refuse(self, reason: str) -> ModelLoadError:
        """The error that refuses this head."""
        return ModelLoadError(f"{self.where!r}: {reason}")

    def _check(self, is_fine: bool, name: str, kind: str) -> None:
        if not is_fine:
            raise self.refuse(f"{name} must be {kind}; got {self.config[name]!r}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
