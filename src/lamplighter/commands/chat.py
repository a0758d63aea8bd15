"""The commands of a conversation: /help /params /set /system /clear /save /load /retry /quit, and texts of several lines.

In:  lines that a person types.
Out: what is to be asked, or None; settings and history, changed. In the child of lamp generate.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamplighter import report
from lamplighter.rundir import cannot_write, read_json, write_json
from lamplighter.safe_text import clean_text

if TYPE_CHECKING:
    from lamplighter.data.chat.rows import Message

_HELP = """\
/help              this list
/params            the settings
/set NAME VALUE    one of them: max_tokens temperature top_k top_p seed repetition_penalty stop
/system TEXT       what stands before the conversation (chat models); without TEXT: nothing
/clear             a new conversation (an empty line too)
/retry             the last question once more, with another seed
/save FILE         the conversation and its settings, as JSON;   /load FILE   go on with it
/quit              leave (the end of input too)
A line that ends with \\\\ goes on in the next; \"\"\" begins and ends a text of several lines; // sends a line that begins with /
"""
_KINDS: dict[str, tuple[type, float, float]] = {
    "max_tokens": (int, 1, 10**6), "temperature": (float, 0, 100), "top_k": (int, 0, 10**6), "top_p": (float, 1e-9, 1),
    "seed": (int, 0, 2**62), "repetition_penalty": (float, 1e-3, 1e3),
}  # fmt: skip
_ROLES = ("system", "user", "assistant")


class Chat:
    """A conversation with a model; `said` is its history, `left` says that it is over."""

    def __init__(self, said: list[Message], request: dict[str, Any], has_template: bool) -> None:
        self.said, self.request, self.has_template = said, request, has_template
        self.last = ""
        self.left = False
        self._lines: list[str] = []
        self._in_block = False

    def heard(self, line: str) -> str | None:
        """What a line asks of the model; None: nothing, it was a command or a part of a longer text."""
        if self._in_block or line.strip() == '"""':
            return self._block(line)
        if line.endswith("\\"):
            self._lines.append(line[:-1])
            return None
        whole = "\n".join([*self._lines, line])
        self._lines = []
        if whole.startswith("//"):
            return whole[1:]
        if whole.startswith("/"):
            return self._command(whole)
        return whole

    def _block(self, line: str) -> str | None:
        if line.strip() != '"""':
            self._lines.append(line)
            return None
        self._in_block = not self._in_block
        if self._in_block:
            return None
        whole, self._lines = "\n".join(self._lines), []
        return whole

    def _command(self, line: str) -> str | None:
        word, _, rest = line[1:].partition(" ")
        act = {"help": self._help, "params": self._params, "set": self._set, "system": self._system, "clear": self._clear, "save": self._save, "load": self._load, "retry": self._retry, "quit": self._quit, "exit": self._quit}.get(word)  # fmt: skip
        if act is None:
            _say(f"there is no /{clean_text(word)}; /help lists what there is")
            return None
        return act(rest.strip())

    def _help(self, _: str) -> None:
        report.result(_HELP)

    def _params(self, _: str) -> None:
        shown = {name: self.request[name] for name in (*_KINDS, "stop", "system")}
        report.result("".join(f"{name:<20} {json.dumps(value)}\n" for name, value in shown.items()))

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        name = name.replace("-", "_")
        if name == "stop":
            self.request["stop"] = [value] if value else []
        elif name not in _KINDS:
            _say(
                f"there is no setting {clean_text(name) or 'without a name'}; there are {', '.join((*_KINDS, 'stop'))}"
            )
            return
        else:
            kind, least, most = _KINDS[name]
            try:
                found = kind(value)
            except ValueError:
                found = None
            if found is None or not least <= found <= most:
                _say(f"{name} must be a number from {least:g} to {most:g}, not {clean_text(value) or 'nothing'}")
                return
            self.request[name] = found
        _say(f"{name} is {self.request[name]}")

    def _system(self, rest: str) -> None:
        if not self.has_template:
            _say("this model has no chat template: put it into the prompt")
            return
        self.request["system"] = rest
        _say("the system message is set" if rest else "there is no system message any more")

    def _clear(self, _: str) -> None:
        self.said = []
        _say("a new conversation")

    def _save(self, rest: str) -> None:
        if not rest:
            _say("/save needs a file")
            return
        kept = {name: self.request[name] for name in (*_KINDS, "stop", "system")}
        try:
            write_json(Path(rest), {"format": 1, "messages": list(self.said), "params": kept})
        except OSError as error:
            _say(f"not saved: {cannot_write(Path(rest), error).why}")
            return
        _say(f"saved {len(self.said)} messages to {clean_text(rest)}")

    def _load(self, rest: str) -> None:
        if rest and not Path(rest).exists():
            _say(f"there is no file {clean_text(rest)}")
            return
        found = read_json(Path(rest)) if rest else None
        messages = found.get("messages") if isinstance(found, dict) else None
        fits = isinstance(messages, list) and all(
            isinstance(one, dict) and one.get("role") in _ROLES and isinstance(one.get("content"), str)
            for one in messages
        )
        if not fits or not isinstance(found, dict) or not isinstance(messages, list):
            _say(f"{clean_text(rest) or 'nothing'} holds no conversation that was saved by /save")
            return
        self.said = [{"role": one["role"], "content": one["content"]} for one in messages]
        params = found.get("params")
        for name, value in (params if isinstance(params, dict) else {}).items():
            if name in _KINDS and isinstance(value, int | float) and _KINDS[name][1] <= value <= _KINDS[name][2]:
                self.request[name] = _KINDS[name][0](value)
        if isinstance(params, dict) and isinstance(params.get("system"), str):
            self.request["system"] = params["system"]
        stops = params.get("stop") if isinstance(params, dict) else None
        if isinstance(stops, list) and all(isinstance(one, str) and one for one in stops):
            self.request["stop"] = stops
        _say(f"going on with {len(self.said)} messages of {clean_text(rest)}")

    def _retry(self, _: str) -> str | None:
        if not self.last:
            _say("nothing was asked yet")
            return None
        if self.said and self.said[-1]["role"] == "assistant":
            self.said = self.said[:-2]
        self.request["seed"] += 1
        return self.last

    def _quit(self, _: str) -> None:
        self.left = True


def _say(text: str) -> None:
    """At once, and before the next prompt: a note would come after it."""
    report.result(f"{text}\n")
