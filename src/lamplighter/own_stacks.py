"""The stacks of this process as it tells them itself, and what each of its threads waits for: a lock, a thread, a queue, a task.

In:  a request, answered by a thread of this process while it holds the GIL.
Out: one JSON text: every thread with its frames, the object that it waits for, the locks that its frames know, and what
     could interrupt the process from outside (signal handlers, an interval timer).

Like slot.py, this file is also loaded into somebody else's Python, so: standard library only, Python 3.9 on, nothing of the
user's is called (no property, no `__getattr__`, no `__repr__` of theirs), and nothing is kept: frames hold their variables.
The JSON is written by hand, because an import in the answering thread could hold a lock while the script forks.
"""

from __future__ import annotations

import _thread
import os
import sys

TYPE_CHECKING = False  # `typing` costs a millisecond of every start-up
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType
    from typing import Any

    from lamplighter import slot as layout
else:  # in somebody else's Python the agent has loaded it by its path, and there is no package of ours
    layout = sys.modules.get("_lamplighter_slot") or __import__("lamplighter.slot", fromlist=["slot"])

_ESCAPES = {**{code: f"\\u{code:04x}" for code in range(32)}, ord('"'): '\\"', ord("\\"): "\\\\"}
_DEEPEST = 256
_SNAPSHOT_WORDS = {"locals", "vars", "eval", "exec", "dir"}
_MOST_NUMBERS, _MOST_LOCKS, _MOST_TASKS, _LOCK_FRAMES = 12, 16, 32, 6
_LOCK, _RLOCK = type(_thread.allocate_lock()), type(_thread.RLock())
# By module and name, so that nothing is imported for it.
_LOCK_LIKE = {
    "threading": {"Condition", "Semaphore", "BoundedSemaphore", "Event", "Barrier", "_RLock"},
    "multiprocessing.synchronize": {"Lock", "RLock", "Semaphore", "BoundedSemaphore", "Condition", "Event", "Barrier"},
    "queue": {"Queue", "LifoQueue", "PriorityQueue", "SimpleQueue"},
    "_queue": {"SimpleQueue"},
    "multiprocessing.queues": {"Queue", "JoinableQueue", "SimpleQueue"},
}


def answer_as_json(main_ident: int) -> str:
    """`{"threads": [...], "handlers": [...], "timer": bool}`: main thread first, without the one that answers.

    The frames are let go on return.
    """
    threading = sys.modules.get("threading")
    known = dict(getattr(threading, "_active", {}))
    frames = sys._current_frames()
    frames.pop(_thread.get_ident(), None)
    idents = sorted(frames, key=lambda ident: ident != main_ident)
    tids = {ident: _tid(known.get(ident), ident == main_ident) for ident in idents}
    threads = [_thread_as_json(frames[ident], known.get(ident), tids[ident], tids) for ident in idents]
    return f'{{"threads":[{",".join(threads)}],"handlers":{_json(_handlers())},"timer":{_json(_timer_runs())}}}'


def _tid(thread: Any, is_main: bool) -> int:
    return (getattr(thread, "native_id", None) or 0) if thread is not None else os.getpid() if is_main else 0


def _thread_as_json(frame: FrameType, thread: Any, tid: int, tids: Mapping[int, int]) -> str:
    name = str(thread.name) if thread is not None else "MainThread" if tid == os.getpid() else "?"
    on = _quietly(_waits_on, frame, tids)
    return (
        f'{{"name":{_json(name)},"tid":{tid or "null"},"frames":{_frames_as_json(frame, tids)},'
        f'"on":{_json(on)},"daemon":{_json(bool(getattr(thread, "_daemonic", False)))}}}'
    )


def _quietly(function: Any, *args: Any) -> Any:
    """Objects of a library that has changed are not understood, and nobody hears of it: the stacks are still told."""
    try:
        return function(*args)
    except Exception:  # noqa: BLE001
        return None


def _frames_as_json(frame: FrameType, tids: Mapping[int, int]) -> str:
    """Innermost first; the innermost frame of the user's code carries its counters, the first few of them their locks."""
    users = layout.users_frame(frame)
    counted = users is not None and layout.kind_of(users.f_code.co_filename) != layout.HIDDEN
    rows: list[str] = []
    walk: FrameType | None = frame
    with_locks = 0
    while walk is not None and len(rows) < _DEEPEST:
        theirs = layout.kind_of(walk.f_code.co_filename) != layout.HIDDEN
        numbers = _whole_numbers(walk) if counted and walk is users else {}
        locks = (
            (_quietly(_locks_of, walk, tids) or []) if (theirs or walk is frame) and with_locks < _LOCK_FRAMES else []
        )
        with_locks += theirs
        code = walk.f_code
        rows.append(
            f"[{_json(code.co_filename)},{walk.f_lineno},{_json(code.co_name)},{_json(numbers)},{_json(locks)}]"
        )
        walk = walk.f_back
    return "[" + ",".join(rows) + "]"


def _json(value: Any) -> str:
    if value is None or value is True or value is False:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{" + ",".join(f"{_json(str(name))}:{_json(one)}" for name, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_json, value)) + "]"
    if isinstance(value, int):
        return str(int(value))
    return '"' + str(value).translate(_ESCAPES) + '"'


# ---------------------------------------------------------------- variables of a frame


def _variables(frame: FrameType) -> tuple[Mapping[str, Any], bool]:
    """Its local variables, and whether they are a copy that has to be emptied again (up to Python 3.12).

    Such a copy stays with the frame and would keep the user's tensors alive. Frames where the script or a debugger may
    hold that same copy are left alone.
    """
    code = frame.f_code
    in_function = bool(code.co_flags & 1)
    copies = in_function and sys.version_info < (3, 13)
    if copies and (
        frame.f_trace is not None
        or frame.f_lineno == code.co_firstlineno
        or not _SNAPSHOT_WORDS.isdisjoint(code.co_names)
    ):
        return {}, False
    values: Mapping[str, Any] = frame.f_locals
    if not in_function and values is not frame.f_globals:
        return {}, False
    return values, copies


def _whole_numbers(frame: FrameType) -> dict[str, int]:
    """The integers among a frame's variables: enough to see a loop advance, and no data of the user's."""
    values, copied = _variables(frame)
    code = frame.f_code
    found: dict[str, int] = {}
    for name in code.co_varnames + code.co_cellvars if code.co_flags & 1 else code.co_names:
        value: Any = values.get(name)
        if type(value) in (int, bool) and abs(value) < 1 << 63 and len(found) < _MOST_NUMBERS:
            found[name] = value
    if copied:
        values.clear()  # type: ignore[attr-defined]
    return found


def _local(frame: FrameType, name: str) -> Any:
    values, copied = _variables(frame)
    found = values.get(name)
    if copied:
        values.clear()  # type: ignore[attr-defined]
    return found


def _field(owner: Any, name: str) -> Any:
    """An attribute as it is stored in the instance: nothing of the user's runs."""
    try:
        return object.__getattribute__(owner, "__dict__").get(name)
    except Exception:  # noqa: BLE001 (an object without a dictionary)
        return None


# ---------------------------------------------------------------- locks


def _is_lock(value: Any) -> bool:
    kind = type(value)
    module = str(kind.__module__).replace("multiprocess.", "multiprocessing.")
    return kind is _LOCK or kind is _RLOCK or kind.__name__ in _LOCK_LIKE.get(module, ())


def _about_lock(name: str, value: Any, tids: Mapping[int, int]) -> dict[str, Any]:
    """Its name here, its identity, and its owner where the object knows it."""
    inner = value
    for part in ("_lock", "_cond", "_lock"):  # a Condition has a lock, an Event a Condition
        if type(inner) in (_LOCK, _RLOCK):
            break
        inner = _field(inner, part) or inner
    found = {"name": name, "id": id(value), "type": type(value).__name__, "module": type(value).__module__}
    if type(inner) is _LOCK:
        found["locked"] = inner.locked()
    elif (
        type(inner) is _RLOCK
    ):  # its representation is Python's own: <locked _thread.RLock object owner=1 count=1 at 0x1>
        owner = int(repr(inner).partition("owner=")[2].split(" ")[0] or 0)
        found["locked"] = bool(owner)
        found["owner"] = tids.get(owner, -1) if owner else 0
    shared = _field(value, "_semlock")
    if shared is not None:
        found["locked"], found["shared"] = bool(shared._is_zero()), True
        found["mine"] = bool(shared._count())  # by any thread of this process
        found["key"] = str(shared.name or shared.handle)  # the same in every process that has it
    return found


def _locks_of(frame: FrameType, tids: Mapping[int, int]) -> list[dict[str, Any]]:
    """The locks, queues and events that the code of this frame can name: variables, globals that it uses, and their fields."""
    code = frame.f_code
    values, copied = _variables(frame)
    try:
        names = dict.fromkeys(code.co_varnames + code.co_cellvars + code.co_freevars + code.co_names)
        named = [(name, values.get(name, frame.f_globals.get(name))) for name in names]
        found = [(name, value) for name, value in named if _is_lock(value)]
        for name, value in named:
            if value is None or isinstance(value, (int, float, str, bytes, tuple)) or _is_lock(value):
                continue
            fields = [(part, _field(value, part)) for part in code.co_names]
            found += [(f"{name}.{part}", one) for part, one in fields if one is not None and _is_lock(one)]
        return [_about_lock(name, value, tids) for name, value in found[:_MOST_LOCKS]]
    finally:
        if copied:
            values.clear()  # type: ignore[attr-defined]


# ---------------------------------------------------------------- what a thread waits for


def _waits_on(frame: FrameType, tids: Mapping[int, int]) -> dict[str, Any] | None:
    """By the functions of the standard library that it is in; the outermost of them knows most. None where there is none."""
    found: dict[str, Any] | None = _on_database(frame) if "_sqlite3" in sys.modules else None
    walk: FrameType | None = frame
    depth = 0
    while walk is not None and depth < 24:
        file, func = walk.f_code.co_filename, walk.f_code.co_name
        if layout.kind_of(file) == layout.USERS:
            break
        file = file.replace("/multiprocess/", "/multiprocessing/")  # the fork that datasets uses
        for ending, understand in _UNDERSTOOD:
            one = _quietly(understand, func, walk, tids) if file.endswith(ending) else None
            if one is not None and found is not None and found["kind"] == "lock":
                found["of"] = one["kind"]  # the lock inside of a queue or a condition, which is held only for moments
            else:
                found = one or found
        walk = walk.f_back
        depth += 1
    return found


def _on_database(frame: FrameType) -> dict[str, Any] | None:
    """Its innermost line may be a call of SQLite, which is C: told by the variables of that frame."""
    values, copied = _variables(frame)
    code = frame.f_code
    try:
        named = [values.get(name, frame.f_globals.get(name)) for name in code.co_varnames + code.co_names]
        held = [*named, *(_field(one, part) for one in named if one is not None for part in code.co_names)]
        return {"kind": "database"} if any(type(one).__module__ == "sqlite3" for one in held) else None
    finally:
        if copied:
            values.clear()  # type: ignore[attr-defined]


def _in_threading(func: str, frame: FrameType, tids: Mapping[int, int]) -> dict[str, Any] | None:
    me = _local(frame, "self")
    if func in ("join", "_wait_for_tstate_lock"):
        return {"kind": "thread", "name": str(_field(me, "_name")), "tid": _field(me, "_native_id") or 0}
    kind = type(me).__name__
    if func == "wait" and kind in ("Condition", "Event"):
        return {"kind": kind.lower(), "id": id(me)}
    if func == "acquire" and kind in ("Semaphore", "BoundedSemaphore"):
        return {"kind": "semaphore", "id": id(me), "value": _field(me, "_value") or 0}
    if func in ("wait", "_wait", "_enter") and kind == "Barrier":
        between = _field(me, "_array")  # of multiprocessing: the count is in shared memory
        there = _field(me, "_count") if between is None else between[1]
        return {"kind": "barrier", "id": id(me), "parties": _field(me, "_parties"), "there": there}
    if func in ("__enter__", "acquire") and kind in ("Condition", "_RLock"):
        return {**_about_lock("the lock inside", me, tids), "kind": "lock"}
    return {"kind": "threads at exit"} if func == "_shutdown" else None


def _in_queue(func: str, frame: FrameType, tids: Mapping[int, int]) -> dict[str, Any] | None:
    me = _local(frame, "self")
    if func not in ("get", "put", "join"):
        return None
    return {"kind": "queue", "doing": func, "id": id(me), "size": len(_field(me, "queue") or ()),
            "unfinished": _field(me, "unfinished_tasks") or 0}  # fmt: skip


def _in_futures(func: str, frame: FrameType, tids: Mapping[int, int]) -> dict[str, Any] | None:
    if func in ("result", "exception"):
        me = _local(frame, "self")
        return {"kind": "future", "id": id(me), "state": str(_field(me, "_state"))}
    return {"kind": "future", "state": "several"} if func in ("wait", "as_completed", "result_iterator") else None


def _in_executor(func: str, frame: FrameType, tids: Mapping[int, int]) -> dict[str, Any] | None:
    if func == "_worker":  # a thread of a pool; idle where it waits for its queue
        return {"kind": "work of a pool"}
    return {"kind": "pool", "doing": "shutdown"} if func in ("shutdown", "__exit__") else None


def _in_multiprocessing(func: str, frame: FrameType, tids: Mapping[int, int]) -> dict[str, Any] | None:
    file, me = frame.f_code.co_filename, _local(frame, "self")
    if file.endswith("pool.py") and func in ("wait", "get", "next", "map", "apply", "join"):
        handler = _field(_field(me, "_pool"), "_result_handler")
        return {"kind": "pool", "doing": func, "deaf": handler is not None and not handler.is_alive()}
    if file.endswith("queues.py") and func in ("get", "put", "join", "join_thread", "_finalize_join"):
        return {"kind": "process queue", "doing": func, "id": id(me)}
    if file.endswith("process.py") and func == "join":
        popen = _field(me, "_popen")
        return {"kind": "process", "pid": getattr(popen, "pid", 0) or 0, "name": str(_field(me, "_name"))}
    if file.endswith("synchronize.py") and func in ("__enter__", "acquire", "wait", "wait_for"):
        return _about_shared(me, tids)
    if file.endswith("managers.py") and func == "_callmethod":
        asked, kept = _plain(_local(frame, "methodname")), _plain(getattr(_field(me, "_token"), "typeid", ""))
        return {"kind": "manager", "doing": func, "asked": f"{kept}.{asked}" if kept and asked else ""}
    if file.endswith("connection.py") and func in ("recv", "recv_bytes", "poll", "accept", "Client"):
        return {"kind": "connection", "doing": func}
    return None


def _about_shared(me: Any, tids: Mapping[int, int]) -> dict[str, Any]:
    """A lock, event or condition between processes."""
    kind = type(me).__name__.lower()
    about = _about_lock("self", me, tids)
    return {**about, "kind": "lock"} if kind in ("lock", "rlock") else {**about, "kind": f"process {kind}"}


def _in_subprocess(func: str, frame: FrameType, tids: Mapping[int, int]) -> dict[str, Any] | None:
    me = _local(frame, "self")
    if func not in ("wait", "communicate", "__exit__"):
        return None
    args = _field(me, "args")
    words = args if isinstance(args, (list, tuple)) else [args]
    command = " ".join(" ".join(word for word in map(_plain, words[:4]) if word).split())[:120]
    return {"kind": "process", "pid": _field(me, "pid") or 0, "command": command, "doing": func}


def _plain(value: Any) -> str:
    return value if type(value) is str else ""


def _in_import(func: str, frame: FrameType, tids: Mapping[int, int]) -> dict[str, Any] | None:
    if func != "acquire":
        return None
    me = _local(frame, "self")
    owner = _field(me, "owner")
    owner = owner[0] if isinstance(owner, list) and owner else owner
    owner = getattr(owner, "tid", owner)
    return {"kind": "import lock", "name": str(_field(me, "name")), "owner": tids.get(owner, -1) if owner else 0}


def _in_filelock(func: str, frame: FrameType, tids: Mapping[int, int]) -> dict[str, Any] | None:
    """The library polls. Its object keeps the path by thread, where another thread does not see it; the function that polls knows it."""
    path = _plain(_local(frame, "lock_filename")) if func in ("acquire", "_poll_until_acquired") else ""
    return {"kind": "file lock", "path": os.path.join(os.getcwd(), path)} if path else None  # noqa: PTH109, PTH118


def _in_debugger(func: str, frame: FrameType, tids: Mapping[int, int]) -> dict[str, Any] | None:
    return {"kind": "debugger"} if func in ("interaction", "cmdloop", "_cmdloop") else None


def _in_asyncio(func: str, frame: FrameType, tids: Mapping[int, int]) -> dict[str, Any] | None:
    """The event loop sleeps: what its tasks await."""
    if func not in ("run_forever", "run_until_complete"):
        return None
    tasks = sys.modules["asyncio.tasks"].all_tasks(_local(frame, "self"))
    return {"kind": "tasks", "tasks": [_about_task(task) for task in list(tasks)[:_MOST_TASKS]]}


def _about_task(task: Any) -> dict[str, Any]:
    """The innermost line of the user's in its coroutine, and what that line awaits."""
    place: dict[str, Any] = {}
    awaits = ""
    walk, depth = task.get_coro(), 0
    while walk is not None and depth < 64:
        frame = getattr(walk, "cr_frame", None) or getattr(walk, "gi_frame", None)
        if frame is not None:
            file = frame.f_code.co_filename
            if layout.kind_of(file) == layout.USERS:
                place, awaits = {"file": file, "line": frame.f_lineno, "func": frame.f_code.co_name}, ""
            elif not awaits:
                awaits = f"{file.rpartition('/')[2][:-3]}.{frame.f_code.co_name}"
        walk, depth = getattr(walk, "cr_await", None) or getattr(walk, "gi_yieldfrom", None), depth + 1
    waiter = getattr(task, "_fut_waiter", None)
    other = waiter.get_name() if waiter is not None and type(waiter).__name__ == "Task" else ""
    return {"task": task.get_name(), "awaits": awaits or type(waiter).__name__, "other": other, **place}


_UNDERSTOOD = (
    ("/threading.py", _in_threading),
    ("/queue.py", _in_queue),
    ("/concurrent/futures/_base.py", _in_futures),
    ("/concurrent/futures/thread.py", _in_executor),
    ("/concurrent/futures/process.py", _in_executor),
    ("/multiprocessing/pool.py", _in_multiprocessing),
    ("/multiprocessing/queues.py", _in_multiprocessing),
    ("/multiprocessing/process.py", _in_multiprocessing),
    ("/multiprocessing/synchronize.py", _in_multiprocessing),
    ("/multiprocessing/managers.py", _in_multiprocessing),
    ("/multiprocessing/connection.py", _in_multiprocessing),
    ("/subprocess.py", _in_subprocess),
    ("<frozen importlib._bootstrap>", _in_import),
    ("/filelock/_api.py", _in_filelock),
    ("/pdb.py", _in_debugger),
    ("/cmd.py", _in_debugger),
    ("/asyncio/base_events.py", _in_asyncio),
)


# ---------------------------------------------------------------- what may interrupt it


def _handlers() -> list[int]:
    """Signals for which the script has a handler of its own: whoever sends one may end a wait."""
    signals = sys.modules.get("_signal")
    if signals is None:
        return []
    default = (signals.SIG_DFL, signals.SIG_IGN, None, signals.default_int_handler)
    found = {int(number): signals.getsignal(number) for number in signals.valid_signals()}
    return [number for number, one in found.items() if one not in default and not _interrupts_loop(one)]


def _interrupts_loop(handler: Any) -> bool:
    """asyncio.run's own for Ctrl+C: it ends the program, as Python's own does."""
    method = getattr(handler, "func", None) if type(handler).__module__ == "functools" else None
    return getattr(method, "__qualname__", "") == "Runner._on_sigint"


def _timer_runs() -> bool:
    signals = sys.modules.get("_signal")
    return signals is not None and any(
        signals.getitimer(kind)[0] > 0 for kind in (signals.ITIMER_REAL, signals.ITIMER_VIRTUAL, signals.ITIMER_PROF)
    )
