"""Plain HTTP/1.1 for httpx.

httpx's own connection pool takes more time for a request than all bets on its text.
"""

import asyncio
from typing import Final

import h11
import httpx

_CHUNK: Final = 1 << 16

_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter, h11.Connection]


class Connections(httpx.AsyncBaseTransport):
    """Connections to one server, which are used again.

    It needs asyncio, and reads answers whole.
    """

    def __init__(self) -> None:
        self._free = list[_Connection]()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """One request; see `httpx.AsyncBaseTransport`.

        Raises:
            httpx.TransportError: If there is no connection, or no whole answer in time.
        """
        try:
            async with asyncio.timeout(request.extensions["timeout"]["read"]):
                return await self._exchange(request)
        except TimeoutError as error:
            raise httpx.ReadTimeout("no answer in time", request=request) from error
        except OSError as error:
            raise httpx.NetworkError(str(error), request=request) from error
        except h11.RemoteProtocolError as error:
            raise httpx.RemoteProtocolError(str(error), request=request) from error

    async def aclose(self) -> None:
        """Close all connections that are not in use."""
        while self._free:
            self._free.pop()[1].close()

    async def _exchange(self, request: httpx.Request) -> httpx.Response:
        reader, writer, http = connection = await self._connection(request.url)
        is_kept = False
        try:
            sent: list[h11.Event] = [
                h11.Request(
                    method=request.method,
                    target=request.url.raw_path,
                    headers=request.headers.raw,
                ),
                h11.Data(data=request.read()),
                h11.EndOfMessage(),
            ]
            writer.write(b"".join(http.send(event) or b"" for event in sent))
            status, headers, content = 0, list[tuple[bytes, bytes]](), bytearray()
            while not isinstance(event := http.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    http.receive_data(await reader.read(_CHUNK))
                elif isinstance(event, h11.Response):
                    status, headers = event.status_code, list(event.headers)
                elif isinstance(event, h11.Data):
                    content += event.data
            if http.our_state is http.their_state is h11.DONE:
                http.start_next_cycle()
                self._free.append(connection)
                is_kept = True
        finally:
            if not is_kept:
                writer.close()
        return httpx.Response(status, headers=headers, content=bytes(content), request=request)

    async def _connection(self, url: httpx.URL) -> _Connection:
        while self._free:
            reader, writer, http = self._free.pop()
            if not reader.at_eof():
                return reader, writer, http
            writer.close()
        reader, writer = await asyncio.open_connection(url.host, url.port or 80)
        return reader, writer, h11.Connection(h11.CLIENT)
