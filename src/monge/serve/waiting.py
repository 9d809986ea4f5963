"""The queue of waiting generations."""

from collections import OrderedDict

from monge.serve.scheduled_generation import ScheduledGeneration


class WaitingQueue:
    """Waiting generations: clients take turns, and so do the requests of one client.

    A turn is one generation, so that a request with many choices delays others by one at a time.
    Every operation takes constant time, whatever waits.
    """

    def __init__(self) -> None:
        self._entries: dict[int, ScheduledGeneration] = {}
        self._clients: OrderedDict[str, OrderedDict[int, dict[int, ScheduledGeneration]]] = (
            OrderedDict()
        )
        self.num_requests = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: ScheduledGeneration) -> None:
        """Append a generation to its request, which waits behind the others of its client."""
        requests = self._clients.setdefault(entry.client, OrderedDict())
        self.num_requests += entry.group_id not in requests
        requests.setdefault(entry.group_id, {})[entry.handle.request_id] = entry
        self._entries[entry.handle.request_id] = entry

    def first(self) -> ScheduledGeneration | None:
        """Return the generation whose turn it is."""
        for requests in self._clients.values():
            return next(iter(next(iter(requests.values())).values()))
        return None

    def take(self, entry: ScheduledGeneration) -> None:
        """Remove the generation whose turn it is; its request and its client go to the end."""
        self.discard(entry.handle.request_id)
        requests = self._clients.get(entry.client, {})
        if requests:
            self._clients.move_to_end(entry.client)
        if entry.group_id in requests:
            self._clients[entry.client].move_to_end(entry.group_id)

    def discard(self, request_id: int) -> ScheduledGeneration | None:
        """Remove a generation and return it; `None` if it does not wait."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            requests = self._clients[entry.client]
            del requests[entry.group_id][request_id]
            if not requests[entry.group_id]:
                del requests[entry.group_id]
                self.num_requests -= 1
            if not requests:
                del self._clients[entry.client]
        return entry

    def get(self, request_id: int) -> ScheduledGeneration | None:
        """Return a generation; `None` if it does not wait."""
        return self._entries.get(request_id)

    def entries(self) -> list[ScheduledGeneration]:
        """Return all of them, in order of arrival."""
        return list(self._entries.values())
