"""Compiles a model before the first step: with a backend that calls a slow compiler, or with the real one from cold."""

import argparse
import os
import subprocess
import tempfile

import torch
import torch.nn as nn
from marking import mark


def slow_compiler(folder, seconds):
    """A backend that has its kernel built by a child named g++, which takes its time."""
    wrapper = os.path.join(folder, "g++")
    with open(wrapper, "w") as file:
        file.write(f"#!/bin/sh\nsleep {seconds}\n")
    os.chmod(wrapper, 0o755)

    def backend(graph, inputs):
        subprocess.run([wrapper, "-O3", "-shared", "kernel.cpp", "-o", "kernel.so"], check=True)  # the long part
        return graph.forward

    return backend


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the slow compiler takes")
    parser.add_argument("--inductor", action="store_true", help="the real compiler, from a cold cache")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a tiny model gains nothing from more, and loses much on a busy machine
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        compiled = torch.compile(model, backend="inductor" if args.inductor else slow_compiler(folder, args.seconds))
        mark("fault")
        for step in range(1, 51):
            x = torch.randn(8, 32)
            loss = nn.functional.mse_loss(compiled(x), x.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == 1:
                mark("over")
    print(f"done: {step} steps, loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
