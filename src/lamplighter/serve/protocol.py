"""OpenAI's requests and answers: what a client may ask, checked field by field, and the form of every reply.

In:  the JSON body of a request.
Out: Asked, or an ApiError in OpenAI's form; the objects of replies and of the chunks of a stream. No torch.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

MOST_CHOICES = 16
_MOST_STOPS = 16
_MOST_LOGPROBS = 20
_NOT_SUPPORTED = ("tools", "tool_choice", "functions", "function_call", "logit_bias", "suffix", "best_of", "response_format", "audio", "modalities")  # fmt: skip
_PASSED_OVER = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")  # change no text  # fmt: skip
_KNOWN = {
    *_NOT_SUPPORTED, *_PASSED_OVER, "model", "prompt", "messages", "stream", "stream_options", "echo", "n", "seed", "stop",
    "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logprobs", "top_logprobs",
}  # fmt: skip
_ROLES = ("system", "developer", "user", "assistant")


class ApiError(Exception):
    """An answer that is an error, in OpenAI's form."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", code: str | None = None, param: str | None = None) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.kind, self.code, self.param = status, message, kind, code, param

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Asked:
    """One text to be written, as the child understands it."""

    prompt: str | None = None
    ids: list[int] | None = None
    messages: list[dict[str, str]] | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int = 0
    sample: int = 0
    stop: list[str] = field(default_factory=list)
    logprobs: int = -1

    def record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Wanted:
    """A whole request: the texts that it asks for, and how they are to be sent."""

    texts: list[Asked]
    chat: bool
    stream: bool
    usage_in_stream: bool
    model: str


def parse(body: object, chat: bool) -> Wanted:
    """A request of /v1/chat/completions or /v1/completions; ApiError with the field that is wrong."""
    if not isinstance(body, Mapping):
        raise ApiError(400, "the body must be a JSON object")
    _refuse_half_characters(body)
    for name in _NOT_SUPPORTED:
        if body.get(name) not in (None, [], {}, "none", 1) and body.get(name) != {"type": "text"}:
            raise ApiError(400, f"{name} is not supported by this server", param=name, code="unsupported")
    for name in ("presence_penalty", "frequency_penalty"):
        if _number(body, name, 0.0, -2.0, 2.0):
            raise ApiError(400, f"{name} is not supported; repetition_penalty is", param=name, code="unsupported")
    if body.get("echo"):
        raise ApiError(400, "echo is not supported by this server", param="echo", code="unsupported")
    for name in body:
        if name not in _KNOWN and body[name] is not None:  # min_p of another server would change every text
            raise ApiError(400, f"{name[:60]!r} is no field that this server knows", param=name[:60], code="unknown_parameter")  # fmt: skip
    count = _whole(body, "n", 1, 1, MOST_CHOICES)
    seed = body.get("seed")
    seed = secrets.randbits(31) if seed is None else _whole(body, "seed", 0, -(2**63), 2**63 - 1)
    limit = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    most = None if body.get(limit) is None else _whole(body, limit, 1, 1, 10**9)
    common = Asked(
        max_tokens=most if chat or most is not None else 16,
        temperature=_number(body, "temperature", 1.0, 0.0, 100.0),
        top_p=_number(body, "top_p", 1.0, 1e-9, 1.0),
        top_k=_whole(body, "top_k", 0, 0, 10**9),
        repetition_penalty=_number(body, "repetition_penalty", 1.0, 1e-3, 1e3),
        seed=seed,
        stop=_stops(body.get("stop")),
        logprobs=_logprobs(body, chat),
    )
    prompts = [{"messages": _messages(body.get("messages"))}] if chat else _prompts(body.get("prompt"))
    texts = [Asked(**{**asdict(common), **prompt, "sample": n}) for prompt in prompts for n in range(count)]
    if len(texts) > MOST_CHOICES:
        raise ApiError(400, f"a request may ask for {MOST_CHOICES} texts at most, not {len(texts)}", param="prompt")
    options = body.get("stream_options") or {}
    usage = isinstance(options, Mapping) and bool(options.get("include_usage"))
    model = body.get("model", "")
    if model is not None and not isinstance(model, str):
        raise ApiError(400, "model must be a text", param="model")
    return Wanted(texts, chat, _flag(body, "stream"), usage, model or "")


def _refuse_half_characters(body: Mapping[str, Any]) -> None:
    """JSON may hold halves of surrogates, which are no text: a tokenizer cannot take them."""
    for name in ("prompt", "messages", "stop", "model"):
        try:
            json.dumps(body.get(name), ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ApiError(400, f"{name} is no text that UTF-8 can hold", param=name) from None


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(400, f"{name} must be true or false", param=name)
    return bool(value)


def _number(body: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ApiError(400, f"{name} must be a number from {least:g} to {most:g}", param=name)
    return float(value)


def _whole(body: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or not least <= value <= most:
        raise ApiError(400, f"{name} must be a whole number from {least} to {most}", param=name)
    return value


def _stops(value: object) -> list[str]:
    found = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(found, list) or len(found) > _MOST_STOPS or not all(isinstance(s, str) and 0 < len(s) <= 1000 for s in found):  # fmt: skip
        raise ApiError(400, f"stop must be a text or up to {_MOST_STOPS} texts", param="stop")
    return found


def _logprobs(body: Mapping[str, Any], chat: bool) -> int:
    if not chat:
        return -1 if body.get("logprobs") is None else _whole(body, "logprobs", 0, 0, _MOST_LOGPROBS)
    return _whole(body, "top_logprobs", 0, 0, _MOST_LOGPROBS) if _flag(body, "logprobs") else -1


def _messages(value: object) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise ApiError(400, "messages must be a list with at least one message", param="messages")
    found = []
    for number, one in enumerate(value):
        role = one.get("role") if isinstance(one, Mapping) else None
        if role not in _ROLES:
            raise ApiError(400, f"messages[{number}].role must be one of {', '.join(_ROLES)}", param="messages")
        found.append(
            {"role": "system" if role == "developer" else role, "content": _content(one.get("content"), number)}
        )
    if found[-1]["role"] == "assistant":
        raise ApiError(400, "the last message must not be the assistant's", param="messages")
    return found


def _content(value: object, number: int) -> str:
    """A text, or OpenAI's list of parts, all of them text."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(p, Mapping) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in value):  # fmt: skip
        return "".join(part["text"] for part in value)
    raise ApiError(400, f"messages[{number}].content must be text", param="messages")


def _prompts(value: object) -> list[dict[str, Any]]:
    """A text, texts, ids, or lists of ids."""
    if isinstance(value, str):
        return [{"prompt": value}]
    if isinstance(value, list) and value and len(value) <= MOST_CHOICES and all(isinstance(one, str) for one in value):
        return [{"prompt": one} for one in value]
    if _are_ids(value):
        return [{"ids": value}]
    if isinstance(value, list) and value and len(value) <= MOST_CHOICES and all(_are_ids(one) for one in value):
        return [{"ids": one} for one in value]
    raise ApiError(400, f"prompt must be a text, up to {MOST_CHOICES} texts, or token ids", param="prompt")


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int and 0 <= one < 2**31 for one in value)


# ---------------------------------------------------------------- replies


@dataclass
class Written:
    """One text as it grows."""

    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    end: str | None = None
    model: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)


def new_id(chat: bool) -> str:
    return ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)


def usage_of(wanted: Wanted, texts: list[Written]) -> dict[str, int]:
    """Each prompt counts once, however many texts were written to it."""
    read = sum(one.prompt_tokens for asked, one in zip(wanted.texts, texts, strict=True) if asked.sample == 0)
    made = sum(one.tokens for one in texts)
    return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}


def reply(name: str, wanted: Wanted, texts: list[Written]) -> dict[str, Any]:
    """The whole answer of a request that did not stream."""
    choices = [_choice(number, one, wanted.chat) for number, one in enumerate(texts)]
    kind = "chat.completion" if wanted.chat else "text_completion"
    model = texts[0].model if texts else ""
    return {"id": name, "object": kind, "created": int(time.time()), "model": model, "choices": choices, "usage": usage_of(wanted, texts)}  # fmt: skip


def _choice(number: int, one: Written, chat: bool) -> dict[str, Any]:
    ended = {"index": number, "finish_reason": one.end, "logprobs": logprobs_of(one.logprobs, chat)}
    if chat:
        return {**ended, "message": {"role": "assistant", "content": one.text, "refusal": None}}
    return {**ended, "text": one.text}


def logprobs_of(found: list[dict[str, Any]], chat: bool, before: int = 0) -> dict[str, Any] | None:
    """In OpenAI's form; `before`: characters of the text in front of these tokens."""
    if not found:
        return None
    if chat:
        return {"content": [{"token": one["token"], "logprob": one["logprob"], "bytes": list(one["token"].encode()), "top_logprobs": [{"token": t, "logprob": p, "bytes": list(t.encode())} for t, p in one["top"]]} for one in found], "refusal": None}  # fmt: skip
    tokens = [one["token"] for one in found]
    return {
        "tokens": tokens,
        "token_logprobs": [one["logprob"] for one in found],
        "top_logprobs": [dict(one["top"]) for one in found],
        "text_offset": [before + sum(map(len, tokens[:n])) for n in range(len(tokens))],
    }


def chunk(name: str, wanted: Wanted, number: int, piece: str, part: Written, found: list[dict[str, Any]]) -> dict[str, Any]:  # fmt: skip
    """One event of a stream: a piece of a text, or its end."""
    logprobs = logprobs_of(found, wanted.chat, len(part.text) - len(piece))
    if wanted.chat:
        delta: dict[str, Any] = {"content": piece} if piece or part.end is None else {}
        choice = {"index": number, "delta": delta, "finish_reason": part.end, "logprobs": logprobs}
    else:
        choice = {"index": number, "text": piece, "finish_reason": part.end, "logprobs": logprobs}
    return _event(name, wanted, part.model, [choice])


def first_chunk(name: str, wanted: Wanted, number: int, model: str) -> dict[str, Any]:
    choice = {"index": number, "delta": {"role": "assistant", "content": ""}, "finish_reason": None, "logprobs": None}
    return _event(name, wanted, model, [choice])


def usage_chunk(name: str, wanted: Wanted, texts: list[Written]) -> dict[str, Any]:
    return {**_event(name, wanted, texts[0].model if texts else "", []), "usage": usage_of(wanted, texts)}


def _event(name: str, wanted: Wanted, model: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    kind = "chat.completion.chunk" if wanted.chat else "text_completion"
    return {"id": name, "object": kind, "created": int(time.time()), "model": model, "choices": choices}
