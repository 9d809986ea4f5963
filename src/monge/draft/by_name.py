"""Gives drafters the networks that they need, and recognises heads."""

from collections.abc import Mapping, Sequence
from dataclasses import Field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final

from monge.core.errors import OptionError
from monge.draft.base import AnyDrafter
from monge.draft.pool import Pool
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


def members_of(drafter: AnyDrafter) -> tuple[AnyDrafter, ...]:
    """Return the drafters of a pool, or the drafter itself."""
    return tuple(drafter.drafters.values()) if isinstance(drafter, Pool) else (drafter,)


def settings_of(drafter: AnyDrafter | str) -> frozenset[str]:
    """Return the settings that a drafter takes, or any drafter of a pool; what is provided as well.

    Raises:
        OptionError: If it is a text that cannot be read.
    """
    members = members_of(DRAFTERS.of(drafter))
    return frozenset(setting.name for member in members for setting in _settings(member))


def open_settings(drafter: AnyDrafter | str) -> list[dict[str, Any]]:
    """Return the settings that are left at their defaults, with these, for each drafter of a pool."""
    return [
        {
            setting.name: setting.default
            for setting in _settings(member)
            if getattr(member, setting.name) is setting.default
        }
        for member in members_of(DRAFTERS.of(drafter))
    ]


def _settings(member: AnyDrafter) -> list[Field[Any]]:
    known = fields(member) if is_dataclass(member) else ()
    return [setting for setting in known if setting.init]


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
    given, drafter = DRAFTERS.parse(head), DRAFTERS.parse(text)
    bare = type(given)()
    return repr(
        _with_members(
            drafter, [given if member == bare else member for member in members_of(drafter)]
        )
    )


def why_no_head(draft: str | Path) -> str | None:
    """Return why a folder is not a head, or `None` if there is no such folder."""
    path = head_path(draft)
    return str(unknown_format(Checkpoint(path))) if _may_be_head(path) else None


def with_networks(
    drafter: AnyDrafter, given: Mapping[str, Any], usual: Mapping[str, Any]
) -> AnyDrafter:
    """Return a drafter with its networks and settings; the one that was given stays as it is.

    A drafter that brings networks of its own gets none of `usual`.

    Args:
        drafter: The drafter, or a pool.
        given: What the user gave beside the drafter, by setting; each drafter gets what it takes.
        usual: What those drafters get that take it and do not have it.

    Raises:
        OptionError: If no drafter takes a given setting, a drafter has it already, or a drafter
            needs a missing network.
    """
    for key in sorted(given.keys() - settings_of(drafter)):
        raise OptionError(
            f"drafter {repr(drafter)!r} takes no {_WORDS[key]}; leave it out or choose another drafter"
        )
    members = [
        _with_networks(member, opened, given, usual)
        for member, opened in zip(members_of(drafter), open_settings(drafter), strict=True)
    ]
    return _with_members(drafter, members)


def _with_networks(
    member: AnyDrafter,
    opened: Mapping[str, Any],
    given: Mapping[str, Any],
    usual: Mapping[str, Any],
) -> AnyDrafter:
    closed = {setting.name for setting in _settings(member)} - opened.keys()
    if twice := sorted(closed & given.keys()):
        raise OptionError(
            f"drafter {repr(member)!r} has a {_WORDS[twice[0]]} already; leave out one of the two"
        )
    brings = closed & {"model", "models", "target"}
    provided = given if brings else {**usual, **given}
    changes = {key: provided[key] for key in opened if key in provided}
    for key in ("model", "models"):
        if key in opened and key not in changes:
            raise OptionError(
                f"drafter {repr(member)!r} needs a {_WORDS[key]}; give one, or use drafter='ngram'"
            )
    # A drafter may keep texts of its decoder: each decoder has a copy.
    is_kept = brings or not is_dataclass(member) or all(each.init for each in fields(member))
    drafter: Any = member
    return member if is_kept and not changes else replace(drafter, **changes)


def _with_members(drafter: AnyDrafter, members: Sequence[AnyDrafter]) -> AnyDrafter:
    if not isinstance(drafter, Pool):
        return members[0]
    return Pool(*members, min_nodes=drafter.min_nodes)


def _may_be_head(path: Path) -> bool:
    return path.is_file() or (path / CONFIG).is_file()
