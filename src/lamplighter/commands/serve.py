"""lamp serve: a model behind OpenAI's API, with a page to chat.

In:  a run, a model folder or a hub name; where to listen.
Out: an HTTP server until Ctrl+C. HTTP is answered by this process, which has no torch; the model runs in a child, under watch.
"""

from __future__ import annotations

import json
import os
import shlex
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamplighter import report, web_access
from lamplighter.commands.arguments import named_again, parse, with_own_fields
from lamplighter.errors import DONE, STOPPED_EARLY, InputMissing, UsageError
from lamplighter.rundir import RunDir, human_bytes, step_of

if TYPE_CHECKING:
    from lamplighter.serve.engine import Loaded

_LENGTH = 2048
_GPU_SPARE_BYTES = 256 << 20  # logits and activations of a batch


def _serve_flags(
    model: str,
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str = "",
    max_batch: int = 8,
    max_queue: int = 64,
    context: int | None = None,
    timeout_s: float = 600.0,
    follow: bool = False,
    checkpoint: str = "latest",
    threads: int | None = None,
    model_family: str | None = None,
    model_init_from: str | None = None,
    runs_dir: Path = Path("runs"),
) -> None:
    """How to serve."""


def serve(words: list[str]) -> int:
    """Listen, start the child, answer until Ctrl+C."""
    flags = parse("serve", _serve_flags, with_own_fields(words))
    for name, least in (("max_batch", 1), ("max_queue", 0), ("context", 2), ("timeout_s", 1)):
        if flags[name] is not None and not flags[name] >= least:  # nan is neither
            raise UsageError(f"--{name.replace('_', '-')} must be {least} or more", "", "lamp serve --help")
    try:
        import uvicorn  # noqa: F401

        from lamplighter.serve.app import make_app  # noqa: F401
    except ImportError as error:
        raise InputMissing(
            "lamp serve needs starlette and uvicorn", str(error), "pip install 'lamplighter[web]'"
        ) from error
    from lamplighter.commands.model_folder import base_given, located

    found = located(flags["model"], flags["runs_dir"])
    if flags["follow"] and not (Path(found["model"]) / "checkpoints").is_dir():
        raise UsageError("--follow needs a run", f"{flags['model']} is a model folder", "leave --follow out")
    key = flags.pop("api_key") or os.environ.get("LAMP_API_KEY", "")
    with web_access.listen(flags["host"], flags["port"]) as socket:
        access = _access(flags["host"], socket.getsockname()[1], key)
        flags["model_init_from"] = base_given(flags["model_init_from"])
        request = {**flags, **found, "runs_dir": str(flags["runs_dir"]), "command": shlex.join(["lamp", "serve", flags["model"], *named_again(flags["runs_dir"])])}  # fmt: skip
        return _serve_on(socket, access, request)


def _access(host: str, port: int, key: str) -> web_access.Access:
    """/health is open: whoever looks after the server needs no key for it, and it tells no text."""
    more = {"needed": "the key of --api-key or LAMP_API_KEY: Authorization: Bearer ..."} if key else {}
    return web_access.grant(host, port, key, without_token=frozenset({"/health"}), **more)


def _serve_on(socket: Any, access: web_access.Access, request: dict[str, Any]) -> int:
    import uvicorn

    from lamplighter.commands.session import piped_session
    from lamplighter.serve.app import make_app
    from lamplighter.serve.bridge import Bridge
    from lamplighter.serve.connections import BoundedProtocol

    to_child, (from_child, result_fd) = os.pipe(), os.pipe()
    bridge = Bridge(to_child[1], request["max_batch"] + request["max_queue"])
    app = web_access.guard(make_app(bridge, request["timeout_s"]), access)
    config = uvicorn.Config(app, http=BoundedProtocol, ws="none", log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=2, server_header=False)  # fmt: skip
    server = uvicorn.Server(config)
    threads = [
        threading.Thread(target=bridge.listen, args=(from_child,), name="lamp-bridge", daemon=True),
        threading.Thread(target=bridge.write, name="lamp-outbox", daemon=True),
        threading.Thread(target=server.run, kwargs={"sockets": [socket]}, name="lamp-http", daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        code = piped_session("serve", request, to_child[0], result_fd, _opening_words(access, request))
    finally:
        server.should_exit = True
        threads[-1].join(5)
    return DONE if code == STOPPED_EARLY else code


def _opening_words(access: web_access.Access, request: dict[str, Any]) -> list[str]:
    lines = [f"OpenAI's API is at {access.address.split('?')[0]}v1; a page to chat: {access.address}"]
    if access.token:
        lines.append("its key is the token in that address (Authorization: Bearer ...)")
    return [*lines, *web_access.how_to_open(access)[1:], "Ctrl+C ends it"]


# ---------------------------------------------------------------- in the child


def serve_child(_: RunDir, request: dict[str, Any]) -> int:
    """Load, then write texts until the end."""
    from lamplighter.commands.model_folder import choose_folder, resolved_model

    path = Path(resolved_model(request["model"]))
    folder = choose_folder(path, request["checkpoint"])
    with report.phase("import"):
        import torch

        from lamplighter.serve.engine import Engine, serve_all
    if request["threads"]:
        torch.set_num_threads(request["threads"])

    def send(message: dict[str, Any]) -> None:
        report.result(json.dumps(message) + "\n", raw=True)

    engine = Engine(_first_weights(folder, request), request["max_batch"], request["context"] or _LENGTH, send)
    cache = engine.current.batcher.cache_bytes
    follower: Callable[[], None] | None = None
    if request["follow"]:

        def follower() -> None:
            engine.follow(
                path / "checkpoints",
                lambda one: _load(one, request),
                lambda one: _has_room(one, cache, request["model_init_from"]),
            )

    report.when_asked(lambda: engine.inbox.put(None), None)
    serve_all(engine, follower)
    return DONE


def _first_weights(folder: Path, request: dict[str, Any]) -> Loaded:
    """Loaded, with room for the cache besides. (Here, so that no name keeps them when newer weights take their place.)"""
    from lamplighter.commands.model_folder import refuse_without_memory
    from lamplighter.model.row_cache import cache_bytes
    from lamplighter.model.transformer import Transformer

    refuse_without_memory(folder, base=request["model_init_from"])
    loaded = _load(folder, request)
    length, cache = min(request["context"] or _LENGTH, loaded.built.positions), 0
    if isinstance(loaded.built.model, Transformer):
        cache = cache_bytes(loaded.built.model.shape, request["max_batch"], length)
        refuse_without_memory(folder, cache, is_loaded=True)
    report.note(f"{loaded.model}: {loaded.built.parameters:,} parameters; {request['max_batch']} texts at a time of {length:,} tokens, {human_bytes(cache)} of cache")  # fmt: skip
    return loaded


def _has_room(folder: Path, cache: int, base: str | None) -> bool:
    """Whether weights and a cache of their own fit beside what is served; else the old weights go first."""
    import torch

    from lamplighter.commands.model_folder import bytes_of_weights, refuse_without_memory
    from lamplighter.errors import RefusedByPlan

    try:
        refuse_without_memory(folder, cache, base=base)
    except RefusedByPlan:
        return False
    if not torch.cuda.is_available():
        return True
    return bytes_of_weights(folder, base) + cache + _GPU_SPARE_BYTES < torch.cuda.mem_get_info()[0]


def _load(folder: Path, request: dict[str, Any]) -> Loaded:
    import torch

    from lamplighter.data import tokenizer as tokenizers
    from lamplighter.data.chat import template as templates
    from lamplighter.model.build import load_folder
    from lamplighter.model.generate import lay_out
    from lamplighter.serve.engine import Loaded

    built = load_folder(folder, request["model_family"], request["command"], base=request["model_init_from"])
    tokenizer = tokenizers.load(folder)
    template = templates.of_folder(folder, tokenizer)
    built.model.to(torch.device("cuda" if torch.cuda.is_available() else "cpu")).eval()
    lay_out(built.model)
    step = step_of(folder)
    name = Path(request["place"]).name
    return Loaded(built, tokenizer, template, name, step if step >= 0 else None, folder)
