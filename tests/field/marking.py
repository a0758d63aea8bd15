"""How a field script says when and in which process its fault begins and ends; nothing of it stays on the stack."""

import os
import time


def mark(what, pid=None, path=os.environ.get("LAMP_FIELD_MARK")):
    open(path or os.devnull, "a").write(f"{what} {time.time():.3f} {pid or os.getpid()}\n")
