"""The parent's door: the verb table first, imports after; the first word is on the screen before anything is loaded.

In:  a command line.
Out: an exit code. Config is parsed here; everything that lasts happens in a child, under watch.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lamplighter.commands.help import HELP, VERB_HELP

if TYPE_CHECKING:
    from lamplighter.config import Resolved
    from lamplighter.rundir import RunDir

TO_STDERR = (
    "generate",
    "checkpoints",
    "runs",
    "why",
    "data",
    "tokenizer",
    "doctor",
    "plan",
)  # their result goes to stdout, all other words to stderr


def main() -> int:
    """A stop in the first moments, before there is anything to stop, is an exit code and a word as well."""
    _keep_streams()
    try:
        signal.signal(signal.SIGTERM, _leave_early)
        return _main(sys.argv[1:])
    except KeyboardInterrupt:
        _write(2, "left (Ctrl+C) before anything was started\n")
        os._exit(130)  # Python would end itself by SIGINT if an import was interrupted


def _keep_streams() -> None:
    """With stdout closed, the next file to be opened would become stdout."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _leave_early(*_: object) -> None:
    _write(2, "stopped (SIGTERM) before anything was started\n")
    os._exit(75)


def _main(words: list[str]) -> int:
    verb = words[0] if words else "--help"
    if verb in ("-h", "--help", "help"):
        return _write(1, HELP)
    if verb in ("-V", "--version"):
        from lamplighter import __version__

        return _write(1, f"lamp {__version__}\n")
    if verb not in VERBS:
        return _unknown_verb(verb)
    ours = words[: words.index("--")] if verb == "watch" and "--" in words else words
    if "--help" in ours or "-h" in ours:
        return _verb_help(verb)
    quiet = "--print-config" in words or "--json" in words
    if verb in ("demo", "train", "watch", "generate", "data", "tokenizer", "doctor", "plan") and not quiet:
        _write(
            2 if verb in TO_STDERR or "--" in words else 1,
            f"{time.strftime('%H:%M:%S')}  lamp {verb}: reading the request\n",
        )
    return _guarded(lambda: VERBS[verb](words[1:]))


def _guarded(act: Callable[[], int]) -> int:
    """A user's mistake is three lines and an exit code, never a traceback."""
    from lamplighter.errors import LampError

    try:
        return act()
    except LampError as error:
        _write(2, "\n".join(error.lines()) + "\n")
        return error.code
    except BrokenPipeError:
        return 0


def _write(fd: int, text: str) -> int:
    try:
        os.write(fd, text.encode())
    except OSError:  # nobody reads any more; what was asked for still happens
        return 0
    return 0


def _unknown_verb(verb: str) -> int:
    import difflib

    near = difflib.get_close_matches(verb, VERBS, 1, 0.4)
    why = f"did you mean lamp {near[0]}?" if near else "verbs: " + " ".join(VERBS)
    _write(2, f"error: lamp has no verb {verb}\nwhy:   {why}\nnext:  lamp --help\n")
    return 2


def _verb_help(verb: str) -> int:
    text = VERB_HELP[verb]
    if verb == "train":
        from lamplighter.config import fields, preset_names

        text = text.format(presets=", ".join(preset_names()))
        rows = [f"  --{name:<26} {info.description} (default: {info.default})" for name, info in fields().items()]
        text += "\n".join(rows) + "\n"
    return _write(1, text)


def parse(verb: str, function: Callable[..., Any], words: list[str]) -> dict[str, Any]:
    """Bind the words to the function's parameters; an unknown flag gets its nearest match."""
    import cyclopts

    from lamplighter.config import unknown
    from lamplighter.errors import UsageError

    app = cyclopts.App(name=f"lamp {verb}", help_flags=[], version_flags=[])
    app.default(function)
    try:
        _, bound, *_ = app.parse_args(words, exit_on_error=False, print_error=False)
    except cyclopts.UnknownOptionError as error:
        names = [f"--{name.replace('_', '-')}" for name in function.__annotations__ if name != "return"]
        given = (error.token.keyword or error.token.value) if error.token else ""
        raise unknown(given or "that", "", UsageError, names) from None
    except cyclopts.CycloptsError as error:
        raise UsageError(" ".join(str(error).split()), "", f"lamp {verb} --help") from None
    return dict(bound.arguments)


# ---------------------------------------------------------------- train and demo


def _train_flags(
    run_yaml: Path | None = None,
    /,
    *,
    preset: str | None = None,
    run: str | None = None,
    resume: str = "auto",
    test: bool = False,
    verbose: bool = False,
    force: bool = False,
    print_config: bool = False,
    runs_dir: Path = Path("runs"),
) -> None:
    """What `lamp train` takes besides fields."""


def train(words: list[str]) -> int:
    """Resolve the config, take the run, start the child, stay with it."""
    return _start_training("train", words)


def demo(words: list[str]) -> int:
    """The demo preset under its own name."""
    return _start_training("demo", ["--preset", "demo", *words])


def _start_training(verb: str, words: list[str]) -> int:
    from lamplighter.config import dump, parse_overrides, resolve

    rest, overrides = parse_overrides(words)
    flags = parse(verb, _train_flags, rest)
    resolved = resolve(flags.get("preset"), flags.get("run_yaml"), overrides, flags.get("test", False))
    if flags.get("print_config"):
        return _write(1, dump(resolved))
    return _train(verb, words, resolved, flags)


def _run_name(flags: dict[str, Any]) -> str:
    from lamplighter.errors import UsageError

    yaml: Path | None = flags.get("run_yaml")
    if flags.get("run") == "":
        raise UsageError("--run is empty", "a run needs a name", "--run my-run")
    name = str(flags.get("run") or (yaml.stem if yaml else None) or flags.get("preset") or "train")
    if "/" in name or name.startswith("."):
        raise UsageError(f"{name} cannot be a run's name", "a run is one folder of --runs-dir", "--run my-run")
    return name + ("-test" if flags.get("test") else "")


def _train(verb: str, words: list[str], resolved: Resolved, flags: dict[str, Any]) -> int:
    from lamplighter.config import dump
    from lamplighter.rundir import (
        RunDir,
        cannot_write,
        is_running,
        move_aside,
        open_lines,
        read_record,
        take_lock,
        write_atomic,
    )
    from lamplighter.watch.console import Console
    from lamplighter.watch.restart_policy import RestartPolicy
    from lamplighter.watch.supervisor import ChildSpec, Supervisor

    began = time.time()
    run = RunDir(flags.get("runs_dir", Path("runs")) / _run_name(flags))
    resume = flags.get("resume", "auto")
    moved = None
    if resume == "never" and not is_running(run):
        moved = move_aside(run.path) if run.path.exists() else None
        resume = "auto"
    run.create()
    try:
        lock_fd = take_lock(run)
        console = Console(1, log_fd=open_lines(run.console))
    except OSError as error:
        raise cannot_write(run.path, error) from error
    if moved is not None:
        console.say(f"the old run is kept as {moved}")
    try:
        _refuse_drift(run, resolved, console)
        code = _finished_already(run, resolved, console) if resume == "auto" else None
        if code is not None:
            return code
        write_atomic(run.config, dump(resolved))
        console.say(
            f"run {run.path}: everything about it is in this folder; look from elsewhere with: lamp watch {run.name}"
        )
        request = {"resume": resume, "preset": resolved.preset, "force": flags.get("force", False)}
        again = same_command(verb, words)
        order = ChildSpec(
            "train",
            request,
            again,
            resolved.run.budget,
            RestartPolicy(resolved.run.watch.on_stuck, resolved.run.watch.patience_s),
            resolved.run.watch.notify,
            resolved.run.watch.stop_grace_s,
            began,
            lock_fd,
            flags.get("verbose", False),
        )
        code = Supervisor(run, order, console).supervise()
        if code == 0:
            _say_next(run, flags, console, read_record(run.status).get("step", 0))
        return code
    except OSError as error:
        raise cannot_write(run.path, error) from error
    finally:
        console.close()


def same_command(verb: str, words: list[str]) -> str:
    import shlex

    kept = list(words[2:] if verb == "demo" and words[:2] == ["--preset", "demo"] else words)
    while "--resume" in kept:
        at = kept.index("--resume")
        del kept[at : at + 2]
    return shlex.join(["lamp", verb, *kept])


def _finished_already(run: RunDir, resolved: Resolved, console: Any) -> int | None:
    """A finished run says so and exits 0, unless train.steps or train.epochs was raised; after an early end, the patience."""
    from lamplighter.config import load_dump
    from lamplighter.rundir import read_record

    status = read_record(run.status)
    if status.get("state") != "finished" or not run.config.exists():
        return None
    before = load_dump(run.config)
    old, new = before.train, resolved.run.train
    raised = (new.steps or 0) > status.get("steps", 0) or (new.epochs is not None and new.epochs > (old.epochs or 0))
    raised = raised or (before.data.max_chunks or 0) < (resolved.run.data.max_chunks or 0)
    early, patience = status.get("ended_early"), resolved.run.eval.patience
    if early and (not patience or patience > early.get("since_best", 0)):
        return None  # more patience: it goes on
    if raised and not early:
        return None
    if early:
        console.say(
            f"{run.name} is finished, early, at step {status.get('step')} of {status.get('steps')}: {early.get('why')}"
        )
        console.say("A larger eval.patience (0 = without end) goes on, --resume never begins anew.")
    else:
        console.say(
            f"{run.name} is finished: {status.get('step')} steps. Raise train.steps to go on, or --resume never to begin anew."
        )
    console.say(f"next: lamp generate {run.name}")
    return 0


def _refuse_drift(run: RunDir, resolved: Resolved, console: Any) -> None:
    """A resume may change save, eval, watch and budget; train.steps with a warning; nothing else."""
    from lamplighter.config import LENGTH, drift, load_dump
    from lamplighter.errors import BadConfig, LampError

    if not run.config.exists() or not any(run.checkpoints.glob("checkpoint-*")):
        return
    try:
        old = load_dump(run.config)
    except LampError as error:
        raise BadConfig(
            f"{run.config} is damaged",
            error.what,
            "put it back, or begin anew with --resume never (the old folder is kept)",
        ) from error
    changes = drift(old, resolved.run)
    if changes:
        raise BadConfig(
            f"run {run.name} was started with other settings",
            "; ".join(changes),
            "give the old settings to go on, --run NAME for a new run, or --resume never to begin anew",
        )
    for name in LENGTH:
        field = name.split(".")[1]
        before, now = getattr(old.train, field), getattr(resolved.run.train, field)
        if before != now:
            console.say(f"WARNING  {name}: {before} -> {now}; the schedule changes from here", "bold yellow")


def _say_next(run: RunDir, flags: dict[str, Any], console: Any, step: int) -> None:
    where = "" if flags.get("runs_dir", Path("runs")) == Path("runs") else f" --runs-dir {flags['runs_dir']}"
    console.say(f"made: {run.checkpoints}/checkpoint-{step} (opens with transformers as it is), {run.report}")
    console.say(f"next: lamp generate {run.name}{where}    or: lamp checkpoints {run.name}{where}", "bold")


# ---------------------------------------------------------------- looking at runs


def _run_flags(run: str, /, *, runs_dir: Path = Path("runs")) -> None:
    """A run by name."""


def _find_run(verb: str, words: list[str], need_running: bool = False) -> RunDir:
    from lamplighter.errors import InputMissing
    from lamplighter.rundir import RunDir, is_running, read_record

    flags = parse(verb, _run_flags, words)
    run = find_run(flags["run"], flags.get("runs_dir", Path("runs")))
    if need_running and not is_running(run):
        status = read_record(run.status)
        raise InputMissing(
            f"{run.name} is not running",
            str(status.get("outcome") or f"its last state was {status.get('state', 'unknown')}"),
            f"all it said is in {run.console}",
        )
    return RunDir(run.path)


def find_run(name: str, runs_dir: Path) -> RunDir:
    """A run by name or by path; the nearest name if there is none."""
    import difflib

    from lamplighter.errors import InputMissing
    from lamplighter.rundir import RunDir

    for path in (runs_dir / name, Path(name)):
        if (path / "events.jsonl").exists() or (path / "checkpoints").is_dir():
            return RunDir(path)
    known = [path.parent.name for path in runs_dir.glob("*/events.jsonl")]
    near = difflib.get_close_matches(name, known, 1, 0.4)
    why = f"did you mean {near[0]}?" if near else f"runs in {runs_dir}: {', '.join(sorted(known)) or 'none'}"
    raise InputMissing(f"there is no run {name}", why, "lamp runs lists them; --runs-dir looks elsewhere")


def watch(words: list[str]) -> int:
    """Somebody else's command under our eyes, or the live display of a run."""
    from lamplighter.watch.run_commands import watch_run

    if "--" in words:
        place = words.index("--")
        return _watch_command(words[:place], words[place + 1 :])
    return watch_run(_find_run("watch", words))


def _watch_flags(
    *,
    run: str | None = None,
    runs_dir: Path = Path("runs"),
    on_stuck: Literal["report", "stop", "restart"] = "report",
    patience_s: float = 600.0,
    notify: str | None = None,
) -> None:
    """What `lamp watch -- CMD` takes."""


def _watch_command(words: list[str], command: list[str]) -> int:
    from lamplighter.errors import UsageError
    from lamplighter.watch.attach import Attendant, WatchRequest
    from lamplighter.watch.terminal import leave_as

    flags = parse("watch", _watch_flags, words)
    if not command:
        raise UsageError("nothing to watch", "no command after --", "lamp watch -- python train.py")
    run = _folder_for(command, flags.get("run"), flags.get("runs_dir", Path("runs")))
    wish = WatchRequest(command, flags.get("on_stuck", "report"), flags.get("patience_s", 600.0), flags.get("notify"))
    return leave_as(Attendant(run, wish).attend())


def _folder_for(command: list[str], wanted: str | None, runs_dir: Path) -> RunDir:
    """--run, else the script's name; a second one at the same time gets a number."""
    from lamplighter.errors import AlreadyRunning, BadConfig
    from lamplighter.rundir import RunDir, take_lock

    name = wanted or _script_name(command)
    for number in range(1, 100):
        run = RunDir(runs_dir / (name if number == 1 else f"{name}-{number}"))
        if run.config.exists():
            if wanted:
                raise BadConfig(f"{wanted} is a training run", f"in {run.path}", "choose another name with --run")
            continue
        run.create()
        try:
            take_lock(run)
        except AlreadyRunning:
            if wanted:
                raise
            continue
        return run
    raise AlreadyRunning(f"{name} is watched a hundred times already", f"in {runs_dir}", "choose a name with --run")


def _script_name(command: list[str]) -> str:
    """train for `python train.py`, litgpt for `python -m litgpt`, run for `bash run.sh`."""
    named = next((word for word in command if word.endswith((".py", ".sh"))), None)
    if named is None and "-m" in command[:-1]:
        named = command[command.index("-m") + 1]
    name = Path(named or command[0]).name
    return (
        "".join(c if c.isalnum() or c in "-_" else "-" for c in name.removesuffix(".py").removesuffix(".sh")) or "cmd"
    )


def why(words: list[str]) -> int:
    from lamplighter.watch.run_commands import explain

    if len(words) == 1 and words[0].isascii() and words[0].isdecimal() and not (Path("runs") / words[0]).exists():
        from lamplighter.watch.inspect_pid import inspect_pid

        _write(2, f"{time.strftime('%H:%M:%S')}  looking at process {words[0]} twice, a second apart\n")
        return inspect_pid(int(words[0]))
    return explain(_find_run("why", words, need_running=True))


def stop(words: list[str]) -> int:
    from lamplighter.watch.run_commands import stop_run

    return stop_run(_find_run("stop", words, need_running=True))


def save(words: list[str]) -> int:
    from lamplighter.watch.run_commands import save_run

    return save_run(_find_run("save", words, need_running=True))


def _runs_flags(*, json: bool = False, runs_dir: Path = Path("runs")) -> None:
    """All runs."""


def runs(words: list[str]) -> int:
    from lamplighter.watch.run_commands import list_runs

    flags = parse("runs", _runs_flags, words)
    return list_runs(flags.get("runs_dir", Path("runs")), flags.get("json", False))


# ---------------------------------------------------------------- verbs that end with a result


def _checkpoints_flags(run: str, /, *, json: bool = False, runs_dir: Path = Path("runs")) -> None:
    """The checkpoints of a run."""


def checkpoints(words: list[str]) -> int:
    from lamplighter.watch.run_commands import session

    flags = parse("checkpoints", _checkpoints_flags, words)
    run = find_run(flags["run"], flags.get("runs_dir", Path("runs")))
    return session("checkpoints", {"run": str(run.path.resolve()), "json": flags.get("json", False)})


def _generate_flags(
    model: str,
    /,
    *,
    prompt: str = "",
    num_samples: int = 1,
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 1,
    checkpoint: str = "latest",
    interactive: bool = False,
    raw: bool = False,
    system: str = "",
    threads: int | None = None,
    runs_dir: Path = Path("runs"),
) -> None:
    """How to generate."""


def generate(words: list[str]) -> int:
    """Text from a run's checkpoint or from any model folder."""
    from inspect import signature

    from lamplighter.errors import UsageError
    from lamplighter.watch.run_commands import session

    given = parse("generate", _generate_flags, words)
    try:
        (given.get("prompt", "") + given.get("system", "")).encode()
    except UnicodeEncodeError as error:
        raise UsageError("the prompt is not valid UTF-8", str(error), "give it in UTF-8") from error
    defaults = {name: p.default for name, p in signature(_generate_flags).parameters.items()}
    flags = {**defaults, **given}
    runs_dir = flags.pop("runs_dir")
    folder = Path(flags["model"])
    is_folder = (folder / "config.json").is_file()
    flags["model"] = str((folder if is_folder else find_run(flags["model"], runs_dir).path).resolve())
    return session("generate", flags, interactive=flags["interactive"])


def plan(words: list[str]) -> int:
    """Arithmetic: no child, no torch."""
    from lamplighter.commands.plan import plan as make

    text, code = make(words)
    _write(1, text)
    return code


def doctor(words: list[str]) -> int:
    """Staged probes of the machine and the run."""
    from lamplighter.commands.doctor import doctor as examine

    return examine(words)


# ---------------------------------------------------------------- text and tokenizers


def data(words: list[str]) -> int:
    """One of the verbs about text."""
    from lamplighter.commands.data import data as run_verb  # by its module: the package has a function of that name

    return run_verb(words)


def tokenizer(words: list[str]) -> int:
    """One of the verbs about tokenizers."""
    from lamplighter.commands.data import tokenizer as run_verb

    return run_verb(words)


VERBS: dict[str, Callable[[list[str]], int]] = {
    "demo": demo, "train": train, "watch": watch, "why": why, "stop": stop, "save": save, "runs": runs,
    "checkpoints": checkpoints, "generate": generate, "plan": plan, "data": data, "tokenizer": tokenizer,
    "doctor": doctor,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
