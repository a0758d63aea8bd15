"""Messages between the parents of a run's nodes, over TCP: whoever does not hold the run's secret is not heard.

In:  a connected socket, the secret that all nodes of a run share.
Out: a Wire that sends and receives JSON objects; LinkLost where the other side has ended or cannot be reached.

Both sides prove that they know the secret before a word is read (a challenge each way), and every message carries a number and
an HMAC-SHA256 of a key of this one connection: nothing can be put in, changed, repeated or left out. It is not encrypted.
Nothing is unpickled, and a message has a largest size.

A node is lost when the kernel of the other machine has acknowledged nothing for UNREACHABLE_S: a process that is stopped or
starved, or a slow network, is not that.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import sys
import threading
import time
from typing import Any

UNREACHABLE_S = 4.0
BEAT_S = 0.5  # something is said at least so often, so that a cut cable is noticed
MOST_BYTES = 8 << 20
SECRET_LETTERS = 16  # fewer could be guessed from what goes over the network
_GREETING = b"LAMPNOD1"
_NONCE = 32
_TAG = 32
_HANDSHAKE_S = 5.0
_HEAD = struct.Struct("!I")
_NUMBER = struct.Struct("!Q")


class LinkLost(ConnectionError):
    """The parent of another node has ended, cannot be reached, or does not speak our language."""


class SecretDiffers(LinkLost):
    """It has another secret, or none."""


class Wire:
    """One connection that has proved itself."""

    def __init__(self, link: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        self.link = link
        self.send_key, self.receive_key = send_key, receive_key
        self.sent = self.received = 0
        self.buffer = b""
        self.heard_at = time.monotonic()
        self.sending = threading.Lock()

    @property
    def own_address(self) -> str:
        return str(self.link.getsockname()[0])

    @property
    def address(self) -> str:
        """Of the other side."""
        return str(self.link.getpeername()[0])

    def send(self, do: str, **fields: Any) -> None:
        """One message; LinkLost where nobody takes it."""
        payload = json.dumps({"do": do, **fields}, default=str).encode()
        if len(payload) > MOST_BYTES:
            raise ValueError(f"a message of {len(payload):,} bytes")
        with self.sending:
            tag = _tag(self.send_key, self.sent, payload)
            self.sent += 1
            try:
                self.link.sendall(_HEAD.pack(len(payload)) + tag + payload)
            except OSError as error:
                raise _lost(error) from error

    def messages(self, wait_s: float) -> list[dict[str, Any]]:
        """What has come, after at most so long; LinkLost at the end of it."""
        found = self._whole()
        if found:
            return found
        try:
            ready, _, _ = select.select([self.link], [], [], wait_s)
            data = self.link.recv(1 << 18) if ready else b""
        except (OSError, ValueError) as error:  # ValueError: closed by us meanwhile
            raise _lost(error) from error
        if ready and not data:
            raise LinkLost("the connection was closed: its process has ended")
        self.buffer += data
        return self._whole()

    def _whole(self) -> list[dict[str, Any]]:
        """Messages that are complete; the first that is not genuine ends the connection."""
        found = []
        while len(self.buffer) >= _HEAD.size + _TAG:
            (size,) = _HEAD.unpack(self.buffer[: _HEAD.size])
            if size > MOST_BYTES:
                raise LinkLost(f"a message of {size:,} bytes was announced")
            end = _HEAD.size + _TAG + size
            if len(self.buffer) < end:
                break
            tag, payload = self.buffer[_HEAD.size : _HEAD.size + _TAG], self.buffer[_HEAD.size + _TAG : end]
            if not _same(tag, _tag(self.receive_key, self.received, payload)):
                raise LinkLost("a message was not genuine")
            self.received += 1
            self.buffer = self.buffer[end:]
            self.heard_at = time.monotonic()
            message = _parsed(payload)
            if not isinstance(message, dict) or not isinstance(message.get("do"), str):
                raise LinkLost("a message made no sense")
            found.append(message)
        return found

    def close(self) -> None:
        self.link.close()


def _parsed(payload: bytes) -> Any:
    try:
        return json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise LinkLost("a message made no sense") from error


def _tag(key: bytes, number: int, payload: bytes) -> bytes:
    return _digest(key, _NUMBER.pack(number) + payload)


def _digest(key: bytes, data: bytes) -> bytes:
    import hmac  # loads OpenSSL, which a run on one machine does not need

    return hmac.digest(key, data, "sha256")


def _same(one: bytes, other: bytes) -> bool:
    """In the same time, whatever they are."""
    import hmac

    return hmac.compare_digest(one, other)


def _lost(error: Exception) -> LinkLost:
    if isinstance(error, TimeoutError):
        return LinkLost(f"its machine has acknowledged nothing for {UNREACHABLE_S:.0f} s")
    return LinkLost(getattr(error, "strerror", None) or str(error))


# ---------------------------------------------------------------- the beginning of a connection


def answer(link: socket.socket, secret: bytes) -> Wire:
    """As the side that listens; SecretDiffers for a stranger, who has learned nothing but a random number."""
    until = _prepare(link)
    ours = os.urandom(_NONCE)
    link.sendall(_GREETING + ours)
    greeting, theirs, proof = _read(link, len(_GREETING), until), _read(link, _NONCE, until), _read(link, _TAG, until)
    if greeting != _GREETING or not _same(proof, _prove(secret, b"joins", ours + theirs)):
        link.sendall(bytes(_TAG))
        raise SecretDiffers("it does not know the secret of this run")
    link.sendall(_prove(secret, b"listens", theirs + ours))
    link.settimeout(UNREACHABLE_S)
    nonces = ours + theirs
    return Wire(link, _prove(secret, b"key of who listens", nonces), _prove(secret, b"key of who joins", nonces))


def call(link: socket.socket, secret: bytes) -> Wire:
    """As the side that has connected."""
    until = _prepare(link)
    if _read(link, len(_GREETING), until) != _GREETING:
        raise LinkLost("what listens there is no lamp of this version")
    theirs, ours = _read(link, _NONCE, until), os.urandom(_NONCE)
    link.sendall(_GREETING + ours + _prove(secret, b"joins", theirs + ours))
    if not _same(_read(link, _TAG, until), _prove(secret, b"listens", ours + theirs)):
        raise SecretDiffers("it has another secret")
    link.settimeout(UNREACHABLE_S)
    nonces = theirs + ours
    return Wire(link, _prove(secret, b"key of who joins", nonces), _prove(secret, b"key of who listens", nonces))


def _prove(secret: bytes, what: bytes, nonces: bytes) -> bytes:
    return _digest(secret, what + b"\0" + nonces)


def _prepare(link: socket.socket) -> float:
    """Until when the greeting must be over: a stranger who says a byte now and then must not hold it up."""
    link.settimeout(_HANDSHAKE_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":  # by the kernel, which also speaks for a process that is stopped
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREACHABLE_S * 1000))
    return time.monotonic() + _HANDSHAKE_S


def _read(link: socket.socket, count: int, until: float) -> bytes:
    data = b""
    while len(data) < count:
        if (left_s := until - time.monotonic()) <= 0:
            raise LinkLost(f"the greeting took longer than {_HANDSHAKE_S:.0f} s")
        link.settimeout(left_s)
        try:
            more = link.recv(count - len(data))
        except OSError as error:
            raise _lost(error) from error
        if not more:
            raise LinkLost("the connection was closed in the middle of the greeting")
        data += more
    return data
