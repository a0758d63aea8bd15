"""What is counted in the modules of torch, tqdm and multiprocessing; loaded when the script imports the first of them.

In:  a module that was just executed, from bootstrap.py.
Out: numbers and short texts in this process's slot. Public hooks where there are any, else wrappers around functions
     that have been stable for years; whatever has changed since is not counted, and nobody hears of it.
"""

from __future__ import annotations

import _thread
import functools
import os
import sys
from time import monotonic, monotonic_ns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import CodeType, ModuleType
    from typing import Any

    from lamplighter import slot as layout
    from lamplighter.watch.agent import bootstrap
else:
    bootstrap, layout = sys.modules.get("_lamplighter_bootstrap"), sys.modules.get("_lamplighter_slot")

# ---------------------------------------------------------------- wrapping


def _bracket(owner: Any, name: str, begin: Callable[..., Any], end: Callable[..., Any] | None = None) -> None:
    """Put `begin(args, kwargs)` before and `end(begun, args, worked)` after a function of a module or a class."""
    function = owner.__dict__.get(name)
    if function is None or hasattr(function, "_lamplighter"):
        return
    begin, end = bootstrap.never_raises(begin), bootstrap.never_raises(end) if end is not None else None

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        begun = begin(args, kwargs)
        if end is None:
            return function(*args, **kwargs)
        worked = False
        try:
            result = function(*args, **kwargs)
            worked = True
            return result
        finally:
            end(begun, args, worked)

    wrapped._lamplighter = True  # type: ignore[attr-defined]
    wrapped._torchdynamo_disable = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def _nothing(*_: object) -> None:
    """There is nothing to do before."""


# -- optimizers

_optimizers: set[int] = set()


def _on_step(optimizer: object, args: object, kwargs: object) -> None:
    slot, now = bootstrap.slot, monotonic_ns()
    slot.add("step")
    slot.set("step_ns", now)
    if id(optimizer) not in _optimizers:
        if not slot.get("step_first_ns"):
            slot.set("step_first_ns", now)
        _optimizers.add(id(optimizer))
        slot.set("optimizers", len(_optimizers))


_on_step._torchdynamo_disable = True  # type: ignore[attr-defined]  # else a compiled opt.step() warns on the user's screen


def _watch_optimizers(module: ModuleType) -> None:
    module.register_optimizer_step_post_hook(_on_step)


# -- data loaders, in the process that asks

_last_loader = 0


def _fetch_begins(args: tuple[Any, ...], kwargs: object) -> tuple[int, int, int]:
    global _last_loader
    slot, iterator, now = bootstrap.slot, args[0], monotonic_ns()
    outer = (now, slot.get("in_fetch"), slot.get("fetch_since_ns"))
    if id(iterator) != _last_loader:
        _last_loader = id(iterator)
        slot.set("loader_workers", iterator._num_workers)
        try:
            slot.set("loader_len", len(iterator))
        except Exception:  # a loader without a length
            slot.set("loader_len", -1)
    task = getattr(iterator, "_task_info", {}).get(getattr(iterator, "_rcvd_idx", -1))
    slot.set("wait_worker", task[0] if task else -1)
    slot.set("fetch_since_ns", now)
    slot.set("in_fetch", 1)
    return outer


def _fetch_ends(begun: tuple[int, int, int], args: object, worked: bool) -> None:
    slot, (started, outer, since) = bootstrap.slot, begun
    slot.set("in_fetch", outer)
    slot.set("fetch_since_ns", since if outer else started)
    if worked:
        slot.add("fetches")
    if not outer:
        slot.add("fetch_wait_ns", monotonic_ns() - started)


def _watch_loaders(module: ModuleType) -> None:
    _bracket(module._BaseDataLoaderIter, "__next__", _fetch_begins, _fetch_ends)


# -- data loaders, in the process that reads


def _item_text(index: object, running: int) -> str:
    """40..43, or 40, 7, 12; a batch that is not made of whole numbers goes by its running number."""
    wanted: Any = index if isinstance(index, (list, tuple)) else [index]
    if not wanted or any(type(one) is not int for one in wanted):
        return f"batch {running}"
    first, last = wanted[0], wanted[-1]
    if len(wanted) > 2 and last - first == len(wanted) - 1 and list(wanted) == list(range(first, last + 1)):
        return f"{first}..{last}"
    shown = ", ".join(str(one) for one in wanted[:8])
    return f"{shown}, and {len(wanted) - 8} more" if len(wanted) > 8 else shown


_item_failed = False


def _item_begins(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    slot = bootstrap.slot
    running = slot.get("items")
    if running == 0:
        info = getattr(sys.modules.get("torch.utils.data._utils.worker"), "_worker_info", None)
        slot.set("worker", info.id if info is not None else -1)
    by_index = type(args[0]).__name__ != "_IterableDatasetFetcher"
    index = args[1] if len(args) > 1 else kwargs.get("possibly_batched_index")
    if not _item_failed:  # the item of an error stays, while the worker goes on with the next one
        slot.text("item", _item_text(index if by_index else None, running))
    slot.set("item_since_ns", monotonic_ns())
    slot.set("in_item", 1)


def _item_ends(begun: object, args: object, worked: bool) -> None:
    global _item_failed
    slot = bootstrap.slot
    slot.set("in_item", 0)
    kind, error, trace = sys.exc_info()
    if worked:
        slot.add("items")
    elif kind is not None and error is not None and kind is not StopIteration and not _item_failed:
        _item_failed = True
        bootstrap.note_error(kind, error, trace, f"item {slot.get_text('item')}: ")


def _watch_fetchers(module: ModuleType) -> None:
    for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher"):
        _bracket(getattr(module, name), "fetch", _item_begins, _item_ends)


# -- collectives

_COLLECTIVES = (
    "all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "reduce", "gather",
    "scatter", "all_to_all", "barrier", "monitored_barrier", "send", "recv", "all_gather_object",
    "broadcast_object_list", "gather_object", "scatter_object_list",
)  # fmt: skip
_in_collective: set[int] = set()


def _tensor_text(values: Iterable[Any]) -> str:
    for value in values:
        several = f"{len(value)} x " if isinstance(value, (list, tuple)) and value else ""
        tensor = value[0] if several else value
        if hasattr(tensor, "shape") and hasattr(tensor, "dtype"):
            return f" {several}{list(tensor.shape)} {str(tensor.dtype).replace('torch.', '')}"
    return ""


def _meeting_text(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Where the ranks meet; which one this is and how many there will be is noted on the way."""
    given = {**dict(zip(("backend", "init_method", "timeout", "world_size", "rank"), args)), **kwargs}
    for name, variable in (("rank", "RANK"), ("world_size", "WORLD_SIZE")):
        number = given.get(name, -1)
        number = number if isinstance(number, int) and number >= 0 else bootstrap.number_of(variable, -1)
        if number >= 0:
            bootstrap.slot.set("world" if name == "world_size" else name, number)
    method = given.get("init_method")
    by_environment = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    return f" at {method if isinstance(method, str) and not method.startswith('env') else by_environment}"


def _collective_begins(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Zero where this call was made by another collective: that one counts."""
    ident = _thread.get_ident()
    if ident in _in_collective:
        return 0
    _in_collective.add(ident)
    slot = bootstrap.slot
    about = _meeting_text(args, kwargs) if name == "init_process_group" else _tensor_text((*args, *kwargs.values()))
    slot.text("coll", name + about)
    slot.text("coll_at", layout.place(layout.users_frame(sys._getframe(1))))
    if name != "init_process_group":
        slot.add("coll_seq")
    slot.set("coll_since_ns", monotonic_ns())
    slot.set("in_coll", 1)
    return ident


def _collective_ends(begun: int, args: object, worked: bool) -> None:
    if begun:
        slot = bootstrap.slot
        slot.set("in_coll", 0)
        slot.add("coll_ns", monotonic_ns() - slot.get("coll_since_ns"))
        _in_collective.discard(begun)


def _watch_collectives(module: ModuleType) -> None:
    def joined(begun: int, args: object, worked: bool) -> None:
        _collective_ends(begun, args, worked)
        if worked:  # ranks that were not started by a launcher have no RANK in their environment
            bootstrap.slot.set("rank", module.get_rank())
            bootstrap.slot.set("world", module.get_world_size())

    for name in (*_COLLECTIVES, "init_process_group"):

        def begin(args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str = name) -> int:
            return _collective_begins(name, args, kwargs)

        _bracket(module, name, begin, joined if name == "init_process_group" else _collective_ends)


# -- the compiler


def _on_compile_start(*args: Any) -> None:
    slot = bootstrap.slot
    text = str(getattr(args[0], "compile_id", "")) if args else ""
    slot.text("compile_id", text)
    again = text.rpartition("/")[2].partition("_")[0]
    if again.isdigit() and int(again) > 0:
        slot.add("recompiles")
    slot.add("compiles")
    slot.set("compile_since_ns", monotonic_ns())
    slot.set("compiling", 1)


def _on_compile_end(*args: object) -> None:
    bootstrap.slot.set("compiling", 0)


def _watch_compiler(module: ModuleType) -> None:
    handler = module.callback_handler

    def register(*_: object) -> None:
        handler.register_start_callback(bootstrap.never_raises(_on_compile_start))
        handler.register_end_callback(bootstrap.never_raises(_on_compile_end))

    register()
    _bracket(type(handler), "clear", _nothing, register)  # torch._dynamo.reset() forgets all callbacks


# -- progress bars

_last_bar = (0, -1)


def _note_bar(begun: object, args: tuple[Any, ...], worked: object = True) -> None:
    """The bar that moved last, whichever; drawing it again is no movement."""
    global _last_bar
    bar = args[0]
    if getattr(bar, "disable", True):
        return
    count = int(bar.n)
    if (id(bar), count) == _last_bar:
        return
    slot = bootstrap.slot
    if id(bar) != _last_bar[0]:
        slot.set("bar_total", int(bar.total) if bar.total is not None else -1)
        slot.text("bar", str(getattr(bar, "desc", "") or "").rstrip(": "))
    _last_bar = (id(bar), count)
    slot.set("bar_n", count)
    slot.set("bar_ns", monotonic_ns())


def _watch_bars(module: ModuleType) -> None:
    _bracket(module.tqdm, "update", _nothing, _note_bar)
    _bracket(module.tqdm, "refresh", _nothing, _note_bar)
    _bracket(module.tqdm, "close", lambda args, kwargs: _note_bar(None, args))  # iteration counts by itself until here


# -- what cannot be handed to a new process

_LARGEST_TRIED_BYTES = 1 << 25
_LONGEST_SEARCH_S = 2.0


class _TooLarge(Exception):
    """Enough was written to believe that the rest can be."""


class _Sink:
    def __init__(self) -> None:
        self.size = 0

    def write(self, data: Any) -> int:
        self.size += memoryview(data).nbytes
        if self.size > _LARGEST_TRIED_BYTES:
            raise _TooLarge
        return memoryview(data).nbytes


def _can_pickle(value: object) -> bool:
    try:
        sys.modules["multiprocessing.reduction"].ForkingPickler(_Sink()).dump(value)
    except _TooLarge:  # enough was written to believe the rest
        return True
    except Exception:  # whatever a value's own pickling raises: it cannot be pickled
        return False
    return True


def _parts(value: Any) -> Iterable[tuple[str, Any]]:
    """What a value is made of, each with the words that lead to it. A process: the arguments of its function."""
    if hasattr(value, "_target") and hasattr(value, "_args") and hasattr(value, "_kwargs"):
        code: CodeType | None = getattr(value._target, "__code__", None)
        names = code.co_varnames[: code.co_argcount] if code is not None else ()
        names = (*names, *(f"args[{place}]" for place in range(len(names), len(value._args))))
        return [("target", value._target), *zip(names, value._args), *value._kwargs.items()]
    if isinstance(value, dict):
        return [(f"[{key!r}]" if isinstance(key, (str, int)) else "[...]", item) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"[{place}]", item) for place, item in enumerate(value[:64])]
    if hasattr(value, "__self__"):
        return [(".__self__", value.__self__)]
    return [("." + name, item) for name, item in getattr(value, "__dict__", {}).items()]


def _describe(value: Any) -> str:
    code = getattr(value, "__code__", None)
    if code is not None:
        return f"<function {code.co_name} at {os.path.basename(code.co_filename)}:{code.co_firstlineno}>"
    return f"<{type(value).__module__}.{type(value).__qualname__}>"


def _find_unpicklable(value: object, words: str, depth: int, deadline: float) -> str:
    """The deepest part that cannot be pickled, by its path; empty where none is found."""
    if monotonic() > deadline or _can_pickle(value):
        return ""
    if depth > 0 and not hasattr(value, "__code__"):
        for more, part in _parts(value):
            found = _find_unpicklable(part, words + more, depth - 1, deadline)
            if found:
                return found
    return f"{words}: {_describe(value)}" if words else ""


def _pickling_ends(begun: object, args: tuple[Any, ...], worked: bool) -> None:
    if worked or bootstrap.named_error:
        return
    error = id(sys.exc_info()[1])
    found = _find_unpicklable(args[0], "", 5, monotonic() + _LONGEST_SEARCH_S)
    if found:
        bootstrap.slot.text("error", found)
        bootstrap.named_error = error


def _watch_pickling(module: ModuleType) -> None:
    _bracket(module, "dump", _nothing, _pickling_ends)


COUNTED: dict[str, Callable[[ModuleType], None]] = {
    "torch.optim.optimizer": _watch_optimizers,
    "torch.utils.data.dataloader": _watch_loaders,
    "torch.utils.data._utils.fetch": _watch_fetchers,
    "torch.distributed.distributed_c10d": _watch_collectives,
    "torch._dynamo.callback": _watch_compiler,
    "tqdm.std": _watch_bars,
    "multiprocessing.reduction": _watch_pickling,
}


def _forget() -> None:
    """A child starts from nothing."""
    global _last_loader, _last_bar
    _optimizers.clear()
    _in_collective.clear()
    _last_loader, _last_bar = 0, (0, -1)


if bootstrap is not None:
    bootstrap.forgets.append(_forget)
