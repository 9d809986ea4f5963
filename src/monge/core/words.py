"""Numbers of things, in messages."""


def counted(number: int, noun: str) -> str:
    """A number and its noun: `1 answer`, `2 answers`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
