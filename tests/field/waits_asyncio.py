"""asyncio: tasks that wait for each other or for nobody, a loop blocked by itself; and tasks that wait for timers and children."""

import asyncio
import sys

from marking import mark
from waits import EITHER, Trainer, hang, healthy, main, train, train_arrays


@hang(r"asyncio|coroutine|\btask", "copy|lock|each other|await", states=EITHER)
def asyncio_lock():
    """Two tasks, each holds what the other wants."""

    async def copy(first, second):
        async with first:
            await asyncio.sleep(0.1)
            async with second:  # HANG
                return 1

    async def run():
        source, target = asyncio.Lock(), asyncio.Lock()
        mark("fault")
        await asyncio.gather(copy(source, target), copy(target, source))  # HANG-ALSO

    train()
    asyncio.run(run())  # HANG-ALSO


@hang(r"asyncio|coroutine|\btask|future", r"download|run\b|await|nobody", states=EITHER)
def gather_never():
    """One of four tasks waits for a future that nobody resolves."""

    async def download(number, done):
        if number == 2:
            await done  # HANG
        await asyncio.sleep(0.05)

    async def run():
        done = asyncio.get_running_loop().create_future()
        mark("fault")
        await asyncio.gather(*(download(number, done) for number in range(4)))  # HANG-ALSO

    train_arrays()
    asyncio.run(run())  # HANG-ALSO


@hang(r"asyncio|coroutine|\btask|queue", "pipeline|consumer|join|await|task_done|queue", states=EITHER)
def asyncio_queue_join():
    """The consumer raised; what it took is never done."""

    async def consume(records):
        while True:
            if await records.get() == 3:
                raise RuntimeError("bad record")
            records.task_done()

    async def pipeline():
        records = asyncio.Queue()
        consumer = asyncio.create_task(consume(records), name="consumer")
        for number in range(6):
            records.put_nowait(number)
        mark("fault")
        await records.join()  # HANG
        consumer.cancel()

    train()
    asyncio.run(pipeline())  # HANG-ALSO


@hang("future|result|event loop|asyncio|coroutine", "itself|own|same thread|nobody|no other|only thread|loop|none|main")
def threadsafe_result():
    """The thread of the loop blocks until the loop has done something."""

    async def fetch():
        await asyncio.sleep(0.01)

    async def run():
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0.2)
        mark("fault")
        asyncio.run_coroutine_threadsafe(fetch(), loop).result()  # HANG

    Trainer().fit()
    asyncio.run(run())


@hang("child|pipe|subprocess|process", "{holder}", states=EITHER)
def asyncio_sub():
    """The child blocks on a pipe that the loop has stopped reading."""

    async def convert():
        code = "import sys; sys.stdout.write('x' * 10_000_000)"
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
        mark("holder", child.pid)
        mark("fault")
        await child.wait()  # HANG
        await child.stdout.read()

    train()
    asyncio.run(convert())  # HANG-ALSO


# ---------------------------------------------------------------- healthy


@healthy()
def timer_of_the_loop(wait):
    """Beside a server without clients."""

    async def handle(_reader, writer):
        writer.close()

    async def run():
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        for _ in range(2):
            rung = asyncio.Event()
            asyncio.get_running_loop().call_later(wait, rung.set)
            await rung.wait()
            await asyncio.to_thread(train)
        server.close()
        await server.wait_closed()

    train()
    asyncio.run(run())


@healthy()
def task_that_holds_a_lock_and_awaits_a_child(wait):
    async def convert(lock):
        async with lock:
            child = await asyncio.create_subprocess_exec("sleep", str(wait / 2))
            await child.wait()

    async def run():
        for _ in range(2):
            lock = asyncio.Lock()
            await asyncio.gather(convert(lock), convert(lock))
            await asyncio.to_thread(train)

    train()
    asyncio.run(run())


if __name__ == "__main__":
    main(globals())
