"""A kernel that waits for the next cell: the person on the other side of the pipe thinks for twenty seconds."""

import argparse
import code
import select
import subprocess

from marking import mark


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the person thinks")
    args = parser.parse_args()
    cells = f"echo 'total = sum(range(1000))'; sleep {args.seconds}; echo 'print(\"done:\", total)'"
    person = subprocess.Popen(["sh", "-c", cells], stdout=subprocess.PIPE)
    kernel = code.InteractiveInterpreter()
    mark("fault")
    while True:
        select.select([person.stdout], [], [])  # the long part
        cell = person.stdout.readline().decode()
        if not cell:
            break
        kernel.runsource(cell)
    mark("over")
    person.wait()


if __name__ == "__main__":
    main()
