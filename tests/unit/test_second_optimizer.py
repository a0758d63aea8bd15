"""A second optimizer needs its own file and a line in config.OPTIMIZERS: this file, and the line that a test adds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from lamplighter.commands.start_up import prepare
from lamplighter.config import (
    OPTIMIZERS,
    OptimizerKind,
    Resolved,
    Run,
    Train,
    drift,
    dump,
    load_dump,
    parse_overrides,
    resolve,
    schema,
)
from lamplighter.doctor.settings import PlanFigures
from lamplighter.errors import BadConfig
from lamplighter.gpus import find
from lamplighter.plan.estimate import checkpoint_bytes, make
from lamplighter.plan.job import job_of, shape_of
from lamplighter.plan.render import tell
from lamplighter.rundir import RunDir
from lamplighter.train import async_save
from lamplighter.train.loop import training


@dataclass
class Momentum:
    """SGD with momentum: one state tensor for each parameter."""

    parameters: dict[str, torch.nn.Parameter]
    beta: float
    velocity: dict[str, torch.Tensor] = field(default_factory=dict)

    def grad_norm(self) -> torch.Tensor:
        return torch.nn.utils.get_total_norm([p.grad for p in self.parameters.values() if p.grad is not None])

    @torch.no_grad()
    def step(self, lr: float, grad_scale: torch.Tensor | None = None, found_inf: torch.Tensor | None = None) -> None:
        for name, parameter in self.parameters.items():
            if parameter.grad is None or (found_inf is not None and found_inf):
                continue
            scaled = parameter.grad if grad_scale is None else parameter.grad / grad_scale
            velocity = self.velocity.setdefault(name, torch.zeros_like(parameter))
            velocity.mul_(self.beta).add_(scaled)
            parameter.sub_(velocity, alpha=lr)

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {f"velocity.{name}": tensor for name, tensor in self.velocity.items()}

    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        self.velocity = {name.removeprefix("velocity."): tensor.clone() for name, tensor in tensors.items()}


def momentum(model: torch.nn.Module, section: Train) -> Momentum:
    return Momentum(dict(model.named_parameters()), section.beta1)


@pytest.fixture(autouse=True)
def in_the_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(OPTIMIZERS, "momentum", OptimizerKind("momentum", f"{__name__}:momentum", 4, 20, "element"))
    schema._validator.cache_clear()
    yield
    schema._validator.cache_clear()


def run_of(steps: int) -> Run:
    words = {
        "train.optimizer": "momentum", "train.steps": steps, "train.lr": 0.1, "train.batch_size": 2, "train.threads": 1,
        "train.warmup_steps": 1, "train.schedule": "constant", "train.dtype": "fp32", "train.compile": "false",
        "data.seq_len": 16, "data.embedded_documents": 200, "tokenizer.kind": "bytes", "data.workers": 1,
        "model.layers": 1, "model.width": 16, "model.heads": 2, "eval.every_steps": 0, "eval.sample_every_steps": 0,
    }  # fmt: skip
    given = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    return resolve(overrides=parse_overrides(given)[1]).run


def train(folder: RunDir, steps: int) -> tuple[Momentum, int]:
    folder.create()
    context, state = prepare(run_of(steps), folder, {})
    began = state.progress.step
    with training(context, state) as records:
        for _ in records:
            pass
    assert isinstance(context.optimizer, Momentum)
    return context.optimizer, began


def test_it_trains_saves_and_resumes_in_the_real_loop(tmp_path: Path) -> None:
    whole, parts = RunDir(tmp_path / "whole"), RunDir(tmp_path / "parts")
    straight, _ = train(whole, 6)
    train(parts, 3)
    resumed, began = train(parts, 6)
    assert began == 3 and straight.state_tensors()
    for name, tensor in straight.state_tensors().items():
        assert torch.equal(tensor, resumed.state_tensors()[name]), name
    stored = (folder.checkpoint(6) / "training" / "optimizer.safetensors" for folder in (whole, parts))
    assert next(stored).read_bytes() == next(stored).read_bytes()


def test_plan_doctor_and_save_read_its_bytes_from_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(3)
    plan = make(job_of(run, shape_of(run), 3, "fp32"), find("a100-80gb"))
    assert plan.memory.optimizer == 4 * plan.params
    assert checkpoint_bytes(plan.job) == PlanFigures({"params": plan.params}, run.train.optimizer_kind).checkpoint_bytes
    assert checkpoint_bytes(plan.job) == 8 * plan.params
    (line,) = (line for line in tell(plan) if line.strip().startswith("memory"))
    assert " + momentum " in line and "Adam" not in line
    asked: list[int] = []

    def choose(section: bool | str, need: int, left: int) -> tuple[bool, str]:
        asked.append(need)
        return True, "beside"

    monkeypatch.setattr(async_save, "choose", choose)
    train(RunDir(tmp_path / "run"), 1)
    assert asked == [8 * plan.params]


def test_it_is_a_setting_that_a_resume_may_not_change(tmp_path: Path) -> None:
    run = run_of(3)
    (tmp_path / "config.yaml").write_text(text := dump(Resolved(run)))
    assert load_dump(tmp_path / "config.yaml").train.optimizer == "momentum"
    assert drift(replace(run, train=replace(run.train, optimizer="adamw")), run) == [
        "train.optimizer: adamw -> momentum"
    ]
    older = [line for line in text.splitlines() if not line.startswith("  optimizer:")]
    (tmp_path / "config.yaml").write_text("\n".join(older))
    assert load_dump(tmp_path / "config.yaml").train.optimizer == "adamw", "a run from before the setting"


def test_a_name_that_is_not_in_the_table_is_refused_with_those_that_are() -> None:
    with pytest.raises(BadConfig) as refused:
        resolve(overrides=parse_overrides(["--train.optimizer", "lion"])[1])
    assert "'adamw', 'muon' or 'momentum'" in "\n".join(refused.value.lines())
