"""The server of `lamp dash`: one page, a few answers in JSON, and what is new as server-sent events.

In:  folders of runs; requests that came through the guard (web_access.py).
Out: HTML, scripts of our own, JSON; a request to a run's parent through its ask/ folder, by POST alone.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from lamplighter.dash import facts
from lamplighter.dash.comparison import compare
from lamplighter.dash.facts import RunsDir
from lamplighter.dash.panels import panels_of
from lamplighter.dash.series import MOST_POINTS, SeriesCache
from lamplighter.dash.server_answers import plain, points_of, usd_per_hour
from lamplighter.errors import LampError
from lamplighter.rundir import RunDir, is_running
from lamplighter.safe_text import clean_text, mask

PAGE = Path(__file__).parent / "page"
_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)
_LOOK_S = 0.4  # between two looks at a run
_LIST_S = 1.0  # and at all of them, of which there may be hundreds
_ANSWER_S = 20.0  # for the stacks of all processes on a busy machine; the page says that it waits
_MOST_RUNS = 12  # in one picture
_MOST_CURVES = 600  # of one run: some numbers of each of 72 cards or ranks
_MOST_ROWS = 300  # sent at once to who looks on


class Dash:
    """The folders, and the columns of the runs that were looked at last."""

    def __init__(self, dirs: list[RunsDir]) -> None:
        self.dirs = dirs
        self.cache = SeriesCache()
        self.lock = asyncio.Lock()  # reading is done by threads, one at a time

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/", self.index),
                Route("/page/{name}", self.page),
                Route("/api/runs", self.runs),
                Route("/api/run", self.run),
                Route("/api/series", self.series),
                Route("/api/stacks", self.stacks),
                Route("/api/compare", self.compare),
                Route("/api/ask", self.ask, methods=["POST"]),
                Route("/events", self.events),
            ]
        )

    # ---------------------------------------------------------------- the page

    async def index(self, _: Request) -> Response:
        return _asset("index.html")

    async def page(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in {path.name for path in PAGE.iterdir()}:
            return _no("there is no such file")
        return _asset(name)

    # ---------------------------------------------------------------- answers

    async def runs(self, _: Request) -> Response:
        rows = await asyncio.to_thread(facts.rows, self.dirs)
        models = await asyncio.to_thread(facts.evaluated_models, self.dirs)
        return _json({"runs": rows, "dirs": [str(one.path) for one in self.dirs], "models": models})

    def _find(self, key: str) -> tuple[RunsDir, RunDir] | None:
        run = facts.find(self.dirs, key)
        return None if run is None else (self.dirs[int(key.partition("/")[0])], run)

    async def run(self, request: Request) -> Response:
        found = self._find(request.query_params.get("run", ""))
        if found is None:
            return _no("there is no such run")
        async with self.lock:
            return _json(await asyncio.to_thread(self._describe, *found))

    def _describe(self, where: RunsDir, run: RunDir) -> dict[str, Any]:
        series = self.cache.of(run)
        told = facts.describe(where, run, series)
        return {**told, "panels": panels_of(series, told)}

    async def series(self, request: Request) -> Response:
        """?run=0/a&run=0/b&names=train/loss,eval/val_loss&x=step&low=&high=&most="""
        asked = request.query_params
        names = [name for name in asked.get("names", "").split(",") if name][:_MOST_CURVES]
        x, low, high = (
            asked.get("x", "step"),
            _number(asked.get("low"), -math.inf),
            _number(asked.get("high"), math.inf),
        )
        most = int(min(MOST_POINTS, max(16, _number(asked.get("most"), MOST_POINTS))))
        if x not in ("step", "tokens", "time", "usd", "wall"):
            return _no("x is step, tokens, time, usd or wall", 400)
        found: dict[str, Any] = {}
        for key in asked.getlist("run")[:_MOST_RUNS]:
            at = self._find(key)
            if at is not None:
                async with self.lock:
                    found[key] = await asyncio.to_thread(self._points, at[1], names, x, (low, high, most))
        return _json(found)

    def _points(self, run: RunDir, names: list[str], kind: str, window: tuple[float, float, int]) -> dict[str, Any]:
        series = self.cache.of(run)
        return points_of(series, names or sorted([*series.columns, *series.scores]), kind, usd_per_hour(run), window)

    async def stacks(self, request: Request) -> Response:
        found = self._find(request.query_params.get("run", ""))
        text = facts.read_inside(found[1], "stacks", request.query_params.get("name", "")) if found else None
        return PlainTextResponse(text) if text is not None else _no("there is no such file")

    async def compare(self, request: Request) -> Response:
        keys = request.query_params.getlist("run")
        if len(keys) > _MOST_RUNS:
            return _no(f"at most {_MOST_RUNS} runs are compared at once", 400)
        found = [at for key in keys if (at := self._find(key)) is not None]
        if len(found) < 2:
            return _no("name two runs or more", 400)
        async with self.lock:
            return _json(await asyncio.to_thread(compare, [(run, self.cache) for _, run in found]))

    async def ask(self, request: Request) -> Response:
        """why, save or stop, through the run's ask/ folder; only our own page can send this."""
        try:
            body = json.loads(await request.body())
        except ValueError:
            body = {}
        body = body if isinstance(body, dict) else {}
        kind = str(body.get("kind"))
        found = self._find(str(body.get("run"))) if kind in ("why", "save", "stop") else None
        if request.headers.get("content-type", "").split(";")[0] != "application/json" or found is None:
            return _no("why, save or stop of a run, as JSON", 400)
        if not is_running(found[1]):
            return _no("it is not running", 409)
        try:
            from lamplighter.watch.supervisor import ask

            answer = await asyncio.to_thread(ask, found[1], kind, _ANSWER_S)
        except LampError as error:
            return _no(error.what, 500)
        if answer is None:
            return _no("it holds its lock, but nobody answers: its parent process is stopped or very busy", 504)
        return _json(
            {"kind": kind, "step": answer.get("step"), "text": clean_text(mask(str(answer.get("text") or "")))}
        )

    # ---------------------------------------------------------------- what is new

    async def events(self, request: Request) -> Response:
        """How the runs stand (those of ?run=.., else all), and the new rows of those that are named."""
        keys = request.query_params.getlist("run")[:_MOST_RUNS]
        return StreamingResponse(
            self._news(request, keys), media_type="text/event-stream", headers={"cache-control": "no-store"}
        )

    async def _news(self, request: Request, keys: list[str]) -> AsyncIterator[str]:
        seen: dict[str, float] = {}
        last = ""
        yield ": hello\n\n"
        while not await request.is_disconnected():
            told = await asyncio.to_thread(self._overview, keys)
            if told != last:
                last = told
                yield f"event: runs\ndata: {told}\n\n"
            for key in keys:
                at = self._find(key)
                if at is not None:
                    async with self.lock:
                        fresh = await asyncio.to_thread(self._fresh, at[1], key, seen)
                    if fresh:
                        yield f"event: rows\ndata: {fresh}\n\n"
            await asyncio.sleep(_LOOK_S if keys else _LIST_S)

    def _overview(self, keys: list[str]) -> str:
        rows = [facts.row(*at) for key in keys if (at := self._find(key))] if keys else facts.rows(self.dirs)
        return _dumps([{**one, "age_s": round(one["age_s"])} for one in rows])

    def _fresh(self, run: RunDir, key: str, seen: dict[str, float]) -> str:
        series = self.cache.of(run)
        newest = series.steps[-1] if series.steps else 0.0
        before = seen.get(key)
        seen[key] = newest
        if before is None or before == newest:
            return ""
        if newest < before:  # it went back: the page reads anew
            return _dumps({"run": key, "again": True})
        return _dumps({"run": key, "rows": list(series.rows_since(before, _MOST_ROWS)), "t": series.newest_t})


def _number(text: str | None, default: float) -> float:
    try:
        found = float(text) if text else default
    except ValueError:  # an address that somebody typed: shown as without it
        return default
    return default if math.isnan(found) else found


def _dumps(value: Any) -> str:
    return json.dumps(plain(value), separators=(",", ":"), allow_nan=False)


def _json(value: Any) -> Response:
    return Response(_dumps(value), media_type="application/json", headers={"cache-control": "no-store"})


def _no(words: str, status: int = 404) -> Response:
    return JSONResponse({"error": {"message": words}}, status)


def _asset(name: str) -> Response:
    path = PAGE / name
    headers = {"content-security-policy": _POLICY, "cache-control": "no-cache"}
    return Response(path.read_bytes(), media_type=_KINDS.get(path.suffix, "text/plain"), headers=headers)
