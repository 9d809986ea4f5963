"""Builds drafters from text: a name, or several in a pool."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from monge.core.errors import OptionError
from monge.draft.base import AnyDrafter
from monge.draft.registry import DRAFTERS
from monge.heads.readers.base import PublishedHead
from monge.heads.readers.files import CONFIG, Checkpoint, head_path
from monge.heads.readers.mtp import is_alone
from monge.heads.readers.registry import format_of, load_head, unknown_format
from monge.heads.shape.checkpoint import is_shape
from monge.heads.shape.checkpoint import load_head as load_shape_head
from monge.heads.shape.head import ShapeHead

AnyHead = PublishedHead | ShapeHead
_WORDS: Final = {
    "head": "head (draft=...)",
    "model": "draft model (draft=...)",
    "models": "list of draft models (draft=[A, B])",
    "tree": "tree",
}


def drafters_in(text: str) -> tuple[str, ...]:
    """Return the drafters that a text names, with their settings.

    Raises:
        OptionError: If a pool cannot be read, has fewer than two drafters, or the same drafter
            twice.
    """
    return _read(text)[0]


def _read(text: str) -> tuple[tuple[str, ...], dict[str, Any] | None]:
    """Return the drafters of a text, and the settings of their pool; `None` if there is no pool."""
    if _name(text) != "pool":
        return (text,), None
    _, listed, settings = DRAFTERS.split(text)
    are_names = all(isinstance(name, str) for name in listed) and "drafters" not in settings
    if len(listed) < 2 or not are_names or len(set(listed)) < len(listed):
        raise OptionError(
            f"cannot read drafter {text!r}; a pool lists at least two different drafters, as in "
            "pool('ngram', 'model') or pool('ngram(max_ngram=5)', 'suffix', 'none')"
        )
    if any(_name(name) == "pool" for name in listed):
        raise OptionError(
            f"drafter {text!r}: a pool cannot be in a pool; list its drafters instead"
        )
    return tuple(listed), settings


def options_of(text: str) -> Mapping[str, Any]:
    """Return the settings of a named drafter and their defaults."""
    return DRAFTERS.options(_name(text))


def takes_target(text: str) -> bool:
    """Return whether some named drafter reads the target's hidden states or runs its layers."""
    return any("target" in options_of(name) for name in drafters_in(text))


def drafter_of(draft: object, target: str | Path | None) -> str | None:
    """Return the drafter for a head or its folder, or `None` for anything else.

    Args:
        draft: The draft that the user gave: a loaded head, a folder, a file, or something else.
        target: Where the target comes from, if known. Its folder may also hold a prediction module;
            the folder of another model with such a module counts as a model.

    Raises:
        ModelLoadError: If the folder cannot be read.
    """
    if isinstance(draft, AnyHead):
        return "shape" if isinstance(draft, ShapeHead) else "head"
    if not isinstance(draft, str | Path) or not _may_be_head(path := head_path(draft)):
        return None
    checkpoint = Checkpoint(path)
    if is_shape(checkpoint.config):
        return "shape"
    head_format = format_of(checkpoint)
    if head_format is None or head_format.name != "mtp" or is_alone(checkpoint):
        return None if head_format is None else "head"
    if not target or not Path(target).exists():
        return None
    return "head" if path.samefile(target) else None


def read_head(draft: str | Path, target: str | Path | None) -> AnyHead | None:
    """Read the head in a folder, or return `None` if it holds something else; as `drafter_of`."""
    kind = drafter_of(draft, target)
    if kind is None:
        return None
    return load_shape_head(draft) if kind == "shape" else load_head(draft)


def with_head(text: str, head: str | None) -> str:
    """Fill a given head into a drafter that is named without a head.

    Args:
        text: One drafter, or several.
        head: `head(head='FOLDER')` or `shape(head='FOLDER')`; `None` for no head.
    """
    if head is None:
        return text
    texts, settings = _read(text)
    filled = [head if member.strip() == _name(head) else member for member in texts]
    if settings is None:
        return filled[0]
    arguments = [*map(repr, filled), *(f"{name}={value!r}" for name, value in settings.items())]
    return f"pool({', '.join(arguments)})"


def no_head_reason(draft: str | Path) -> str | None:
    """Return why a folder is not a head, or `None` if there is no such folder."""
    path = head_path(draft)
    return str(unknown_format(Checkpoint(path))) if _may_be_head(path) else None


def make_drafter(text: str, resources: Mapping[str, Any]) -> AnyDrafter:
    """Build a drafter, or a pool of several.

    Args:
        text: Name and settings, as the user wrote them.
        resources: Networks and settings that drafters may need, by setting; `None` if missing. Each
            drafter gets those that it takes.

    Raises:
        OptionError: If no drafter takes a given resource, or a drafter needs a missing resource.
    """
    texts, settings = _read(text)
    taken = {name: options_of(name).keys() & resources.keys() for name in texts}
    for key, value in resources.items():
        if value is not None and not any(key in names for names in taken.values()):
            raise OptionError(
                f"drafter {text!r} takes no {_WORDS[key]}; leave it out or choose another drafter"
            )
    for name, resource_names in taken.items():
        for key in resources:
            if key in resource_names and resources[key] is None:
                raise OptionError(
                    f"drafter {name!r} needs a {_WORDS[key]}; give one, or use drafter='ngram'"
                )
    drafters = [
        DRAFTERS.parse(name, **{key: resources[key] for key in taken[name]}) for name in texts
    ]
    if settings is None:
        return drafters[0]
    # A name that occurs twice is told apart by its settings.
    count = Counter(map(_name, texts))
    labels = [name if count[_name(name)] > 1 else _name(name) for name in texts]
    return DRAFTERS.make("pool", drafters=dict(zip(labels, drafters, strict=True)), **settings)


def _may_be_head(path: Path) -> bool:
    return path.is_file() or (path / CONFIG).is_file()


def _name(text: str) -> str:
    return text.partition("(")[0].strip()
