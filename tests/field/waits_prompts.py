"""Questions to a user who is not there: they are waiting, never stuck."""

import pdb
import sys
import time

from marking import mark
from waits import OUTSIDE, hang, main, train

ASKS = "stdin|prompt|standard input|terminal|keyboard|answer"


@hang(ASKS, states=OUTSIDE, stdin="terminal")
def overwrite_question():
    train()
    mark("fault")
    if input("Checkpoint exists, overwrite? [y/N] ") == "y":  # HANG
        train()


@hang(ASKS + "|debugger|pdb", states=OUTSIDE, stdin="pipe")
def debugger():
    """It stands at the statement after set_trace."""
    train(30)
    mark("fault")
    pdb.set_trace()  # HANG-ALSO
    train()  # HANG


@hang(ASKS, states=OUTSIDE, stdin="pipe")
def choice_at_start():
    """Before the first step."""
    sys.stdout.write("wandb: (1) Create account (2) Use existing (3) Don't visualize\nwandb: Enter your choice: ")
    sys.stdout.flush()
    time.sleep(1)
    mark("fault")
    sys.stdin.readline()  # HANG
    train()


if __name__ == "__main__":
    main(globals())
