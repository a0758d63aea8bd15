"""Runs for the tests of trackers and pages: a folder as a run leaves it that was killed, rolled back and resumed; and read-backs."""

from __future__ import annotations

import csv
import json
import math
import random
import sqlite3
import struct
from pathlib import Path
from typing import Any

from lamplighter.rundir import RunDir, read_lines

Points = dict[tuple[str, int], float]  # name and step -> value


def record(step: int, attempt: int, seed: int = 0) -> dict[str, Any]:
    """A training step: its results depend on the step (and the seed), its times on nothing."""
    loss = 5.0 / (1 + step / 50) + 0.1 * random.Random(f"{seed}-{step}").random()
    return {
        "step": step, "attempt": attempt, "t": 1.7e9 + step + attempt / 100, "train/loss": loss, "train/lr": 3e-4 * step / 400,
        "train/grad_norm": loss / 3, "train/iter": step, "train/dt_ms": 20 + random.random(),
        "train/tok_per_sec": 9000 + 100 * random.random(), "train/mfu": 0.3 + 0.01 * random.random(), "train/tokens": 2048 * step,
        "train/epoch": step / 100, "train/pad_frac": 0.0, "train/data_wait_ms": random.random(),
    }  # fmt: skip


def validation(step: int, attempt: int, seed: int = 0) -> dict[str, Any]:
    loss = 5.2 / (1 + step / 50) + 0.01 * seed
    return {"step": step, "attempt": attempt, "t": 1.7e9 + step, "eval/val_loss": loss, "eval/val_ppl": math.exp(loss),
            "eval/val_bpb": loss / 3, "eval/iter": step}  # fmt: skip


def write_killed_run(path: Path, steps: int = 400, kills: int = 20) -> RunDir:
    """Killed and redone so often; rolled back once; resumed from an earlier checkpoint once; evaluated late once."""
    run = RunDir(path)
    run.create()
    lines: list[dict[str, Any]] = []
    attempt, step, seeds = 1, 0, [(0, 0)]  # from which step on the results are others
    dies_at = {steps * (n + 1) // (kills + 2) for n in range(kills)}
    for event in ({"type": "start", "t": 1.7e9, "attempt": 1}, {"type": "sample", "t": 1.7e9 + 9, "step": 9, "text": "a <b>sample</b>"},
                  {"type": "checkpoint", "t": 1.7e9 + 10, "step": 10, "path": "checkpoints/checkpoint-10", "bytes": 9, "seconds": 0.1},
                  {"type": "verdict", "t": 1.7e9 + 11, "state": "stuck", "cause": "deadlock", "why": "a waits for b", "next": "look at b"}):  # fmt: skip
        with open(run.events, "a") as file:
            file.write(json.dumps(event) + "\n")
    while step < steps:
        step += 1
        seed = next(seed for since, seed in reversed(seeds) if since <= step)
        lines.append(record(step, attempt, seed))
        if step % 50 == 0:
            lines.append(validation(step, attempt, seed))
        if step == steps // 2 and len(seeds) == 1:  # not finite: back to the last save, and past the bad batches
            lines[-1] |= {name: None for name in lines[-1] if name in ("train/loss", "train/grad_norm")}
            seeds.append((step - 5, 1))
            step = max(0, step - 15)
        elif step == steps * 3 // 4 and len(seeds) == 2:  # --resume checkpoint-N, on another device
            seeds.append((step - 39, 2))
            attempt, step = attempt + 1, max(0, step - 40)
        elif step in dies_at:
            dies_at.discard(step)
            attempt, step = attempt + 1, max(0, step - 7)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    run.metrics.write_text(
        text[: len(text) // 3] + text[len(text) // 3 :] + '{"step": 9999, "train/l'
    )  # torn at the end
    run.status.write_text(json.dumps({"state": "finished", "step": steps, "steps": steps, "format": 1, "numerics": 2}))
    write_evaluation(run, steps // 4)
    return run


def write_evaluation(run: RunDir, step: int) -> None:
    folder = run.path / "evaluations"
    folder.mkdir(exist_ok=True)
    scores = [{"name": "acc_norm", "value": 0.31, "stderr": 0.01, "n": 500, "chance": 0.25, "higher_is_better": True}]
    (folder / f"hellaswag-{step}.json").write_text(
        json.dumps(
            {
                "format": 1,
                "task": "hellaswag",
                "checkpoint": f"checkpoint-{step}",
                "step": step,
                "t": 1.8e9,
                "scores": scores,
            }
        )
    )


def expected(run: RunDir, late: bool = True) -> Points:
    """The last value of each step and name; times of redone steps are those of the first time that they were done so."""
    found: Points = {}
    for line in read_lines(run.metrics):
        for name, value in line.items():
            if "/" in name:
                found[name, line["step"]] = math.nan if value is None else float(value)
    if late and (run.path / "evaluations").is_dir():
        for path in (run.path / "evaluations").glob("*.json"):
            told = json.loads(path.read_text())
            for one in told["scores"]:
                found[f"eval/{told['task']}/{one['name']}", told["step"]] = one["value"]
    return found


TIMES = ("train/dt_ms", "train/tok_per_sec", "train/mfu", "train/data_wait_ms")


def assert_same(found: Points, run: RunDir, digits: int = 12) -> None:
    """Equal to metrics.jsonl; of a step that was done again with the same result, the times are those of one of the times."""
    wanted = expected(run)
    missing = {key for key in wanted if key not in found}
    assert not missing, sorted(missing)[:5]
    for key, value in wanted.items():
        if key[0] not in TIMES and not key[0].startswith("sys/"):
            assert (math.isnan(value) and math.isnan(found[key])) or math.isclose(
                found[key], value, rel_tol=10.0**-digits
            ), (key, value, found[key])


# ---------------------------------------------------------------- read back by the trackers' own readers


def merge(runs: list[Points]) -> Points:
    """Of linked runs, the newest that has a step counts."""
    return {key: value for run in runs for key, value in run.items()}


def read_csv(folder: Path) -> Points:
    found: Points = {}
    with open(folder / "metrics.csv", newline="") as file:
        for row in csv.DictReader(file):
            key = (row["name"], int(row["step"]))
            assert key not in found, f"{key} twice"
            found[key] = float(row["value"])
    return found


def read_tensorboard(folder: Path) -> tuple[Points, list[str]]:
    """Points and the tags of its texts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loaded = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    loaded.Reload()
    found: Points = {}
    for tag in loaded.Tags()["scalars"]:
        for one in loaded.Scalars(tag):
            assert (tag, one.step) not in found, f"{tag} {one.step} twice"
            found[tag, one.step] = one.value
    return found, list(loaded.Tags()["tensors"])


def read_trackio(database: Path, name: str) -> tuple[Points, list[str]]:
    """Points and the titles of its alerts."""
    found: Points = {}
    with sqlite3.connect(database) as rows:
        for step, metrics in rows.execute("SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY id", (name,)):
            for key, value in json.loads(metrics).items():
                if "/" in key:
                    assert (key, step) not in found, f"{key} {step} twice"
                    found[key, step] = math.nan if value in ("NaN", None) else float(value)
        alerts = [title for (title,) in rows.execute("SELECT title FROM alerts WHERE run_name = ?", (name,))]
    return found, alerts


def read_wandb(folder: Path) -> tuple[dict[str, Points], dict[str, Any]]:
    """Points by run name, and per run its alerts, group and settings: from W&B's offline files, by W&B's own records."""
    from wandb.proto.wandb_internal_pb2 import Record

    points: dict[str, Points] = {}
    facts: dict[str, Any] = {}
    for path in sorted(folder.glob("**/run-*.wandb")):
        name, alerts = "", []
        for data in _leveldb_records(path.read_bytes()):
            one = Record()
            one.ParseFromString(data)
            kind = one.WhichOneof("record_type")
            if kind == "run":
                name = one.run.display_name
                facts[name] = {"id": one.run.run_id, "group": one.run.run_group, "tags": list(one.run.tags), "project": one.run.project,
                               "config": {item.key: json.loads(item.value_json) for item in one.run.config.update}}  # fmt: skip
                points.setdefault(name, {})
            elif kind == "alert":
                alerts.append(one.alert.title)
            elif kind == "history":
                row = {
                    (item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in one.history.item
                }
                for key, value in row.items():
                    x = "eval/iter" if key.startswith("eval/") else "train/iter"
                    if key.startswith(("train/", "eval/", "sys/")) and x in row:
                        points[name][key, int(row[x])] = float(value)
        facts[name] = {**facts[name], "alerts": [*facts[name].get("alerts", []), *alerts]}
    return points, facts


def read_mlflow(database: Path, name: str, experiment: str = "lamplighter") -> tuple[Points, Any]:
    """Points of a run, and the run itself, by MLflow's own client."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{database}")
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    (run,) = client.search_runs([found.experiment_id], f"attributes.run_name = '{name}'")
    points: Points = {}
    for key in run.data.metrics:
        for one in client.get_metric_history(run.info.run_id, key):
            assert (key, one.step) not in points, f"{key} {one.step} twice"
            points[key, one.step] = one.value
    return points, run


def _leveldb_records(data: bytes) -> list[bytes]:
    """W&B's file is a log of leveldb's form: 32 KB blocks of parts with checksum, length and type, after a head of 7 bytes."""
    found, part, at = [], b"", 7
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        body, at = data[at + 7 : at + 7 + length], at + 7 + length
        part = body if kind in (1, 2) else part + body
        if kind in (1, 4):
            found.append(part)
    return found


def write_cards(run: RunDir, cards: int = 2, looks: int = 60) -> None:
    """system.jsonl as the watch of the cards writes it, every two seconds: the last card gets hot half-way and is slowed down; an Xid then."""
    with open(run.system, "w") as file:
        for look in range(looks):
            for card in range(cards):
                hot = card == cards - 1 and look >= looks // 2
                record = {
                    "t": 1.7e9 + 2 * look, "step": 2 * look, "attempt": 1, "gpu": card, "sys/gpu_util": 0.4 if hot else 0.97,
                    "sys/gpu_mem_gb": 61.5, "sys/gpu_mem_total_gb": 80.0, "sys/gpu_clock_mhz": 1200.0 if hot else 1980.0,
                    "sys/gpu_temp_c": 88.0 if hot else 62.0 + card, "sys/gpu_power_w": 340.0 if hot else 690.0,
                    "sys/gpu_slowed_by": "too hot (driver)" if hot else "idle" if look < 3 else "", "sys/gpu_processes": {"4711": 60.1},
                }  # fmt: skip
                file.write(json.dumps(record) + "\n")
    why = "bad rows of the GPU's memory were replaced by spare ones: Xid 63"
    verdict = {"type": "verdict", "t": 1.7e9 + looks, "state": "waste", "cause": "rows_remapped", "why": why, "next": "nothing now"}  # fmt: skip
    with open(run.events, "a") as file:
        file.write(json.dumps(verdict) + "\n")
    told = json.loads(run.status.read_text())
    run.status.write_text(json.dumps({**told, "gpus": [{"gpu": card, "name": "NVIDIA H100"} for card in range(cards)]}))
