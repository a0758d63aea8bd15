"""Notifications ready-made for Slack, Discord, ntfy and mail: what happened, why, next; to real servers on this machine."""

from __future__ import annotations

import email
import email.header
import http.server
import io
import json
import socketserver
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lamplighter.rundir import RunDir
from lamplighter.safe_text import mask
from lamplighter.watch import notify, picture, services
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


def _run_with_losses(path: Path) -> RunDir:
    run = RunDir(path)
    run.create()
    rows = [{"step": n, "attempt": 1, "t": 1.0 * n, "train/loss": 5 / n} for n in range(1, 200)]
    rows += [{"step": n, "attempt": 1, "t": 1.0 * n, "eval/val_loss": 5.5 / n} for n in range(50, 200, 50)]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "train/l')
    return run


def test_the_picture_is_a_png_with_the_curve_in_it(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    run = _run_with_losses(tmp_path / "r")
    drawn = picture.loss_picture(run)
    with image.open(io.BytesIO(drawn)) as opened:
        dots = opened.convert("RGB")
        blue = [
            (x, y) for x in range(dots.width) for y in range(dots.height) if dots.getpixel((x, y)) == (0, 0x72, 0xB2)
        ]
    left, right = min(blue), max(blue)
    assert dots.size == (560, 260) and left[1] < 60 < 200 < right[1] and right[0] - left[0] > 450, (
        "it falls from left to right"
    )
    assert len(drawn) < 20_000 and "5 to 0.02513" in picture.loss_words(run)
    empty = RunDir(tmp_path / "empty")
    assert picture.loss_picture(empty) == b"" and picture.loss_words(empty) == ""


def test_each_service_gets_the_curve_in_the_form_that_it_takes(tmp_path: Path) -> None:
    run = _run_with_losses(tmp_path / "r")
    drawn, curve = picture.loss_picture(run), picture.loss_words(run)
    discord = letter("https://discord.com/api/webhooks/1/x", MESSAGE, drawn, curve)
    assert discord is not None
    form = email.message_from_bytes(
        b"Content-Type: " + discord.headers["Content-Type"].encode() + b"\r\n\r\n" + discord.body
    )
    told, file = form.get_payload()
    assert "worker 3" in json.loads(told.get_payload(decode=True))["content"] and file.get_payload(decode=True) == drawn
    ntfy = letter("ntfy:t", MESSAGE, drawn, curve)
    assert ntfy and ntfy.body == drawn and ntfy.headers["Filename"] == "loss.png"
    ((words, charset),) = email.header.decode_header(ntfy.headers["Message"])
    assert "next: lamp why r" in (words.decode(charset or "ascii") if isinstance(words, bytes) else words)
    slack = letter("https://hooks.slack.com/services/T/B/x", MESSAGE, drawn, curve)
    assert slack and curve in json.loads(slack.body)["text"]
    mail = letter("mailto:me@example.org", MESSAGE, drawn, curve)
    assert mail and mail.picture == drawn


def test_a_title_of_other_letters_arrives_at_ntfy() -> None:
    for name, plain in (("größe", False), ("size", True)):
        told = letter("ntfy:t", {**MESSAGE, "run": name})
        assert told and told.headers["Title"].isascii() and (name in told.headers["Title"]) == plain
        ((words, charset),) = email.header.decode_header(told.headers["Title"])
        assert name in (words.decode(charset or "ascii") if isinstance(words, bytes) else words)


def test_a_topic_is_a_secret() -> None:
    assert "topic" not in mask("notify ntfy:topic-of-mine") and "mine" not in mask(
        "--watch.notify ntfy://host.example/mine"
    )


class _Server(http.server.BaseHTTPRequestHandler):
    heard: list[tuple[str, dict[str, str], bytes]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.heard.append((self.path, dict(self.headers), body))
        self.send_response(400 if "no-pictures" in self.path and body.startswith(b"\x89PNG") else 200)
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


@pytest.mark.parametrize("target", ["https://hooks.slack.com/services/T/B/x", "https://discord.com/api/webhooks/1/x"])
def test_a_message_arrives_at_a_webhook(
    server: int, target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the same sender; only the name in the address is led to a server on this machine."""
    post, host = notify._post, target.split("/")[2]

    def here(address: str, body: bytes, headers: Mapping[str, str]) -> None:
        post(address.replace(f"https://{host}", f"http://127.0.0.1:{server}"), body, headers)

    monkeypatch.setattr(notify, "_post", here)
    said: list[str] = []
    one = Notifier(target, "r", said.append, _run_with_losses(tmp_path / "r"))
    one.tell("stuck", "worker 3 <!channel> waits", cause="worker_hang", next="lamp why r")
    one.close()
    assert not said
    ((path, _, body),) = _Server.heard
    assert target.endswith(path)
    assert b"worker_hang" in body and b"why: worker 3" in body and b"next: lamp why r" in body
    assert b"<!channel>" not in body if "slack" in host else b"\x89PNG" in body and b'"parse": []' in body


def test_a_server_that_takes_no_picture_gets_the_words(
    server: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("lamplighter.watch.services._ntfy", lambda _: f"http://127.0.0.1:{server}/no-pictures")
    said: list[str] = []
    one = Notifier("ntfy:topic", "r", said.append, _run_with_losses(tmp_path / "r"))
    one.tell("stuck", "worker 3 waits", next="lamp why r")
    one.close()
    assert not said
    first, second = _Server.heard
    assert first[2].startswith(b"\x89PNG") and b"next: lamp why r" in second[2]


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
        sent = letter(
            "mailto:me@example.org", {**MESSAGE, "cause": "a\r\nBcc: evil@example.org"}, b"\x89PNG of a curve"
        )
        assert sent
        send_mail(sent)
        listening.shutdown()
    assert "Subject: [lamp] r stuck" in _Smtp.heard[0] and "next: lamp why r" in _Smtp.heard[0]
    assert 'filename="loss.png"' in _Smtp.heard[0] and "Content-Type: image/png" in _Smtp.heard[0]
    assert "\nBcc:" not in _Smtp.heard[0].split("\n\n")[0]
    monkeypatch.delenv("LAMP_SMTP")
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr(notify, "_PAUSES_S", ())
    said: list[str] = []
    one = Notifier("mailto:me@example.org", "r", said.append)
    one.tell("dead", "it is gone")
    one.close()
    assert any("LAMP_SMTP" in line for line in said)


def test_an_end_says_what_to_do_and_a_process_held_by_a_signal_is_no_end(tmp_path: Path) -> None:
    one = Notifier("true", "r", lambda _: None, RunDir(tmp_path / "runs" / "r"))
    one.thread = threading.current_thread()  # nobody takes them out of the queue
    one.tell_verdict("stopped", "process 7 is stopped by a signal", next="kill -CONT 7")
    one.tell_end("stopped", "asked to stop", ours=True, code=75)
    one.tell_end("finished", "the command ended with exit code 0", ours=False, code=0)
    one.tell_end("lost", "the command was killed", ours=False, code=-9)
    told = [one.waiting.get_nowait() or {} for _ in range(4)]
    assert [message["kind"] for message in told] == ["paused", "stopped", "finished", "lost"]
    assert told[0]["next"] == "kill -CONT 7" and "goes on where it stopped" in told[1]["next"]
    assert all("lamp report" in message["next"] for message in told[2:]) and told[1]["code"] == 75
    run = one.run
    assert run is not None
    run.create()
    run.status.write_text(
        json.dumps(
            {"state": "finished", "step": 1200, "steps": 1200, "loss": 3.25, "val_loss": 3.5, "usd": 0.042, "format": 1}
        )
    )
    one.tell_end("finished", "finished r", ours=True, code=0)
    assert (one.waiting.get_nowait() or {})[
        "text"
    ] == "finished r; step 1,200 of 1,200; loss 3.2500; validation 3.5000; $0.042"
    assert "next: the same command goes on where it stopped" in services.words(told[1])[1]
