"""Notifications ready-made for Slack, Discord, ntfy and mail: what happened, why, next; to real servers on this machine."""

from __future__ import annotations

import http.server
import json
import socketserver
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from lamplighter.safe_text import mask
from lamplighter.watch import notify
from lamplighter.watch.notify import Notifier
from lamplighter.watch.services import letter, send_mail

MESSAGE = {
    "run": "r",
    "kind": "stuck",
    "cause": "worker_hang",
    "text": "worker 3 <!channel> waits",
    "next": "lamp why r",
    "step": 40,
}


@pytest.mark.parametrize(
    "target",
    [
        "https://hooks.slack.com/services/T/B/x",
        "https://discord.com/api/webhooks/1/x",
        "ntfy:topic",
        "mailto:me@example.org",
    ],
)
def test_each_says_what_happened_why_and_next(target: str) -> None:
    sent = letter(target, MESSAGE)
    assert sent is not None
    told = sent.body.decode() + json.dumps(dict(sent.headers)) + sent.subject
    for part in ("stuck", "worker_hang", "worker 3", "lamp why r", "40"):
        assert part in told, part


def test_each_has_the_form_that_its_service_wants() -> None:
    slack, discord = (
        letter(f"https://{host}", MESSAGE)
        for host in ("hooks.slack.com/services/T/B/x", "discord.com/api/webhooks/1/x")
    )
    assert slack and discord
    assert "&lt;!channel&gt;" in json.loads(slack.body)["text"] and "<!channel>" not in slack.body.decode(), (
        "nobody is called by a run's words"
    )
    assert json.loads(discord.body)["allowed_mentions"] == {"parse": []}
    for target, address in (("ntfy:a/b c", "https://ntfy.sh/a%2Fb%20c"), ("ntfy://push.example/t", "https://push.example/t"), ("https://ntfy.sh/t", "https://ntfy.sh/t")):  # fmt: skip
        sent = letter(target, MESSAGE)
        assert sent and sent.address == address and sent.headers["Priority"] == "high"
    other = letter("https://example.org/hook", MESSAGE)
    assert other and json.loads(other.body) == MESSAGE
    assert letter("mail -s x me", MESSAGE) is None and letter("ntfy publish x", MESSAGE) is None


def test_a_topic_is_a_secret() -> None:
    assert "topic" not in mask("notify ntfy:topic-of-mine") and "mine" not in mask(
        "--watch.notify ntfy://host.example/mine"
    )


class _Server(http.server.BaseHTTPRequestHandler):
    heard: list[tuple[str, dict[str, str], bytes]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.heard.append((self.path, dict(self.headers), body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def server() -> Iterator[int]:
    _Server.heard = []
    with http.server.HTTPServer(("127.0.0.1", 0), _Server) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield listening.server_address[1]
        listening.shutdown()


def test_a_message_arrives_at_a_server(server: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamplighter.watch.services._ntfy", lambda _: f"http://127.0.0.1:{server}/topic")
    said: list[str] = []
    one = Notifier("ntfy:topic", "r", said.append)
    one.tell("stuck", "worker 3 waits", cause="worker_hang", next="lamp why r")
    one.close()
    assert not said
    ((path, headers, body),) = _Server.heard
    assert path == "/topic" and headers["Title"] == "lamp: r stuck: worker_hang" and b"next: lamp why r" in body


class _Smtp(socketserver.StreamRequestHandler):
    heard: list[str] = []

    def handle(self) -> None:
        """As much of a mail server as a letter needs."""
        self.wfile.write(b"220 here\r\n")
        letter_of: list[str] | None = None
        for line in self.rfile:
            text = line.decode().rstrip("\r\n")
            if letter_of is not None:
                if text == ".":
                    self.heard.append("\n".join(letter_of))
                    letter_of = None
                    self.wfile.write(b"250 taken\r\n")
                else:
                    letter_of.append(text)
                continue
            if text.upper() == "DATA":
                letter_of = []
                self.wfile.write(b"354 go on\r\n")
            elif text.upper().startswith("QUIT"):
                self.wfile.write(b"221 bye\r\n")
                return
            else:
                self.wfile.write(b"250 well\r\n")


def test_a_mail_arrives_and_its_absence_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    _Smtp.heard = []
    with socketserver.TCPServer(("127.0.0.1", 0), _Smtp) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        monkeypatch.setenv("LAMP_SMTP", f"smtp://127.0.0.1:{listening.server_address[1]}")
        sent = letter("mailto:me@example.org", {**MESSAGE, "cause": "a\r\nBcc: evil@example.org"})
        assert sent
        send_mail(sent)
        listening.shutdown()
    assert "Subject: [lamp] r stuck" in _Smtp.heard[0] and "next: lamp why r" in _Smtp.heard[0]
    assert "\nBcc:" not in _Smtp.heard[0].split("\n\n")[0]
    monkeypatch.delenv("LAMP_SMTP")
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr(notify, "_PAUSES_S", ())
    said: list[str] = []
    one = Notifier("mailto:me@example.org", "r", said.append)
    one.tell("dead", "it is gone")
    one.close()
    assert any("LAMP_SMTP" in line for line in said)
