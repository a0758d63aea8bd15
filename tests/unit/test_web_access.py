"""Who may speak to a page or an API of ours: foreign names, foreign pages, missing tokens and too large bodies are refused."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from lamplighter.commands.serve import _access
from lamplighter.errors import AlreadyRunning, UsageError
from lamplighter.web_access import Access, Message, Receive, Scope, Send, grant, guard, how_to_open, is_loopback, listen

LOCAL = Access("127.0.0.1", 8123)
OPEN = grant("0.0.0.0", 8123, "a-token-of-ours")


async def _echo(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that reads its whole body and answers with its length."""
    got, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RuntimeError("the client went away")
        got, more = got + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": str(got).encode()})


def _ask(
    access: Access, method: str = "GET", path: str = "/", body: tuple[bytes, ...] = (b"",), **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """One request through the guard: status, headers, body."""
    path, _, query = path.partition("?")
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items() if value]
    scope: Scope = {
        "type": "http", "method": method, "path": path, "query_string": query.encode(),
        "headers": [*([] if "host" in headers else [(b"host", b"localhost:8123")]), *named],
    }  # fmt: skip
    chunks = [{"type": "http.request", "body": part, "more_body": n + 1 < len(body)} for n, part in enumerate(body)]
    sent: list[Message] = []

    async def receive() -> Message:
        return chunks.pop(0) if chunks else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(guard(_echo, access)(scope, receive, send))
    starts = [message for message in sent if message["type"] == "http.response.start"]
    assert len(starts) == 1, "exactly one answer"
    answer = b"".join(message.get("body", b"") for message in sent)
    return starts[0]["status"], {name.decode(): value.decode() for name, value in starts[0]["headers"]}, answer


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8123", "127.0.0.1:9000", "[::1]:8123", "LocalHost.", "127.9.9.9"]
)
def test_its_own_names_are_answered_whatever_port_a_tunnel_has(host: str) -> None:
    assert _ask(LOCAL, host=host)[0] == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8123", "localhost.evil.example", "127.0.0.1.evil.example", "evil@localhost", "10.0.0.5", "",
     "localhost/evil", "localhost:port", "[::1", "2130706433", "0x7f.1"],
)  # fmt: skip
def test_a_foreign_host_is_refused_before_the_application_sees_it(host: str) -> None:
    status, _, body = _ask(LOCAL, host=host)
    assert status == 421
    error = json.loads(body)["error"]
    assert error.pop("message").startswith("this server does not answer to the Host")
    assert error == {"type": "invalid_request_error", "param": None, "code": "foreign_host"}, "OpenAI's form"


def test_two_hosts_are_none() -> None:
    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/", "headers": [(b"host", b"localhost")] * 2}
    from lamplighter.web_access import refusal

    assert (refusal(scope, LOCAL) or (0,))[0] == 421


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:9999", "http://localhost", "file://"]
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_foreign_page_is_refused(origin: str, method: str) -> None:
    assert _ask(LOCAL, method, origin=origin)[0] == 403


def test_our_own_page_and_a_named_one_may_ask() -> None:
    assert _ask(LOCAL, "POST", origin="http://localhost:8123", sec_fetch_site="same-origin")[0] == 200
    assert (
        _ask(grant("localhost", 1, origins=frozenset({"https://chat.example"})), origin="https://chat.example")[0]
        == 200
    )


def test_a_link_may_lead_to_us_but_nothing_may_be_embedded() -> None:
    assert _ask(LOCAL, sec_fetch_site="cross-site", sec_fetch_mode="navigate")[0] == 200
    assert _ask(LOCAL, sec_fetch_site="cross-site", sec_fetch_mode="no-cors")[0] == 403
    assert _ask(LOCAL, "POST", sec_fetch_site="cross-site", sec_fetch_mode="navigate")[0] == 403
    assert _ask(LOCAL, sec_fetch_site="same-site", sec_fetch_mode="cors")[0] == 403  # another port of this machine


def test_beyond_loopback_there_is_always_a_token() -> None:
    assert (
        is_loopback("localhost") and is_loopback("::1") and not is_loopback("0.0.0.0") and not is_loopback("box.local")
    )
    assert not grant("127.0.0.1", 1).token
    made = grant("0.0.0.0", 1).token
    assert len(made) >= 32 and made != grant("0.0.0.0", 1).token
    assert made not in repr(grant("0.0.0.0", 1, made))
    with pytest.raises(UsageError, match="token"):
        grant("0.0.0.0", 1, "short")


def test_the_token_opens_by_header_cookie_or_address() -> None:
    assert _ask(OPEN)[0] == 401
    assert _ask(OPEN, authorization="Bearer wrong-one")[0] == 401
    assert _ask(OPEN, authorization="Basic a-token-of-ours")[0] == 401
    assert _ask(OPEN, authorization="Bearer a-token-of-ours")[0] == 200
    assert _ask(OPEN, cookie="x=1; lamp_8123=a-token-of-ours")[0] == 200
    assert _ask(OPEN, cookie="lamp_1=a-token-of-ours")[0] == 401
    assert _ask(OPEN, "POST", "/?token=a-token-of-ours")[0] == 200


def test_what_opens_it_is_said_as_it_was_given_and_health_needs_nothing() -> None:
    for key, said in (("a-key-of-mine", "--api-key"), ("", "?token=")):
        access = _access("0.0.0.0", 8123, key)
        status, _, body = _ask(access, "POST", "/v1/completions")
        error = json.loads(body)["error"]
        assert status == 401 and error["code"] == "token_needed" and said in error["message"]
        assert ("?token=" in error["message"]) is not bool(key)
        assert _ask(access, path="/health")[0] == 200
        assert _ask(access, "POST", "/health")[0] == 401
        assert _ask(access, path="/health", host="evil.example")[0] == 421
        assert _ask(access, path="/healthy")[0] == _ask(access, path="/metrics")[0] == 401
    assert json.loads(_ask(LOCAL, origin="http://evil.example")[2])["error"]["code"] == "foreign_origin"
    assert json.loads(_ask(LOCAL, "POST", content_length="9" * 40)[2])["error"]["code"] == "too_large"


def test_the_token_leaves_the_address_for_a_cookie_that_no_script_reads() -> None:
    status, headers, _ = _ask(OPEN, "GET", "//evil.example/%0d/x?a=1&token=a-token-of-ours")
    assert status == 303
    assert headers["location"] == "/evil.example/%250d/x?a=1"
    assert "HttpOnly" in headers["set-cookie"] and "SameSite=Strict" in headers["set-cookie"]


def test_beyond_loopback_numbers_and_the_name_of_the_machine_are_answered() -> None:
    for host in ("192.168.1.7:8123", socket.gethostname(), "[fe80::1]:8123"):
        assert _ask(OPEN, host=host, authorization="Bearer a-token-of-ours")[0] == 200
    assert _ask(OPEN, host="evil.example", authorization="Bearer a-token-of-ours")[0] == 421
    named = grant("0.0.0.0", 8123, "a-token-of-ours", names=frozenset({"gpu.example"}))
    assert _ask(named, host="gpu.example", authorization="Bearer a-token-of-ours")[0] == 200


def test_bodies_are_bounded_with_and_without_a_length() -> None:
    small = Access("localhost", 1, most_body_bytes=10)
    assert _ask(small, "POST", body=(b"12345", b"67890"))[::2] == (200, b"10")
    assert _ask(small, "POST", content_length="11")[0] == 413
    assert _ask(small, "POST", content_length="9" * 4000)[0] == 413
    assert _ask(small, "POST", content_length="-1")[0] == 400
    assert _ask(small, "POST", body=(b"12345", b"678901", b"x"))[0] == 413


def test_every_answer_forbids_framing_and_sniffing() -> None:
    for host in ("localhost", "evil.example"):
        headers = _ask(LOCAL, host=host)[1]
        assert headers["x-frame-options"] == "DENY" and headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in headers["content-security-policy"]


def test_a_port_that_cannot_be_is_refused() -> None:
    for port in (-1, 65536, 99999):
        with pytest.raises(UsageError, match=f"no port {port}"):
            listen("127.0.0.1", port)


def test_a_taken_port_is_named_with_its_holder() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(AlreadyRunning, match=str(port)) as raised:
            listen("127.0.0.1", port)
        assert raised.value.code == 69 and "listens there" in raised.value.why
        with listen("127.0.0.1", port, next_free=True) as second:
            assert second.getsockname()[1] > port
    with pytest.raises(UsageError):
        listen("203.0.113.9", 0)


def test_the_lines_say_where_it_is() -> None:
    assert "http://127.0.0.1:8123/" in how_to_open(LOCAL)[0]
    assert "ssh -L 8123:localhost:8123" in how_to_open(LOCAL)[1]
    assert "?token=a-token-of-ours" in how_to_open(OPEN)[0] and "not encrypted" in how_to_open(OPEN)[-1]


def test_a_websocket_is_guarded_too() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    scope: dict[str, Any] = {
        "type": "websocket",
        "path": "/",
        "headers": [(b"host", b"localhost"), (b"origin", b"http://evil.example")],
    }
    asyncio.run(guard(_echo, LOCAL)(scope, receive, send))
    assert [message["type"] for message in sent] == ["websocket.close"]
