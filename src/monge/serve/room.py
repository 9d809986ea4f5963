"""Room in the caches, in tokens."""


class Room:
    """Reservations for requests that are open at the same time.

    The caches are rectangular: one row per request, all as wide as the longest may become. That is what is charged, so the
    budget bounds the memory of keys and values, beside the few columns in which a round's tree is read.

    Args:
        budget: Tokens for which there is room: rows x longest row.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._sizes: dict[int, int] = {}

    @property
    def used(self) -> int:
        """Tokens charged now."""
        return len(self._sizes) * max(self._sizes.values(), default=0)

    def has_room(self, size: int) -> bool:
        """Whether one more request of this size fits beside the others."""
        return (len(self._sizes) + 1) * max(size, *self._sizes.values(), 0) <= self.budget

    def take(self, request_id: int, size: int) -> None:
        """Reserve."""
        self._sizes[request_id] = size

    def give_back(self, request_id: int) -> None:
        """Release, if anything was reserved."""
        self._sizes.pop(request_id, None)
