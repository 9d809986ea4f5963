"""What a process on another machine needs in order to load the same decoder."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from monge.api import load
from monge.core.errors import OptionError
from monge.engine.decoder import Decoder
from monge.options import LoadOptions, changed

_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A decoder by names, so that it can be written down, compared and sent.

    Args:
        target: Folder or name of the target, as every process finds it; `None` for the built-in
            one.
        draft: Likewise for the draft model, or several of them.
        options: Further options of `monge.load`, plain values and tuples of them only.

    Raises:
        OptionError: If an option is an object, which would mean something else elsewhere.
    """

    target: str | None = None
    draft: str | tuple[str, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        wrong = [
            name
            for name, value in self.options.items()
            if not all(isinstance(one, _PLAIN) for one in _each(value))
        ]
        if wrong:
            raise OptionError(
                f"{wrong[0]} must be written as text or a number, since other "
                "processes read it; got an object"
            )

    @classmethod
    def of(cls, load: LoadOptions) -> "DecoderSpec":
        """Return what was asked of `monge.load`, without what is a default."""
        options = changed(load)
        target, draft = options.pop("target", None), options.pop("draft", None)
        return cls(target=target, draft=draft, options=options)

    def load(self) -> Decoder:
        """The decoder, in this process."""
        return load(self.target, self.draft, **self.options)

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"target": self.target, "draft": self.draft, **self.options}


def _each(value: Any) -> tuple[Any, ...]:  # noqa: ANN401 (whatever was given)
    return value if isinstance(value, tuple) else (value,)
