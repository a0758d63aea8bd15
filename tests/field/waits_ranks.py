"""Ranks of torch.distributed: one that left, raised, never came or does something else; and one that is only late."""

import datetime
import os
import socket
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as torch_processes
from marking import mark
from waits import EITHER, TORCHRUN, hang, healthy, main, train

LONG = datetime.timedelta(days=2)


def free_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def join(rank, port):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=LONG)


def train_together(steps=30):
    for step in range(steps):
        value = torch.ones(8)
        dist.all_reduce(value)
        time.sleep(0.03)
        if dist.get_rank() == 0:
            print(f"step {step} loss {float(value[0]):.3f}", flush=True)


def leave(rank, port):
    join(rank, port)
    store = dist.distributed_c10d._get_default_store()
    train_together()
    if rank == 1:
        print("rank 1: no more data, leaving", flush=True)
        os._exit(0)
    time.sleep(0.3)
    mark("fault")
    store.wait(["rank1/epoch_done"], LONG)  # HANG rank_left_zero


@hang("store|collective|rank|key", "rank 1|rank1|left|exit|code 0|ended|gone", states=("stuck", "waiting", "dead"))
def rank_left_zero():
    """Rank 1 left with code 0 and never set the key that rank 0 waits for."""
    torch_processes.spawn(leave, args=(free_port(),), nprocs=2)  # HANG-ALSO


def fail(rank, port, orders):
    join(rank, port)
    train_together()
    try:
        if rank == 1:
            raise RuntimeError("nan in the loss")
        mark("fault")
        dist.all_reduce(torch.ones(4))  # HANG rank_raised
    except RuntimeError as error:
        print("rank", rank, "failed:", error, flush=True)
    orders.get()  # HANG-ALSO rank_raised


@hang("all_?reduce|collective", "rank 1", states=EITHER)
def rank_raised():
    """Rank 1 raised, and waits for orders that nobody gives."""
    orders = torch_processes.get_context("spawn").Queue()
    torch_processes.spawn(fail, args=(free_port(), orders), nprocs=2)  # HANG-ALSO


def wait_for_the_other(rank, port):
    join(rank, port)
    train_together()
    mark("fault")
    dist.recv(torch.zeros(16), src=1 - rank)  # HANG recv_recv


@hang(r"\brecv|receive|collective", "rank (0|1)|each other|both", states=EITHER)
def recv_recv():
    """Both ranks receive, none sends."""
    torch_processes.spawn(wait_for_the_other, args=(free_port(),), nprocs=2)  # HANG-ALSO


@hang(
    "rendezvous|init_process_group|rank|store|group|peer",
    "rank 1|missing|1 of 2|peer|other rank|world",
    states=EITHER,
)
def rendezvous_alone():
    """Rank 1 was never started; before the first step."""
    print("joining the group", flush=True)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    mark("fault")
    dist.init_process_group("gloo", rank=0, world_size=2)  # HANG


@hang("broadcast|all_?gather|collective", "rank", states=("stuck", "waiting", "broken"), start=TORCHRUN)
def torchrun_mismatch():
    """Rank 0 in a broadcast, rank 1 in an all_gather."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LONG)
    train_together()
    if dist.get_rank() == 0:
        mark("fault")
        dist.broadcast(torch.ones(4), src=1)  # HANG
    else:
        dist.all_gather([torch.zeros(4), torch.zeros(4)], torch.ones(4))  # HANG-ALSO
    dist.destroy_process_group()


def train_unevenly(rank, port, done):
    join(rank, port)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(25 - rank):
        loss = model(torch.randn(8, 16)).pow(2).mean()
        if rank == 0 and step == 24:
            mark("fault")
        loss.backward()  # HANG ddp_uneven
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.03)
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    if rank == 0:
        open(done, "w").close()
    while not os.path.exists(done):
        time.sleep(0.2)  # HANG-ALSO ddp_uneven


@hang("all_?reduce|collective|backward|gradient|rank", "rank 1", states=("stuck", "waiting", "slow"))
def ddp_uneven():
    """Rank 1 had one batch fewer, and polls for the file of rank 0."""
    done = os.path.join(tempfile.mkdtemp(), "checkpoint.done")
    torch_processes.spawn(train_unevenly, args=(free_port(), done), nprocs=2)  # HANG-ALSO


@hang(
    r"connect|refused|store|rendezvous|listen|127\.0\.0\.1",
    r"127\.0\.0\.1|port|nobody|no (one|server|listener|process)|master|refused|store",
    states=("waiting", "slow", "stuck"),
)
def store_client():
    """Nobody listens at the address of the store; torch tries again and again by itself."""
    print("connecting to the store", flush=True)
    train(10)
    mark("fault")
    dist.TCPStore("127.0.0.1", free_port(), 2, is_master=False, timeout=LONG)  # HANG


# ---------------------------------------------------------------- healthy


def take_slowly(port, pause):
    listening = socket.create_server(("127.0.0.1", 0))
    port.send(listening.getsockname()[1])
    connection, _ = listening.accept()
    while connection.recv(65536):
        time.sleep(pause)


def upload(rank, port, sink, wait):
    join(rank, port)
    train_together()
    if rank == 0:
        connection = socket.create_connection(("127.0.0.1", sink))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        connection.sendall(b"x" * 3_500_000)
        connection.close()
    dist.barrier()
    train_together()
    if rank == 1:
        time.sleep(wait / 2)
    dist.barrier()
    dist.destroy_process_group()


@healthy()
def upload_before_a_barrier(wait):
    """Rank 0 uploads to a slow server while rank 1 waits for it; then rank 1 is late."""
    context = torch_processes.get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=take_slowly, args=(there, wait / 38), daemon=True).start()
    torch_processes.spawn(upload, args=(free_port(), here.recv(), wait), nprocs=2)


@healthy(*TORCHRUN)
def late_rank(wait):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for _ in range(2):
        train_together()
        if dist.get_rank() == 1:
            time.sleep(wait)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(globals())
