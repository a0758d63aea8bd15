"""lamp dash: the web page over all runs, live.

In:  one or more folders of runs, an address to listen at.
Out: the address, and the line for another machine; then a server until Ctrl+C.
"""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path
from types import FrameType

from lamplighter import first_words
from lamplighter.commands import say_on_leaving, write
from lamplighter.commands.arguments import many, parse
from lamplighter.errors import DONE, InputMissing

PORT = 8470


def _dash_flags(*, port: int = PORT, host: str = "127.0.0.1", token: str = "", name: str | None = None) -> None:
    """Where to listen."""


def dash(words: list[str]) -> int:
    """Serve until somebody ends it."""
    rest, several = many(words, "runs-dir")
    flags = parse("dash", _dash_flags, rest)
    from lamplighter import web_access

    if missing := [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise _needs(f"{' and '.join(missing)}: not installed")
    folders = [Path(one) for one in several["runs-dir"] or ["runs"]]
    sock = web_access.listen(flags["host"], flags["port"], next_free=flags["port"] == PORT)
    port = sock.getsockname()[1]
    names = frozenset([flags["name"]] if flags["name"] else [])
    access = web_access.grant(flags["host"], port, flags["token"], names=names)
    # A browser that comes now waits in the socket's queue, and is answered as soon as the server is loaded.
    lines = [*web_access.how_to_open(access), "Ctrl+C ends the page; runs are not touched by it"]
    lines += [
        f"note: there is no folder {one} yet; its runs are shown as soon as there are any"
        for one in folders
        if not one.is_dir()
    ]
    write(1, "\n".join(lines) + "\n")
    first_words.spoke()
    first_words.doing("loading the server")
    say_on_leaving("before the page was loaded; runs are not touched by it")
    try:
        import uvicorn

        from lamplighter.dash.facts import RunsDir
        from lamplighter.dash.server import Dash
    except ImportError as error:
        raise _needs(str(error)) from error
    from lamplighter.procs import prctl

    dirs = [RunsDir(place, path) for place, path in enumerate(folders)]
    prctl.give_back_large_blocks()
    first_words.end()
    config = uvicorn.Config(
        web_access.guard(Dash(dirs).app(), access), log_level="warning", access_log=False, timeout_graceful_shutdown=1, lifespan="off"
    )  # fmt: skip
    server = uvicorn.Server(config)

    def leave(_: int, __: FrameType | None) -> None:
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    server.run(sockets=[sock])
    write(1, "the page has ended\n")
    return DONE


def _needs(why: str) -> InputMissing:
    return InputMissing("lamp dash needs starlette and uvicorn", why, "pip install 'lamplighter[web]'")
