"""Messages as the services want them: Slack, Discord, ntfy and mail by one line each, any other address as plain JSON.

In:  what `watch.notify` says, and the message: run, kind, text (why), next, how far it is.
Out: an address, a body and headers; or a mail, sent by the user's own server (LAMP_SMTP) or by sendmail.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from lamplighter.rundir import dollars

_SIGNS = {
    "finished": "✅",
    "stopped": "⏹",
    "paused": "⏸",
    "budget": "💰",
    "stuck": "🟠",
    "dead": "🔴",
    "diverged": "🔴",
    "lost": "🔴",
    "failed": "🔴",
}
_URGENT = ("stuck", "dead", "diverged", "lost", "failed")
_MAIL_S = 8.0


@dataclass(frozen=True)
class Letter:
    """One message, ready to go."""

    address: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    mail: bool = False
    subject: str = ""
    picture: bytes = b""  # beside a mail


def words(message: Mapping[str, Any]) -> tuple[str, list[str]]:
    """What happened; then why, next, and how far it is."""
    kind = str(message.get("kind", ""))
    cause = f": {message['cause']}" if message.get("cause") else ""
    lines = [f"why: {message.get('text', '')}"]
    if message.get("next"):
        lines.append(f"next: {message['next']}")
    if message.get("step"):
        lines.append(
            f"at step {message['step']}"
            + (f", {dollars(message['end_usd'])} at the end" if message.get("end_usd") else "")
        )
    return f"{message.get('run', 'a run')} {kind}{cause}", lines


def letter(target: str, message: Mapping[str, Any], picture: bytes = b"", curve: str = "") -> Letter | None:
    """How this target is told; None where it is a command of the user's. `curve`: the picture in characters, where none is taken."""
    title, lines = words(message)
    kind = str(message.get("kind", ""))
    sign = _SIGNS.get(kind, "")
    host = (urlsplit(target).hostname or "") if target.startswith(("http://", "https://")) else ""
    if target.startswith("mailto:"):
        return Letter(
            unquote(target[7:]),
            "\n".join([title, "", *lines, ""]).encode(),
            mail=True,
            subject=f"[lamp] {title}",
            picture=picture,
        )
    if target.startswith("ntfy:") or host == "ntfy.sh":
        head = {"Title": _header(f"lamp: {title}"), "Priority": "high" if kind in _URGENT else "default", "Content-Type": "text/plain"}  # fmt: skip
        if picture:  # then the words are in a header, where a newline is written as two characters
            told = "\\n".join(" ".join(one.split()) for one in lines)
            head |= {
                "Message": _header(told),
                "Filename": "loss.png",
                "Content-Type": "image/png",
            }
        return Letter(_ntfy(target), picture or "\n".join(lines).encode(), head)
    if host == "hooks.slack.com":
        text = "\n".join([f"{sign} *{_slack(title)}*", *map(_slack, lines), *([curve] if curve else [])])
        return Letter(target, json.dumps({"text": text}).encode())
    if host in ("discord.com", "discordapp.com", "ptb.discord.com", "canary.discord.com"):
        text = "\n".join([f"{sign} **{title}**", *lines])[:1900]
        body = json.dumps({"content": text, "allowed_mentions": {"parse": []}}).encode()
        return _with_file(target, body, picture) if picture else Letter(target, body)
    if host:
        return Letter(target, json.dumps(message).encode())
    return None


def _header(text: str) -> str:
    """As a header can hold it: RFC 2047 where it is not plain ASCII, which ntfy reads."""
    from email.header import Header

    text = " ".join(text.split())
    return text if text.isascii() else Header(text, "utf-8", maxlinelen=10**6).encode()


def _with_file(target: str, told: bytes, picture: bytes) -> Letter:
    """As a form with a file in it (multipart/form-data)."""
    edge = os.urandom(16).hex()
    part = f'--{edge}\r\nContent-Disposition: form-data; name="%s"%s\r\nContent-Type: %s\r\n\r\n'
    first, second = part % ("payload_json", "", "application/json"), part % ("files[0]", '; filename="loss.png"', "image/png")  # fmt: skip
    body = first.encode() + told + b"\r\n" + second.encode() + picture + f"\r\n--{edge}--\r\n".encode()
    return Letter(target, body, {"Content-Type": f"multipart/form-data; boundary={edge}"})


def _slack(text: str) -> str:
    """Slack reads <...> as links and mentions."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _ntfy(target: str) -> str:
    """ntfy:topic is at ntfy.sh; ntfy://host/topic elsewhere."""
    if not target.startswith("ntfy:"):
        return target
    rest = target[5:]
    return f"https://{rest[2:]}" if rest.startswith("//") else f"https://ntfy.sh/{quote(rest, safe='')}"


def send_mail(sent: Letter) -> None:
    """By LAMP_SMTP (smtp://user:word@host:587, smtps://...), else by this machine's sendmail."""
    from email.message import EmailMessage

    mail = EmailMessage()
    mail["To"], mail["From"] = sent.address, os.environ.get("LAMP_MAIL_FROM") or sent.address
    mail["Subject"] = " ".join(sent.subject.split())
    mail.set_content(sent.body.decode("utf-8", "replace"))
    if sent.picture:
        mail.add_attachment(sent.picture, maintype="image", subtype="png", filename="loss.png", disposition="inline")
    server = os.environ.get("LAMP_SMTP")
    if server:
        _by_smtp(server, mail)
    elif program := shutil.which("sendmail"):
        subprocess.run([program, "-t", "-i"], input=mail.as_bytes(), timeout=_MAIL_S, check=True, capture_output=True)
    else:
        raise OSError("no mail server: set LAMP_SMTP=smtp://user:password@host:587, or install sendmail")


def _by_smtp(server: str, mail: Any) -> None:
    import smtplib
    import ssl

    parts = urlsplit(server)
    host, secure = parts.hostname or "localhost", parts.scheme == "smtps"
    kind = smtplib.SMTP_SSL if secure else smtplib.SMTP
    with kind(host, parts.port or (465 if secure else 25), timeout=_MAIL_S) as connection:
        connection.ehlo()
        if not secure and connection.has_extn("starttls"):
            connection.starttls(context=ssl.create_default_context())
        if parts.username:
            connection.login(unquote(parts.username), unquote(parts.password or ""))
        connection.send_message(mail)
