"""Connections of the HTTP server: at most so many, none for long that asks for nothing, none with an endless head.

In:  uvicorn's protocol for one connection.
Out: the same, bounded: without it, connections that say nothing use up the descriptors, and nobody else is answered.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

_MOST = 512  # connections
_SPARE = 128  # descriptors for everything else
_ASK_S = 30.0  # for a client to send the head of a request
_HEAD_BYTES = 64 << 10  # of that head


def most_connections() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(16, min(_MOST, soft - _SPARE))


class BoundedProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """One connection. Where there are too many, the one that has been idle for longest is closed, else the new one."""

    most = most_connections()
    ask_s = _ASK_S

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._seen: object = None
        self._head = -1  # bytes of a head that has not ended; httptools counts none (h11 has a limit of its own)
        self._watch = self.loop.call_later(self.ask_s, self._close_if_idle)
        if len(self.connections) > self.most:
            idle = [one for one in self.connections if one is not self and _is_idle(one)]
            victim = min(idle, key=lambda one: one._watch.when(), default=self)
            victim.transport.close()
            self.connections.discard(victim)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.cancel()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._head = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head = -1
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head >= 0:
            self._head += len(data)
            if self._head > _HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The head of the request is too long.")

    def _close_if_idle(self) -> None:
        """Looked at every so often; idle all the time since the last look, it goes."""
        if _is_idle(self) and self.cycle is self._seen:
            self.transport.close()
            return
        self._seen = self.cycle if _is_idle(self) else object()
        self._watch = asyncio.get_running_loop().call_later(self.ask_s, self._close_if_idle)


def _is_idle(connection: Any) -> bool:
    """No request is under way: none has begun, or the last one is answered."""
    return connection.cycle is None or connection.cycle.response_complete
