"""The error of a record that does not hold."""

from typing import Final

from monge.core.errors import MongeError

_LONGEST: Final = 60


class MismatchError(MongeError):
    """A part of a record does not hold.

    Args:
        field_name: The field of the certificate.
        reason: The first thing that is wrong with it.
        is_wrong: Whether it shows that the run is not exact.
        place: The round, from 1, if the caller does not know it.
    """

    def __init__(
        self, field_name: str, reason: str, *, is_wrong: bool = True, place: int = 0
    ) -> None:
        super().__init__(reason)
        self.field, self.is_wrong, self.place = field_name, is_wrong, place


def check_equal(name: str, stated: object, right: object, whose: str) -> None:
    """Raise `MismatchError` for a field that is not what was computed again."""
    if stated != right:
        raise MismatchError(name, f"got {_short(stated)}; {whose} {_short(right)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
