"""The budget of KV cache tokens."""


class KVBudget:
    """Reserves KV cache tokens for the requests that are open at the same time.

    The caches are rectangular: they have one row per request, and all rows are as wide as the
    longest. The budget charges this rectangle. It does not count the few columns that hold the tree
    of a round.

    Args:
        total: Tokens that may be reserved: rows x longest row.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._sizes: dict[int, int] = {}

    @property
    def used(self) -> int:
        """Tokens reserved now."""
        return len(self._sizes) * max(self._sizes.values(), default=0)

    def fits(self, size: int) -> bool:
        """Return whether one more request of this size fits."""
        return (len(self._sizes) + 1) * max(size, *self._sizes.values(), 0) <= self.total

    def reserve(self, request_id: int, size: int) -> None:
        """Reserve tokens for a request."""
        self._sizes[request_id] = size

    def release(self, request_id: int) -> None:
        """Release the tokens of a request, if it has any."""
        self._sizes.pop(request_id, None)
