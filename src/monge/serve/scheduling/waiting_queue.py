"""Generations that wait until there is room for them."""

from monge.serve.scheduling.generation import Generation


class WaitingQueue:
    """Waiting generations: clients take turns, and so do the requests of a client.

    A turn is a single generation, so a request with many choices delays others only turn by turn.
    """

    def __init__(self) -> None:
        self.entries: dict[int, Generation] = {}
        """All of them by number, in order of arrival."""
        self._clients: dict[str, dict[int, dict[int, Generation]]] = {}

    @property
    def num_requests(self) -> int:
        """Client requests that wait, wholly or partly."""
        return sum(map(len, self._clients.values()))

    def add(self, entry: Generation) -> None:
        """Append a generation to its request, which waits for earlier requests of its client."""
        requests = self._clients.setdefault(entry.client, {})
        requests.setdefault(entry.group_id, {})[entry.request_id] = entry
        self.entries[entry.request_id] = entry

    def first(self) -> Generation | None:
        """Return the generation whose turn it is."""
        for requests in self._clients.values():
            return next(iter(next(iter(requests.values())).values()))
        return None

    def take(self, entry: Generation) -> None:
        """Remove the generation whose turn it is; its request and its client go to the end."""
        self.discard(entry.request_id)
        if (requests := self._clients.pop(entry.client, None)) is not None:
            self._clients[entry.client] = requests
            if (group := requests.pop(entry.group_id, None)) is not None:
                requests[entry.group_id] = group

    def discard(self, request_id: int) -> None:
        """Remove a generation, if it waits."""
        entry = self.entries.pop(request_id, None)
        if entry is not None:
            requests = self._clients[entry.client]
            del requests[entry.group_id][request_id]
            if not requests[entry.group_id]:
                del requests[entry.group_id]
            if not requests:
                del self._clients[entry.client]
