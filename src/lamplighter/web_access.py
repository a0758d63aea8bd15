"""Who may speak to a page or an API of ours: loopback by default, a token elsewhere, Host and Origin checked, bodies bounded.

In:  the address to bind to; an ASGI application; every request to it.
Out: a listening socket; the same application behind a guard; the lines that say how to open it.

A browser lets any page that is open somewhere send requests to this machine, and a name that its owner points at 127.0.0.1
(DNS rebinding) makes them look as if they came from here. Hence three checks: of the name that was asked for (Host), of the
page that asks (Origin, Sec-Fetch-Site), and of a token wherever others than this machine's users can reach the port.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import json
import secrets
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from lamplighter.errors import AlreadyRunning, UsageError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_BODY_BYTES = 1 << 20
_HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
}


@dataclass(frozen=True)
class Access:
    """Who is let in: by which names the server may be called, from which pages, with which token (none on loopback)."""

    host: str
    port: int
    token: str = field(default="", repr=False)
    names: frozenset[str] = frozenset()  # further names of this machine, such as that of a proxy before it
    origins: frozenset[str] = frozenset()  # pages of others that may ask, such as https://chat.example
    most_body_bytes: int = MOST_BODY_BYTES
    needed: str = "the token that was printed at the start: ?token=... or Authorization: Bearer ..."  # in words
    without_token: frozenset[str] = (
        frozenset()
    )  # paths that say nothing secret, for those who only look whether it is there

    @property
    def cookie(self) -> str:
        """Cookies are shared by all ports of a host: each server has its own."""
        return f"lamp_{self.port}"

    @property
    def address(self) -> str:
        """Where a browser on this machine opens it, with the token where one is needed."""
        shown = self.host if not _is_any(self.host) else "127.0.0.1"
        named = f"[{shown}]" if ":" in shown else shown
        return f"http://{named}:{self.port}/" + (f"?token={self.token}" if self.token else "")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that is bound to this host."""
    if host.lower() == "localhost":
        return True
    number = _ip(host)
    return number is not None and number.is_loopback


def grant(host: str, port: int, token: str = "", **more: Any) -> Access:
    """The access of a server that is bound there: beyond loopback there is always a token, made here if none is given."""
    if token and (not token.isascii() or not token.isprintable() or " " in token or len(token) < 8):
        raise UsageError(
            "the token cannot be used", "it needs 8 or more printable characters without spaces", "leave it away: one is made"
        )  # fmt: skip
    return Access(host, port, token or ("" if is_loopback(host) else secrets.token_urlsafe(24)), **more)


def how_to_open(access: Access) -> list[str]:
    """The address, and the line that brings it to another machine."""
    lines = [f"open {access.address}"]
    if is_loopback(access.host):
        lines.append(
            f"from another machine: ssh -L {access.port}:localhost:{access.port} {socket.gethostname()}"
            f" and open http://localhost:{access.port}/ there"
        )
    else:
        lines.append(f"whoever has this address can use it from other machines: http://{socket.gethostname()}:{access.port}/?token=...")  # fmt: skip
        lines.append("it is not encrypted: on a network that you do not trust, stay on loopback and use ssh -L")
    return lines


# ---------------------------------------------------------------- the socket


def listen(host: str, port: int, next_free: bool = False) -> socket.socket:
    """A listening socket; port 0 takes any. A taken one is an error that says by whom, or with `next_free` the next is tried."""
    if not 0 <= port <= 65535:  # the system would take the rest of a division, and say nothing
        raise UsageError(f"there is no port {port}", "ports are 0 to 65535", "leave --port away, or give another one")
    for candidate in range(port, min(port + 20, 65536) if next_free and port else port + 1):
        try:
            return _bind(host, candidate)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                why = error.strerror or str(error)
                raise UsageError(f"cannot listen at {host} port {port}", why, "leave --host away, or give another --port") from error  # fmt: skip
    raise AlreadyRunning(f"port {port} is taken", _holder(port), f"end it, or choose another one: --port {port + 1}")


def _bind(host: str, port: int) -> socket.socket:
    kind, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    server = socket.socket(kind, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(where)
        server.listen(128)
        server.set_inheritable(False)
    except OSError:
        server.close()
        raise
    return server


def _holder(port: int) -> str:
    """Who listens there, as far as it can be seen."""
    import psutil

    try:
        found = [
            one
            for one in psutil.net_connections("tcp")
            if one.status == "LISTEN" and one.laddr and one.laddr.port == port
        ]
        pid = next((one.pid for one in found if one.pid), None)
        return (
            f"process {pid} ({psutil.Process(pid).name()}) listens there"
            if pid
            else "a process of another user listens there"
        )
    except psutil.Error:  # another user's, or just ended: then only the fact is known
        return "another process listens there"


# ---------------------------------------------------------------- the guard


def guard(app: Application, access: Access) -> Application:
    """The same application; who may not come in gets 4xx with the reason, and the application never sees the request."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):  # start and end of the server
            await app(scope, receive, send)
        elif (refused := refusal(scope, access)) is not None:
            await _refuse(scope, send, *refused)
        elif (location := _without_token(scope, access)) is not None:
            await _take_cookie(send, access, location)
        else:
            await _bounded(app, access, scope, receive, send)

    return guarded


def refusal(scope: Scope, access: Access) -> tuple[int, str, str] | None:
    """Status, name and words of what is wrong with a request; None: it may come in."""
    headers = _headers(scope)
    hosts = headers.get("host", [])
    if len(hosts) != 1 or not _host_is_ours(hosts[0], access):
        name = hosts[0][:100] if hosts else "none"
        return 421, "foreign_host", f"this server does not answer to the Host {name!r}; it is called {access.host}"
    if not _origin_may_ask(scope, headers, hosts[0], access):
        return 403, "foreign_origin", "another site's page may not use this server"
    is_open = scope.get("method") in ("GET", "HEAD") and scope.get("path") in access.without_token
    if access.token and not is_open and not _has_token(scope, headers, access):
        return 401, "token_needed", f"give {access.needed}"
    lengths = headers.get("content-length", ["0"])
    if len(lengths) != 1 or not (lengths[0].isascii() and lengths[0].isdecimal()):
        return 400, "bad_request", "Content-Length is not a number"
    if len(lengths[0]) > 18 or int(lengths[0]) > access.most_body_bytes:
        return _too_large(access)
    return None


def _too_large(access: Access) -> tuple[int, str, str]:
    return 413, "too_large", f"a request may have at most {access.most_body_bytes:,} bytes"


def _headers(scope: Scope) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in scope.get("headers", ()):
        found.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1").strip())
    return found


def _host_is_ours(header: str, access: Access) -> bool:
    """A name can be pointed at us by anybody, so it must be known; a number cannot, so beyond loopback any will do."""
    try:
        name = (urlsplit(f"//{header}").hostname or "").rstrip(".")
        _ = urlsplit(f"//{header}").port  # a port that is no number
    except ValueError:
        return False
    if not name or any(c in header for c in "@/?#\\ "):
        return False
    if is_loopback(name) or name in (access.host.lower(), *(one.lower() for one in access.names)):
        return True
    beyond = not is_loopback(access.host)
    return beyond and (_ip(name) is not None or name in (socket.gethostname().lower(), socket.getfqdn().lower()))


def _origin_may_ask(scope: Scope, headers: dict[str, list[str]], host: str, access: Access) -> bool:
    """A browser says from which page a request comes: it must be one of ours, or a person who followed a link to us."""
    origins = headers.get("origin", [])
    if len(origins) > 1:
        return False
    if origins:
        return (
            origins[0].lower() in (f"http://{host.lower()}", f"https://{host.lower()}") or origins[0] in access.origins
        )
    site = headers.get("sec-fetch-site", ["none"])[0]
    if site in ("none", "same-origin"):
        return True
    return scope.get("method") in ("GET", "HEAD") and headers.get("sec-fetch-mode", [""])[0] == "navigate"


def _has_token(scope: Scope, headers: dict[str, list[str]], access: Access) -> bool:
    given = [value for name, value in _query(scope) if name == "token"]
    given += [words[1] for one in headers.get("authorization", []) if len(words := one.split(None, 1)) == 2 and words[0].lower() == "bearer"]  # fmt: skip
    for line in headers.get("cookie", []):
        pairs = (one.strip().partition("=") for one in line.split(";"))
        given += [value for name, _, value in pairs if name == access.cookie]
    return any(hmac.compare_digest(one.encode(), access.token.encode()) for one in given)


def _without_token(scope: Scope, access: Access) -> str | None:
    """Where to go on without the token in the address, which would stand in the history and in every link; None: it is not there."""
    query = _query(scope)
    if not access.token or scope["type"] != "http" or scope["method"] != "GET" or "token" not in dict(query):
        return None
    left = urlencode([(name, value) for name, value in query if name != "token"])
    path = "/" + quote(scope["path"].lstrip("/\\"))  # two slashes would lead to another host
    return path + (f"?{left}" if left else "")


def _query(scope: Scope) -> list[tuple[str, str]]:
    return parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True, max_num_fields=100)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:  # a name
        return None


def _is_any(host: str) -> bool:
    number = _ip(host)
    return not host or (number is not None and number.is_unspecified)


# ---------------------------------------------------------------- answers


async def _refuse(scope: Scope, send: Send, status: int, kind: str, words: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": words[:100]})
        return
    error = {
        "message": words,
        "type": "invalid_request_error",
        "param": None,
        "code": kind,
    }  # as OpenAI's clients expect
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *_HEADERS.items()]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body})


async def _take_cookie(send: Send, access: Access, location: str) -> None:
    """The browser keeps the token where no page's script can read it, and where no other site's page makes it be sent."""
    cookie = f"{access.cookie}={access.token}; Path=/; HttpOnly; SameSite=Strict; Max-Age=2592000"
    headers = [
        (b"location", location.encode("ascii", "ignore")),
        (b"set-cookie", cookie.encode()),
        (b"content-length", b"0"),
    ]
    headers += [*_HEADERS.items(), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": 303, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def _bounded(app: Application, access: Access, scope: Scope, receive: Receive, send: Send) -> None:
    """The application, with its headers completed, and cut off where a body without a length grows too large."""
    got, started, over = 0, False, False

    async def receive_bounded() -> Message:
        nonlocal got, over
        message = await receive()
        got += len(message.get("body", b"")) if message["type"] == "http.request" else 0
        if got <= access.most_body_bytes:
            return message
        if not started and not over:
            over = True
            await _refuse(scope, send, *_too_large(access))
        over = True
        return {"type": "http.disconnect"}

    async def send_completed(message: Message) -> None:
        nonlocal started
        if over:  # it has its answer
            return
        if message["type"] == "http.response.start":
            started = True
            given = {name.lower() for name, _ in message.get("headers", ())}
            more = [(name, value) for name, value in _HEADERS.items() if name not in given]
            message = {**message, "headers": [*message.get("headers", ()), *more]}
        await send(message)

    try:
        await app(scope, receive_bounded, send_completed)
    except Exception:
        if not over:  # what an application says when its request breaks off is no fault of its own
            raise
