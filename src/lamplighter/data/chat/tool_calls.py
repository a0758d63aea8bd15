"""Calls of tools, as text: what a row offers, what the model calls, and conversations that are one text with speakers in it.

In:  OpenAI's `tools`, `tool_calls` and `function_call`; what a speaker named function_call says; glaive's `system` and `chat`.
Out: text for a message: `<tools>` for the system message, `<tool_call>` with the call as JSON for an answer; glaive's turns.
"""

from __future__ import annotations

import json
import re
from typing import Any


class NotAnExample(Exception):
    """Why a row cannot be learned from, in a few words that are the same for rows of the same fault."""


# ---------------------------------------------------------------- what is offered, what is called


def offered(found: object) -> str:
    """The functions that a row offers, for its system message."""
    if isinstance(found, str) and found.strip():
        try:
            found = json.loads(found)
        except ValueError:
            raise NotAnExample("tools is not JSON") from None
    if not found:
        return ""
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise NotAnExample("tools is not a list of functions")
    lines = [json.dumps(one.get("function", one), ensure_ascii=False) for one in found]
    return "\n".join(["You may call these functions:", "<tools>", *lines, "</tools>"])


def calls_of(turn: dict[str, Any]) -> list[str]:
    """OpenAI's tool_calls (and its older function_call) of one message."""
    found = turn.get("tool_calls")
    if found is None and turn.get("function_call") is not None:
        found = [{"function": turn["function_call"]}]
    if found in (None, []):
        return []
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise NotAnExample("tool_calls is not a list of calls")
    return [_one_call(one.get("function", one)) for one in found]


def spoken_call(content: str) -> str:
    """What a speaker named function_call says: JSON, one call or a list of them."""
    try:
        found = json.loads(content)
    except ValueError:
        raise NotAnExample("a function_call is not JSON") from None
    return "\n".join(_one_call(one) for one in (found if isinstance(found, list) else [found]))


def _one_call(call: object) -> str:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        raise NotAnExample("a tool call has no function name")
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            raise NotAnExample("the arguments of a tool call are not JSON") from None
    made = json.dumps({"name": call["name"], "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{made}\n</tool_call>"


# ---------------------------------------------------------------- glaive-function-calling, as published

_TURN = re.compile(r"(?:^|\n)\s*(USER|ASSISTANT|FUNCTION RESPONSE):[ \t]*")
_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
_CALL = re.compile(r"<functioncall>\s*(.*)", re.DOTALL)
_QUOTED = re.compile(r"""^(\{.*"arguments"\s*:\s*)'(.*)'(\s*\})$""", re.DOTALL)
_END = "<|endoftext|>"


def is_glaive(row: dict[str, Any]) -> bool:
    return isinstance(row.get("chat"), str) and _TURN.match(row["chat"]) is not None


def glaive_messages(row: dict[str, Any]) -> list[dict[str, str]]:
    """The turns of one text: "USER: ...", "ASSISTANT: ... <|endoftext|>", "FUNCTION RESPONSE: ..."."""
    messages = []
    system = row.get("system")
    if isinstance(system, str) and (said := system.strip().removeprefix("SYSTEM:").strip()):
        messages.append({"role": "system", "content": said})
    _, *parts = _TURN.split(row["chat"])
    for speaker, said in zip(parts[::2], parts[1::2], strict=True):
        content = said.strip().removesuffix(_END).rstrip()
        if speaker == "ASSISTANT" and (call := _CALL.search(content)):
            before = content[: call.start()].rstrip()
            content = "\n".join([*([before] if before else []), spoken_call(_unquoted(call[1].strip()))])
        messages.append({"role": _ROLES[speaker], "content": content})
    return messages


def _unquoted(call: str) -> str:
    """{"name": "f", "arguments": '{"a": 1}'} is no JSON: the arguments stand in single quotes."""
    found = _QUOTED.match(call)
    return call if found is None else "".join([found[1], found[2].replace("\\'", "'"), found[3]])
