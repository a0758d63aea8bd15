"""The optimizer: the very numbers of torch's own, without the compiler at every start."""

from __future__ import annotations

import subprocess
import sys

import torch

from lamplighter.config import Train
from lamplighter.train import optimizers


def small() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))


def learn(model: torch.nn.Module, step: int) -> None:
    torch.manual_seed(step)
    model(torch.randn(5, 8)).square().mean().backward()


def test_every_bit_is_that_of_torchs_optimizer() -> None:
    section = Train(weight_decay=0.1, beta1=0.9, beta2=0.95)
    mine, theirs = small(), small()
    ours = optimizers.make_optimizer(mine, section)
    matrices, vectors = ([p for p in theirs.parameters() if (p.dim() >= 2) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    torchs = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), fused=True)
    for step in range(1, 8):
        learn(mine, step)
        learn(theirs, step)
        ours.step(1e-2 / step)
        for group in torchs.param_groups:
            group["lr"] = 1e-2 / step
        torchs.step()
        ours.zero_grad()
        torchs.zero_grad()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
        for kind in optimizers.KINDS:
            assert torch.equal(ours.state[a][kind], torchs.state[b][kind])


def test_gradients_are_clipped_on_their_way_into_the_weights() -> None:
    mine, theirs = small(), small()
    ours, others = optimizers.make_optimizer(mine, Train()), optimizers.make_optimizer(theirs, Train())
    shrunk = []
    for step in range(1, 5):
        learn(mine, step)
        learn(theirs, step)
        limit = 0.3
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit)
        torch.testing.assert_close(ours.norm(), norm)
        shrunk.append(optimizers.shrink(float(norm), limit))
        ours.step(1e-2, shrunk[-1])
        others.step(1e-2)
        ours.zero_grad()
        others.zero_grad()
    assert max(shrunk) > 1.5
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours.state[a]["exp_avg"], others.state[b]["exp_avg"], rtol=1e-4, atol=1e-8)


def test_what_is_within_the_limit_is_not_shrunk() -> None:
    assert optimizers.shrink(0.9, 1.0) == optimizers.shrink(1.0, 1.0) == optimizers.shrink(50.0, 0.0) == 1.0
    assert optimizers.shrink(5.0, 2.0) == 2.5


def test_state_goes_to_tensors_and_back() -> None:
    one, two = small(), small()
    first, second = optimizers.make_optimizer(one, Train()), optimizers.make_optimizer(two, Train())
    learn(one, 1)
    first.step(1e-2)
    first.zero_grad()
    two.load_state_dict(one.state_dict())
    optimizers.load_state(two, second, {name: t.clone() for name, t in optimizers.state_tensors(one, first).items()})
    for model, optimizer in ((one, first), (two, second)):
        learn(model, 2)
        optimizer.step(1e-2)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_a_parameter_without_a_gradient_is_left_as_it_is() -> None:
    model = small()
    frozen = next(model.parameters())
    frozen.requires_grad_(False)
    before = frozen.clone()
    optimizer = optimizers.make_optimizer(model, Train(weight_decay=1.0))
    learn(model, 1)
    optimizer.step(1e-2)
    assert torch.equal(frozen, before) and frozen not in optimizer.state
    fresh = optimizers.make_optimizer(model, Train())
    optimizers.load_state(model, fresh, optimizers.state_tensors(model, optimizer))
    assert fresh.state.keys() == optimizer.state.keys()


def test_a_step_does_not_load_the_compiler() -> None:
    code = (
        "import sys, torch\n"
        "from lamplighter.config import Train\n"
        "from lamplighter.train import optim\n"
        "m = torch.nn.Linear(2, 2)\n"
        "o = optim.make_optimizer(m, Train())\n"
        "m(torch.ones(1, 2)).sum().backward()\n"
        "o.step(0.1); o.zero_grad()\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
