"""lamp sweep: the same run with other settings, in turn, under one budget; the better half of each round goes on.

In:  a preset, a run.yaml, settings, and --over NAME=VALUE,VALUE for each field that is tried.
Out: a run for each combination; a table of them, and the settings of the best one as a file.

A round takes all that are still in to the same share of their steps, where they pause (budget.until_step), validated and saved. Their
schedule is that of the whole run, so a paused one goes on bit for bit. Each is `lamp train` in a process of its own: what it
says is said here, and what it has done is read from its folder, so the same command goes on wherever it was ended.
"""

from __future__ import annotations

import itertools
import json
import math
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamplighter import first_words
from lamplighter.commands import write
from lamplighter.commands.arguments import many, named_again, parse, verb_of_ours
from lamplighter.commands.train import run_name
from lamplighter.errors import CRASHED, DONE, STOPPED_EARLY, CannotWrite, RefusedByPlan, UsageError
from lamplighter.rundir import (
    RunDir,
    cannot_write,
    dollars,
    free_bytes,
    human_bytes,
    newest_first,
    number,
    read_json,
    read_lines,
    read_record,
    read_status,
    write_atomic,
    write_json,
)
from lamplighter.train.held import remove_unless_read
from lamplighter.watch.status import averaged, duration

if TYPE_CHECKING:
    from lamplighter.config import Budget, Resolved

MOST_RUNS = 64
_LEAST_LEFT_S = 5.0  # of a budget: less is not worth a start
# What changes nothing of memory, time and room: one plan does for all its values.
_SAME_PLAN = (
    "train.lr",
    "train.min_lr_ratio",
    "train.weight_decay",
    "train.beta1",
    "train.beta2",
    "train.grad_clip",
    "train.seed",
)
_OF_ALL = (69, 73, 130)  # somebody else has the run, no room, Ctrl+C twice: the sweep ends with them
_SPEAK_S = 1.8
_WIDE = 80  # points of a curve in the table


def _sweep_flags(
    run_yaml: Path | None = None,
    /,
    *,
    preset: str | None = None,
    run: str | None = None,
    halvings: int | None = None,
    runs_dir: Path = Path("runs"),
) -> None:
    """What `lamp sweep` takes besides fields and --over."""


@dataclass
class SweepRun:
    """One combination of settings, and the run that tries it."""

    run: RunDir
    settings: dict[str, str]
    resolved: Resolved
    steps: int
    out: str = ""  # why it is no longer in
    losses: dict[int, float] = field(default_factory=dict)  # of validations, by step

    @property
    def words(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.settings.items())

    @property
    def step(self) -> int:
        return int(number(read_status(self.run).get("durable_step")))

    @property
    def spent_s(self) -> float:
        return number(read_status(self.run).get("spent_s"))

    def target(self, behind: int) -> int:
        """Its step at the end of the round after which there are so many more."""
        return max(1, self.steps >> behind)

    def read_losses(self, measure: str) -> None:
        """The last validation of each step."""
        if self.run.metrics.exists():
            for row in read_lines(self.run.metrics, having=measure.encode()):
                value = number(row.get(measure), math.nan)
                if math.isfinite(value):
                    self.losses[int(number(row.get("eval/iter")))] = value


def sweep(words: list[str]) -> int:
    """All of it: what it needs, the rounds, the table."""
    from lamplighter.config import parse_overrides

    words, found = many(words, "over")
    rest, overrides = parse_overrides(words)
    flags = parse("sweep", _sweep_flags, rest)
    name = run_name({**flags, "run": flags["run"] or (None if flags["run_yaml"] or flags["preset"] else "sweep")})
    folder = RunDir(flags["runs_dir"] / name)
    again = shlex.join(["lamp", "sweep", *words, *(word for one in found["over"] for word in ("--over", one))])
    runs = _runs_of(folder, found["over"], overrides, flags)
    _refuse_other(folder, runs)
    rounds = flags["halvings"]
    if rounds is None:
        rounds = math.ceil(math.log2(len(runs)))
    if not 0 <= rounds <= 20:
        raise UsageError(f"--halvings {rounds} will not do", "it is a number from 0 on", "leave it out: they are halved until one is left")  # fmt: skip
    measure = "eval/val_bpb" if any(one.startswith("tokenizer.") for one in runs[0].settings) else "eval/val_loss"
    one = Sweep(folder, runs, rounds, measure, given=[*_given(flags), *_flag_words(overrides)], again=again)
    one.begin()
    return one.go()


def _flag_words(overrides: dict[str, list[str]]) -> list[str]:
    return [word for name, values in overrides.items() for word in (f"--{name}", *values)]


def _given(flags: dict[str, Any]) -> list[str]:
    """What of the command is for each of the runs, too."""
    words = [str(flags["run_yaml"])] if flags["run_yaml"] else []
    words += ["--preset", flags["preset"]] if flags["preset"] else []
    return [*words, *named_again(flags["runs_dir"])]


def _runs_of(folder: RunDir, over: list[str], overrides: dict[str, list[str]], flags: dict[str, Any]) -> list[SweepRun]:  # fmt: skip
    """Every combination, each checked now and not after hours."""
    from lamplighter.config import resolve

    fields = [_field(one) for one in over]
    tried = {name for name, _ in fields}
    if "train.lr" in tried and "train.optimizer" not in {
        *tried,
        *overrides,
    }:  # rates of the optimizer that it has without them
        optimizer = resolve(flags["preset"], flags["run_yaml"], overrides).run.train.optimizer
        overrides["train.optimizer"] = [optimizer]
    if not fields:
        raise UsageError("lamp sweep tries nothing", "--over is not given", "--over train.lr=0.01,0.02,0.04")
    twice = [name for name, _ in fields if sum(name == other for other, _ in fields) > 1 or name in overrides]
    if twice:
        raise UsageError(f"{twice[0]} is given twice", "a field is tried or set, once", f"leave one --over {twice[0]}=... or --{twice[0]}")  # fmt: skip
    count = math.prod(len(values) for _, values in fields)
    if not 2 <= count <= MOST_RUNS:
        raise UsageError(f"{count} combinations", f"a sweep tries 2 to {MOST_RUNS}", "more values for --over, or fewer")
    found = []
    for index, values in enumerate(itertools.product(*(values for _, values in fields)), 1):
        settings = {name: value for (name, _), value in zip(fields, values, strict=True)}
        words = {**overrides, **{name: [value] for name, value in settings.items()}}
        resolved = resolve(flags["preset"], flags["run_yaml"], words)
        steps, run = resolved.run.train.steps, RunDir(folder.path.parent / f"{folder.name}-{index}")
        if steps is None or not resolved.run.data.val_fraction:
            why = (
                "rounds are counted in steps" if steps is None else "runs are compared by their loss on held-back text"
            )
            raise UsageError("a sweep needs train.steps and data.val_fraction", why, "--train.steps 1000 --data.val_fraction 0.02")  # fmt: skip
        if resolved.run.budget.until_step is not None:
            raise UsageError("budget.until_step is given", "the rounds of a sweep set it", "leave it out; --halvings says how many rounds there are")  # fmt: skip
        found.append(SweepRun(run, settings, resolved, steps))
    return found


def _field(text: str) -> tuple[str, list[str]]:
    """train.lr=1e-3,2e-3"""
    from lamplighter.config import fields
    from lamplighter.config.names import unknown

    name, equals, values = text.partition("=")
    name = name.replace("-", "_").removeprefix("__")
    if not equals:
        raise UsageError(f"--over {text} will not do", "a name, =, and values with commas between them", "--over train.lr=0.01,0.02")  # fmt: skip
    if name not in fields():
        raise unknown(f"--over {name}", "", UsageError)
    if name.split(".")[0] in ("watch", "launch", "budget", "track", "save"):
        raise UsageError(f"--over {name} will not do", "it changes nothing that is learned", "fields of data, tokenizer, model, lora, train")  # fmt: skip
    found = [value for value in values.split(",") if value]
    if len(set(found)) < len(found):
        raise UsageError(f"--over {text}: a value stands twice", "each is tried once", "leave one out")
    return name, found


def _refuse_other(folder: RunDir, runs: list[SweepRun]) -> None:
    """A folder of that name holds this sweep, or nothing."""
    if folder.events.exists() or folder.checkpoints.is_dir():
        raise UsageError(f"{folder.name} is a run", "a sweep needs a name of its own", f"--run {folder.name}-sweep")
    path = folder.path / "sweep.json"
    before = read_json(path) if path.exists() else None
    taken = [one.run.path for one in runs if one.run.path.exists()]
    if before is None and taken:
        raise UsageError(f"{taken[0]} is there already", "the runs of a sweep are its own", f"--run {folder.name}-sweep, or another --runs-dir")  # fmt: skip
    if before is not None and before != _record(runs):
        raise UsageError(f"{folder.path} holds another sweep", "other values or other steps were tried", f"--run {folder.name}-2, or the command of before")  # fmt: skip


def _record(runs: list[SweepRun]) -> list[dict[str, Any]]:
    return [{"run": one.run.name, "settings": one.settings, "steps": one.steps} for one in runs]


@dataclass
class Sweep:
    """The rounds of it, one run after another."""

    folder: RunDir
    runs: list[SweepRun]
    rounds: int
    measure: str
    given: list[str]
    again: str
    _process: subprocess.Popen[bytes] | None = None
    _asked_to_stop: bool = False

    @property
    def budget(self) -> Budget:
        return self.runs[0].resolved.run.budget

    @property
    def left_s(self) -> float:
        return self.budget.left_s(sum(one.spent_s for one in self.runs))

    @property
    def still_in(self) -> list[SweepRun]:
        return [one for one in self.runs if not one.out]

    def say(self, text: str) -> None:
        write(1, f"{time.strftime('%H:%M:%S')}  sweep: {text}\n")

    # ---------------------------------------------------------------- before the first run

    def begin(self) -> None:
        """On paper: time, money and room of all; what the plan refuses is out. Then the folder."""
        hours = room = 0.0
        plans: dict[tuple[str, ...], dict[str, Any]] = {}
        for at, one in enumerate(self.runs, 1):
            key = tuple(value for name, value in one.settings.items() if name not in _SAME_PLAN)
            if key not in plans:
                self.say(f"plan {at} of {len(self.runs)}: {one.words}")
                plans[key] = self._plan(one)
            planned = plans[key]
            if not planned["go"]:
                one.out = f"refused by the plan: {' '.join(planned['reasons'])}"
                self.say(f"{one.run.name} ({one.words}) is out: {one.out}")
                continue
            hours += planned["hours"]
            kept = sum(path.stat().st_size for path in one.run.checkpoints.rglob("*") if path.is_file())
            room += max(0.0, planned["disk_gib"] * 2**30 - kept)
        if not self.still_in:
            raise RefusedByPlan(
                "the plan refuses every combination", self.runs[0].out, "lamp plan shows the arithmetic"
            )
        path = self.folder.path
        try:
            path.mkdir(parents=True, exist_ok=True)
            if free_bytes(path) < room:
                why = f"{human_bytes(free_bytes(path))} are free; {len(self.runs)} runs with a checkpoint and the best one need up to {human_bytes(room)}"
                raise CannotWrite("there is no room for this sweep", why, "make room, try fewer values, or --runs-dir elsewhere")  # fmt: skip
            write_json(path / "sweep.json", _record(self.runs))
        except OSError as error:
            raise cannot_write(path, error) from error
        count = len(self.still_in)
        share = hours * 3600 / count * sum(self._shares(count))
        limit = f"; {duration(max(0.0, self.left_s))} of the budget are left" if math.isfinite(self.left_s) else ""
        of_all = f" instead of {duration(hours * 3600)} for all to the end" if self.rounds else ""
        self.say(f"{count} runs, {self.rounds} halvings: about {duration(share)} of steps{of_all}, besides each start; up to {human_bytes(room)}{limit}")  # fmt: skip
        train = self.runs[0].resolved.run.train
        if "train.lr" in self.runs[0].settings:
            self.say(f"the rates are those of {train.optimizer} with the schedule {train.schedule}")

    def _shares(self, count: int) -> Iterator[float]:
        """Of a whole run, what each round takes for all that are in."""
        done = 0.0
        for behind in range(self.rounds, -1, -1):
            yield count * (2.0**-behind - done)
            count, done = math.ceil(count / 2), 2.0**-behind

    def _plan(self, one: SweepRun) -> dict[str, Any]:
        """What lamp plan says of it."""
        words = verb_of_ours(["plan", *self._settings(one), "--save.keep", "1", "--json"])
        told = subprocess.run(words, capture_output=True, text=True, check=False)
        try:
            found: dict[str, Any] = json.loads(told.stdout)
            return {name: found[name] for name in ("go", "reasons", "hours", "disk_gib")}
        except (json.JSONDecodeError, KeyError):
            return {"go": False, "reasons": [_error_of(told.stderr)], "hours": 0.0, "disk_gib": 0.0}

    def _settings(self, one: SweepRun) -> list[str]:
        return [*self.given, *(word for name, value in one.settings.items() for word in (f"--{name}", value))]

    # ---------------------------------------------------------------- the rounds

    def go(self) -> int:
        """Round after round; the code of the whole."""
        first_words.end()  # from here on the runs speak
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._ask_to_stop)
        for behind in range(self.rounds, -1, -1):
            self.say(
                f"round {self.rounds - behind + 1} of {self.rounds + 1}: {len(self.still_in)} runs to 1/{1 << behind} of their steps"
            )
            for one in self.still_in:
                code = self._train(one, behind)
                if code is not None:
                    return self._end(code)
            self._judge(behind)
            if not self.still_in:
                return self._end(CRASHED)
        return self._end(DONE)

    def _ask_to_stop(self, signum: int, _frame: object) -> None:
        """Ctrl+C reaches the run by itself; TERM is handed on."""
        self._asked_to_stop = True
        if self._process is not None and signum == signal.SIGTERM:
            self._process.send_signal(signum)

    def _train(self, one: SweepRun, behind: int) -> int | None:
        """To the end of this round; a code where the whole sweep ends here."""
        target = one.target(behind)
        one.read_losses(self.measure)
        if one.step >= target and target in one.losses:
            return None
        if self._asked_to_stop or self.left_s < _LEAST_LEFT_S:
            return STOPPED_EARLY
        words = ["train", *self._settings(one), "--run", one.run.name, "--save.keep", "1", "--budget.until_step", str(target)]  # fmt: skip
        if math.isfinite(self.left_s):
            words += ["--budget.usd", "none", "--budget.hours", str((one.spent_s + self.left_s) / 3600)]
        words += self._as_the_first(one)
        self.say(f"{one.run.name}: {one.words}, to step {target} of {one.steps}")
        with tempfile.TemporaryFile() as heard:
            self._process = subprocess.Popen(verb_of_ours(words), stdout=heard, stderr=heard)
            code = self._wait(self._process, one)
            self._process = None
            heard.seek(0)
            said = heard.read().decode(errors="replace")
        one.read_losses(self.measure)
        if code in (DONE, STOPPED_EARLY) and one.step >= target:
            return STOPPED_EARLY if self._asked_to_stop else None
        if code == STOPPED_EARLY or code in _OF_ALL or self._asked_to_stop:
            if code in _OF_ALL:
                write(2, said)
            return code
        why = "early, by its eval.patience" if code == DONE else f"with {code}: {_error_of(said)}"
        one.out = f"ended at step {one.step} {why}"
        self.say(f"{one.run.name} ({one.words}) is out: {one.out}")
        return None

    def _wait(self, process: subprocess.Popen[bytes], one: SweepRun) -> int:
        """Until it ends, with a line now and then; all that it says is in its own console.log."""
        while True:
            try:
                return process.wait(_SPEAK_S)
            except subprocess.TimeoutExpired:
                now = read_status(one.run)
                loss, rate = now.get("mean_loss"), number(now.get("tokens_per_s"))
                told = [f"step {int(number(now.get('step')))}/{one.steps}", str(now.get("phase") or "starting")]
                told += [f"average loss {number(loss):.3f}"] if loss is not None else []
                told += [f"{rate:,.0f} tokens/s"] if rate else []
                self.say(f"{one.run.name}  {' · '.join(told)}")

    def _as_the_first(self, one: SweepRun) -> list[str]:
        """Precision and threads that the first run has found to be fastest, where nobody has given them: else the clock would decide
        who is compared with whom."""
        if one.run.config.exists():  # it keeps what it was begun with
            from lamplighter.config import load_dump

            begun = load_dump(one.run.config).train
            found: dict[str, Any] = {"dtype": begun.dtype, "threads": begun.threads}
        else:
            found = next((facts for other in self.runs if (facts := _machine_of(other.run))), {})
        free = {"dtype": one.resolved.run.train.dtype == "auto", "threads": one.resolved.run.train.threads is None}
        known = {name: found.get(name) for name, is_free in free.items() if is_free}
        return [word for name, value in known.items() if value not in (None, "auto") for word in (f"--train.{name}", str(value))]  # fmt: skip

    def _judge(self, behind: int) -> None:
        """After a round: the better half stays in, the others keep their last checkpoint."""
        scored = []
        for one in self.still_in:
            if (target := one.target(behind)) in one.losses:
                scored.append((one.losses[target], one))
            else:
                one.out = f"no validation at step {target}"
        scored.sort(key=lambda pair: pair[0])
        keep = math.ceil(len(scored) / 2) if behind else len(scored)
        for place, (loss, one) in enumerate(scored, 1):
            self.say(
                f"  {place}. {one.run.name}  {one.words}  {loss:.4f} at step {one.target(behind)}{'' if place <= keep else ', out'}"
            )
            if place > keep:
                one.out = f"place {place} of {len(scored)} after step {one.target(behind)}"
                _keep_last(one.run)
        self._write_table()

    # ---------------------------------------------------------------- what is made

    def _end(self, code: int) -> int:
        best = self._best()
        if code != DONE:  # the last round has written it
            self._write_table()
        made = f"made: {self.folder.path / 'table.md'}"
        if code == DONE and best is not None:
            from lamplighter.config import shown

            write_atomic(self.folder.path / "best.yaml", shown(best.resolved))
            self.say(f"best: {best.run.name}  {best.words}")
            self.say(f"{made}, {self.folder.path / 'best.yaml'}")
            others = [one.run.name for one in self._ranked()[:4]]
            runs_dir = named_again(self.folder.path.parent)
            self.say(f"next: {shlex.join(['lamp', 'compare', *others, *runs_dir])}")
            self.say(f"  or: {shlex.join(['lamp', 'generate', best.run.name, *runs_dir])}")
            return DONE
        spent = sum(one.spent_s for one in self.runs)
        if code == STOPPED_EARLY and not self._asked_to_stop:
            money = f", {dollars(self.budget.spent_usd(spent))}" if self.budget.usd_per_hour else ""
            self.say(f"the budget is spent: {duration(spent)}{money} over all runs")
        self.say(made)
        self.say(
            f"next: {self.again} goes on{'' if self._asked_to_stop else ', with a larger budget' if code == STOPPED_EARLY else ''}"
        )
        return code

    def _ranked(self) -> list[SweepRun]:
        """Those that came farthest first, and of them the lowest loss."""

        def key(one: SweepRun) -> tuple[int, float, float]:
            share = max(one.losses, default=0) / one.steps
            return (bool(one.out), -share, one.losses[max(one.losses)] if one.losses else math.inf)

        return sorted(self.runs, key=key)

    def _best(self) -> SweepRun | None:
        first = self._ranked()[0]
        return first if first.losses and not first.out else None

    def _write_table(self) -> None:
        """All of them, the best first, with the curve of each one's training loss."""
        from lamplighter.braille import chart

        rows = ["| | run | settings | step | loss | |", "|---|---|---|---|---|---|"]
        pictures = []
        spoke = time.monotonic()
        for place, one in enumerate(self._ranked(), 1):
            if time.monotonic() - spoke > _SPEAK_S:  # long runs have long curves
                self.say(f"table: {place - 1} of {len(self.runs)} curves are read")
                spoke = time.monotonic()
            last = max(one.losses, default=0)
            loss = f"{one.losses[last]:.4f}" if one.losses else "-"
            rows.append(f"| {place} | {one.run.name} | {one.words} | {last} of {one.steps} | {loss} | {one.out} |")
            points = averaged((number(row.get("train/loss"), math.nan) for row in _rows(one.run)), _WIDE)
            if points:
                pictures += [f"{one.run.name}  {one.words}: training loss", *chart(points, 4), ""]
        drawn = ["```", *pictures, "```", ""] if pictures else []
        text = [f"# {self.folder.name}: {self.measure.removeprefix('eval/')} at the last validation", "", *rows, "", *drawn]  # fmt: skip
        write_atomic(self.folder.path / "table.md", "\n".join(text))


def _rows(run: RunDir) -> Iterator[dict[str, Any]]:
    return read_lines(run.metrics, having=b"train/loss") if run.metrics.exists() else iter(())


def _machine_of(run: RunDir) -> dict[str, Any]:
    """What its newest checkpoint says of the machine that made it."""
    for path in newest_first(run.checkpoints):
        found = read_record(path / "training" / "state.json").get("machine")
        if isinstance(found, dict):
            return found
    return {}


def _error_of(said: str) -> str:
    """What went wrong and why, out of all that a command said."""
    found = [line.partition(":")[2].strip() for line in said.splitlines() if line.startswith(("error:", "why:"))]
    return "; ".join(found[:2]) or "it said nothing"


def _keep_last(run: RunDir) -> None:
    """Of a run that has lost, all checkpoints but the newest go; the manifest first, so that none looks valid by half."""
    for path in newest_first(run.checkpoints)[1:]:
        remove_unless_read(path, _remove)  # what lamp serve or eval reads stays


def _remove(path: Path) -> None:
    (path / "manifest.json").unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
