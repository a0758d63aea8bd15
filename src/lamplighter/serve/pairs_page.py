"""Blind pairs on a local page: a prompt, two answers, three buttons.

In:  a comparison that knows its pairs and keeps each choice (commands/human.py).
Out: the choices, kept as they are made; ends when all are, or with Ctrl+C. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Protocol

from lamplighter import web_access

_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Lamplighter: which is better?</title>
<style>:root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:1rem auto;padding:0 1rem}
.two{display:grid;grid-template-columns:1fr 1fr;gap:1rem}.two div{white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid #8884;border-radius:.5rem;padding:.75rem}
button{font:inherit;padding:.4rem 1.2rem;margin:1rem .5rem 0 0}</style>
<h1 id="place">…</h1><p id="prompt"></p><div class="two"><div id="first"></div><div id="second"></div></div>
<p><button data-answer="0">1 is better</button><button data-answer="1">2 is better</button><button data-answer="2">alike</button></p>
<script>"use strict";let number=null;const at=(id)=>document.getElementById(id);
async function next(){const p=await(await fetch("pair")).json();number=p.number;
at("place").textContent=p.number===null?"Done: thank you. You can close this page.":(p.done+1)+" of "+p.all;
for(const k of ["prompt","first","second"])at(k).textContent=p[k]||"";
for(const b of document.querySelectorAll("button"))b.disabled=p.number===null;}
for(const b of document.querySelectorAll("button"))b.addEventListener("click",async()=>{if(number===null)return;
await fetch("choose",{method:"POST",headers:{"content-type":"application/json"},body:JSON.stringify({number,answer:Number(b.dataset.answer)})});next();});
next();</script></html>"""
_RULES = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'"


class Pairs(Protocol):
    """What the page needs of a comparison."""

    pairs: list[Any]
    chosen: dict[int, int]

    def left(self) -> Iterator[Any]: ...
    def choose(self, pair: Any, answer: int) -> None: ...


def make_pairs_app(pairs: Pairs, done: list[bool]) -> Any:
    """The application; `done` gets a value when the last pair was chosen."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route

    async def page(_: Request) -> Response:
        return HTMLResponse(_PAGE, headers={"content-security-policy": _RULES})

    async def pair(_: Request) -> Response:
        found = next(pairs.left(), None)
        counts = {"done": len(pairs.chosen), "all": len(pairs.pairs)}
        if found is None:
            done.append(True)
            return JSONResponse({"number": None, **counts})
        first, second = found.shown()
        return JSONResponse(
            {"number": found.number, "prompt": found.prompt, "first": first, "second": second, **counts}
        )

    async def choose(request: Request) -> Response:
        try:
            body = json.loads(await request.body())
            number, answer = body["number"], body["answer"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return JSONResponse({"error": {"message": "number and answer are needed"}}, 400)
        found = next((one for one in pairs.left() if one.number == number), None)
        if found is not None and type(answer) is int and 0 <= answer <= 2:
            pairs.choose(found, answer)
        return JSONResponse({"done": len(pairs.chosen)})

    return Starlette(routes=[Route("/", page), Route("/pair", pair), Route("/choose", choose, methods=["POST"])])


def choose_by_page(pairs: Pairs, say: Any, port: int = 0) -> None:
    """Serve the page until all is chosen or Ctrl+C."""
    import threading
    import time

    import uvicorn

    done: list[bool] = []
    with web_access.listen("127.0.0.1", port) as socket:
        access = web_access.grant("127.0.0.1", socket.getsockname()[1])
        app = web_access.guard(make_pairs_app(pairs, done), access)
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
        thread.start()
        for line in web_access.how_to_open(access):
            say(f"{line}\n")
        try:
            while not done:
                time.sleep(0.1)
            time.sleep(0.5)  # the page gets its last answer
        finally:
            server.should_exit = True
            thread.join(3)
