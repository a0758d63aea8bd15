"""llama.cpp itself, asked about a GGUF file: token ids, greedy answers, probabilities; in a process that may die.

In:  a file, and texts, prompts and scored texts to ask about.
Out: Answers. The library (xllamacpp) is loaded in a process of its own: a file that it cannot read may end it.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lamplighter import report
from lamplighter.errors import BadConfig
from lamplighter.export.opened import ExportFailed
from lamplighter.export.reference import Greedy, Scored
from lamplighter.procs import child
from lamplighter.procs.child import Say

_DEADLINE_S = 3 * 3600.0
_SILENT_S = 900.0
_LIKELIEST = 400  # of which a token of a sampled text is nearly always one
_ONE_THREAD_BYTES = 2 << 30  # its threads wait for each other by spinning: 20 times slower where a core is taken away
_FORCED = 1e4  # added to a logit: no other token is chosen


@dataclass
class Answers:
    """What llama.cpp says."""

    ids: list[list[int]] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)  # ids of chat prompts, by its own template engine
    greedy: list[list[int]] = field(default_factory=list)
    scored: list[tuple[list[float], list[int]]] = field(default_factory=list)


def require() -> None:
    if find_spec("xllamacpp") is None:
        why = "a file that was not run by llama.cpp is not handed out"
        raise BadConfig(
            "GGUF files are checked with xllamacpp, which is missing", why, "pip install 'lamplighter[export]'"
        )


def ask(
    path: Path,
    *,
    texts: list[str] | None = None,
    chats: list[list[dict[str, str]]] | None = None,
    greedy: list[Greedy] | None = None,
    scored: list[Scored] | None = None,
    context: int = 512,
    stops: set[int] | None = None,
) -> Answers:
    """Everything in one start of llama.cpp; ExportFailed with its last words where it cannot."""
    require()
    request = {
        "path": str(path),
        "context": context,
        "stops": sorted(stops or ()),
        "texts": texts or [],
        "chats": chats or [],
        "greedy": [{"prompt": one.prompt, "count": len(one.answer)} for one in greedy or []],
        "scored": [{"ids": one.ids, "start": one.start} for one in scored or []],
    }
    answers, total = Answers(), len(greedy or []) + sum(len(one.logprobs) for one in scored or [])
    with report.phase("run by llama.cpp", total=total, unit="questions") as phase:

        def hear(record: dict[str, Any]) -> None:
            kind, value = record.get("kind"), record.get("value")
            if kind == "ids":
                answers.ids = value  # type: ignore[assignment]
            elif kind == "prompts":
                answers.prompts = value  # type: ignore[assignment]
            elif kind == "greedy":
                answers.greedy.append(value)  # type: ignore[arg-type]
            elif kind == "scored":
                answers.scored.append((value[0], value[1]))  # type: ignore[index]
            phase.tick(int(record.get("tick", 0)))

        outcome = child.run("lamplighter.export.llama_cpp:answer", request, deadline_s=_DEADLINE_S, on_record=hear)
    if not outcome.done:
        why = outcome.error or outcome.last_line or outcome.how()
        raise ExportFailed("llama.cpp cannot use the file", f"{outcome.how()}: {why[:300]}", "lamp export RUN --to hf")
    return answers


def answer(request: dict[str, Any], say: Say) -> None:
    """In the process of its own."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = request["path"]
    params.n_ctx, params.n_parallel, params.n_gpu_layers = request["context"], 1, 0
    params.warmup, params.verbosity = False, -1
    if Path(request["path"]).stat().st_size < _ONE_THREAD_BYTES:
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = _Server(xllamacpp.Server(params))
    say(kind="ids", value=[server.tokens(text, False) for text in request["texts"]])
    if request["chats"]:
        texts = [server.post("/apply-template", {"messages": chat})["prompt"] for chat in request["chats"]]
        say(kind="prompts", value=[server.tokens(text, True) for text in texts])
    for one in request["greedy"]:
        say(kind="greedy", value=server.greedy(one["prompt"], one["count"], set(request["stops"])), tick=1)
    for one in request["scored"]:
        logprobs, firsts = [], []
        for place in range(one["start"], len(one["ids"])):
            logprob, first = server.score(one["ids"][:place], one["ids"][place])
            logprobs.append(logprob)
            firsts.append(first)
            say(tick=1)
        say(kind="scored", value=[logprobs, firsts])


class _Server:
    """llama.cpp's own server, inside the process, on a port of this machine alone."""

    def __init__(self, server: Any) -> None:
        self.server, self.address = server, server.listening_address
        self.harmless = self.tokens("a", False)[-1]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self.address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=_SILENT_S) as answered:
                return json.loads(answered.read())
        except urllib.error.HTTPError as error:
            raise ValueError(f"{path}: {error.read().decode('utf-8', 'replace')[:300]}") from error

    def tokens(self, text: str, parse_special: bool) -> list[int]:
        body = {"content": text, "add_special": False, "parse_special": parse_special}
        return list(self.post("/tokenize", body)["tokens"])

    def greedy(self, prompt: list[int], count: int, stops: set[int]) -> list[int]:
        """What it writes by itself, up to and with the token that it stops at."""
        body = {
            "prompt": prompt,
            "n_predict": count,
            "temperature": 0,
            "samplers": ["temperature"],
            "return_tokens": True,
        }
        made = list(self.post("/completion", body)["tokens"])
        end = next((n + 1 for n, token in enumerate(made) if token in stops), len(made))
        return made[:end]

    def score(self, ids: list[int], token: int) -> tuple[float, int]:
        """How likely a token is after others, and which one is the likeliest.

        The token that is really written is the letter a: of one that is half a character the server says no probability. What
        it does say is of the model's own logits, before anything is forced.
        """
        body = {"prompt": ids, "n_predict": 1, "temperature": 0, "samplers": ["temperature"], "cache_prompt": True}
        for count in (_LIKELIEST, 1 << 20):
            said = self.post("/completion", {**body, "n_probs": count, "logit_bias": [[self.harmless, _FORCED]]})
            found = [(one["id"], one["logprob"]) for one in said["completion_probabilities"][0]["top_logprobs"]]
            if token in (known := dict(found)):
                return known[token], found[0][0]
        raise ValueError(f"token {token} has no probability")
