"""Work in other processes: results in the order of the items, a bounded number ahead, deaths named.

In:  a function of a module (it is pickled by name), its items, how many processes.
Out: (item, result), in order or as they are done; the first error of any of them, as it was raised; never a silent end.

Workers are spawned (no lock is inherited), die with this process, and leave Ctrl+C to it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, TypeVar
from weakref import WeakSet, finalize

from lamplighter.errors import ChildLost
from lamplighter.procs import prctl
from lamplighter.procs.child import limit_own_memory

TICK_S = 0.2
_LEAVE_S = 2.0
Item = TypeVar("Item")
Result = TypeVar("Result")


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def each(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    workers: int,
    name: Callable[[Item], str] = str,
    start: Callable[..., None] | None = None,
    start_with: tuple[Any, ...] = (),
    in_order: bool = True,
    tick: Callable[[], None] | None = None,
) -> Iterator[tuple[Item, Result]]:
    """`function(item)` for each item; with one worker in this process. `start(*start_with)` prepares each worker.

    While results are waited for, `tick` is called several times a second, to show how far the workers are.
    """
    if workers <= 1:
        if start:
            start(*start_with)
        for item in items:
            yield item, function(item)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _begin, (os.getpid(), start, start_with))
    running: deque[tuple[Item, Future[Result]]] = deque()
    rest = iter(items)
    try:
        while True:
            try:
                for item in islice(rest, 2 * workers - len(running)):
                    running.append((item, pool.submit(function, item)))
                if not running:
                    pool.shutdown()  # they have nothing left to do: gone in an instant, and their time is counted
                    return
                number = _next_done(running, in_order, tick)
                item, future = running[number]
                result = future.result()
            except BrokenProcessPool as error:
                broken = [one for one, other in running if not other.done() or other.exception() is not None]
                names = ", ".join(map(name, broken or [item]))
                why = "it was killed (out of memory?) or crashed in native code"
                advice = "the same command again goes on after what is finished; fewer at a time: --data.workers 1"
                raise ChildLost(f"a worker process died while it worked on {names}", why, advice) from error
            del running[number]
            yield item, result
    finally:
        _abandon(pool)


class Apart:
    """One process for calls that may never end or want all memory: a breach costs that process, and nothing else.

    It is started by the first call, and again by the first after its end.
    """

    living: WeakSet[Apart] = WeakSet()  # those that may have a process

    def __init__(self, function: Callable[[Any], Any], memory_bytes: int) -> None:
        self.function, self.memory_bytes = function, memory_bytes
        self._pool: ProcessPoolExecutor | None = None
        self._end: finalize[..., Apart] | None = None  # also where nobody closes it: with the last reference

    def call(self, item: Any, deadline_s: float) -> Any:
        """What the function gives or raises; TimeoutError at the deadline, ChildLost where its process dies."""
        if self._pool is None:
            Apart.living.add(self)
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, context, _begin, (os.getpid(), limit_own_memory, (self.memory_bytes,)))
            self._end = finalize(self, _abandon, self._pool)
        try:
            return self._pool.submit(self.function, item).result(deadline_s)
        except TimeoutError:
            self.close()
            raise
        except BrokenProcessPool as error:
            self.close()
            raise ChildLost("a process apart died", "it was killed, or crashed in native code") from error

    def close(self) -> None:
        if self._end is not None:
            self._pool = None
            self._end()

    @classmethod
    def close_all(cls) -> None:
        """Before an os._exit: a pool that is still there then is reported as leaked, by a process that Python has started."""
        for one in list(cls.living):
            one.close()


def _abandon(pool: ProcessPoolExecutor) -> None:
    """End the workers where their results are no longer wanted, and wait for the pool's thread, a little.

    The thread holds the pool's semaphores: if this process left first, Python would report them as leaked. A worker that is
    killed in the middle of a large result can leave the thread waiting for the rest, so there is a limit.
    """
    workers, thread = list((pool._processes or {}).values()), pool._executor_manager_thread
    for worker in workers:
        worker.kill()
    pool.shutdown(wait=False, cancel_futures=True)
    if thread is not None:
        thread.join(_LEAVE_S)  # type: ignore[attr-defined]  # typeshed calls it a wake-up


def _next_done(running: deque[tuple[Item, Future[Result]]], in_order: bool, tick: Callable[[], None] | None) -> int:
    """The number of the result to take next; waits for it."""
    while True:
        wanted = [future for _, future in running][: 1 if in_order else len(running)]
        done, _ = wait(wanted, TICK_S if tick else None, FIRST_COMPLETED)
        if tick:
            tick()
        if done:
            return next(number for number, future in enumerate(wanted) if future in done)


def _begin(parent: int, start: Callable[..., None] | None, start_with: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prctl.belong_to(parent)
    if start:
        start(*start_with)
