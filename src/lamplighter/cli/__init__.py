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

if TYPE_CHECKING:
    from lamplighter.config import Resolved
    from lamplighter.rundir import RunDir

HELP = """\
Lamplighter: language-model training that never goes dark.

usage: lamp VERB ...

  demo                    embedded text -> tokenizer -> cache -> train -> sample, about a minute on 2 CPU cores
  train [run.yaml]        train; the same command again resumes where it stopped
  watch -- CMD...         any training script, unchanged: counted, watched, explained when it hangs
  watch RUN               the live display of a run that is going on, from any terminal
  why RUN|PID             what it is doing right now: phase, process state, the stack of every thread
  stop RUN | save RUN     end it with everything saved | save now and go on
  runs                    all runs and how they stand
  checkpoints RUN         step, losses, size, age, valid or not
  generate RUN|DIR        text from a model
  plan [run.yaml]         parameters, FLOPs, memory, time, money, disk: go or no-go with the arithmetic
  data stats|clean|prepare   count and look at text; clean it; make the token cache
  tokenizer train|show    train a tokenizer; look at one

lamp VERB --help says more; lamp --version.
"""

VERB_HELP = {
    "demo": """\
usage: lamp demo [--run NAME] [--resume auto|never] [--runs-dir DIR] [--section.key value]

Generates the embedded corpus, trains a tokenizer and a small model on it in about a minute, with samples, the loss
beside the floor that no model can beat, checkpoints, and a ledger of where the time went.
""",
    "train": """\
usage: lamp train [run.yaml] [--preset NAME] [--resume auto|never|checkpoint-N|PATH] [--run NAME] [--test]
                  [--verbose] [--force] [--print-config] [--runs-dir DIR] [--section.key value ...]

  --preset NAME     one of: {presets}
  --resume HOW      auto (default): go on from the newest valid checkpoint; never: begin anew, the old folder is kept
                    as NAME.1; or a checkpoint of this run, or a path
  --run NAME        the run's name; default: the YAML's stem, else the preset
  --test            the real path, small, in under a minute
  --verbose         a line for each step
  --force           insist on a run that was refused
  --print-config    show the resolved run and where each value came from; start nothing
  --runs-dir DIR    where runs live (default: runs)

Order: default < preset < run.yaml < command line. Every field:
""",
    "watch": """\
usage: lamp watch [--run NAME] [--runs-dir DIR] [--on-stuck report|stop|restart] [--patience-s S] [--notify CMD|URL] -- CMD...
       lamp watch RUN [--runs-dir DIR]

  -- CMD...           any command (python x.py, torchrun ..., bash run.sh): its output, keys and exit code stay its own; our
                      words go to stderr, and a run folder keeps them with every verdict
  --on-stuck HOW      report (default): name it and touch nothing; stop: end it with 70 by the rules of what is proved;
                      restart: the same, and start the command again (it must resume by itself)
  --patience-s S      how long a cause that cannot be proved is only named (default 600)
  --notify CMD|URL    told of stuck, dead, finished

With RUN: the live display of a run, from any terminal. Ctrl+C leaves the run alone.
""",
    "why": """\
usage: lamp why RUN [--runs-dir DIR]
       lamp why PID

Phase, process state and the stack of every thread, in a second or two; disturbs nothing. PID: any process, also one that was
started without us.
""",
    "stop": "usage: lamp stop RUN [--runs-dir DIR]\n\nSaves the last completed step and ends the run (exit 75).\n",
    "save": "usage: lamp save RUN [--runs-dir DIR]\n\nSaves the last completed step now; the run goes on.\n",
    "runs": "usage: lamp runs [--json] [--runs-dir DIR]\n\nAll runs and how they stand.\n",
    "checkpoints": "usage: lamp checkpoints RUN [--json] [--runs-dir DIR]\n\nEvery checkpoint, verified against its manifest.\n",
    "generate": """\
usage: lamp generate RUN|DIR [--prompt TEXT] [--num-samples N] [--max-tokens N] [--temperature T] [--top-k K]
                     [--top-p P] [--seed S] [--checkpoint best|latest|checkpoint-N] [--interactive] [--runs-dir DIR]
                     [--system TEXT] [--raw]

A model that was trained on instruction rows is asked by its own chat template and gives the answer alone; --system puts
a system message before the question, --raw leaves the template out. With --interactive it remembers the conversation; an
empty line begins a new one. Text goes to stdout as it is; everything else to stderr. --temperature 0 is greedy.
""",
    "plan": """\
usage: lamp plan [run.yaml] [--preset NAME] [--on DEVICE[:N]] [--mfu SHARE] [--what-if] [--json] [--runs-dir DIR]
                 [--section.key value ...]

  --on DEVICE[:N]   t4 v100-16gb l4 a10 rtx3090 rtx4090 a100-40gb a100-80gb l40s h100-80gb h200; default: this CPU
  --mfu SHARE       of the peak that is reached (default 0.4)
  --what-if         the same run on other devices, and the presets
Prices come from budget.usd_per_hour. Exit 0: go; 77: no-go, with what would make it go.
""",
    "data": """\
usage: lamp data stats   [run.yaml|CACHE] [--preset NAME] [--json] [--out DIR] [--val PATH ...] [--sample-mb MB]
                         [--near-documents N] [--runs-dir DIR] [--section.key value ...]
       lamp data clean   PATH... --out DIR [--dry-run] [--language en|any|en,de] [--json] [flags below]
       lamp data prepare [run.yaml] [--preset NAME] [--json] [--runs-dir DIR] [--section.key value ...]

stats    documents, true tokens, lengths, padding of each strategy, duplicates, advice; of text, of instruction rows
         with their template, or (lengths and repeats only) of a token cache
  --val PATH...         a test set of yours: what of it stands in the training text, by hash and by 8-word runs
  --sample-mb MB        look at a part only, spread over the whole; every figure says so
  --near-documents N    look for near duplicates among at most so many documents (default 50000; 0: do not)
  --out DIR             where stats.json, stats.txt and lengths.svg go (default: RUNS-DIR/.stats/NAME)
clean    raw files to clean documents (JSONL), with every rejected one in a log (docs/cleaning.md has every rule)
           files, folders, patterns: .txt .md .jsonl .json .xml (TEI, ALTO) .html, also .gz .zst; any encoding
           takes off Project Gutenberg's headers, licences, credits and notes; joins wrapped lines; never rewrites a word
           --dry-run           write nothing; show what would change, before and after
           --out DIR           clean-00000.jsonl ... for lamp train --data.paths DIR, and log/
           --workers N         processes (default: all cores); the output is the same for any number
           --language any      or the languages to keep, such as en or en,fr
           --min-quality 0     0 to 1: reject documents whose worst measure scores no more than this
           --min-words 10      reject shorter documents
           --near 0.8          likeness from which two documents are one; 0: exact copies only
           --keep-duplicates   --keep-lines (do not join)   --split auto|div|file (TEI)
           --text-key text     --separator TEXT (documents within a text file)
           --max-document-mb 64   --shard-mb 256
prepare  the tokenizer and the token cache that `lamp train` with the same settings would make
""",
    "tokenizer": """\
usage: lamp tokenizer train [run.yaml] --out DIR [--preset NAME] [--special TOKEN ...] [--compare DIR ...] [--force]
                            [--json] [--runs-dir DIR] [--tokenizer.vocab_size N] [--section.key value ...]
       lamp tokenizer show  DIR|RUN|FILE [FILE ...] [--text TEXT] [--compare DIR ...] [--sample-mb MB] [--json]
                            [--runs-dir DIR] [--data.paths PATH ...] [--section.key value ...]

train    a byte-level BPE from any source, of any size, checked by a round trip over the data
  --out DIR           where it goes; opens with transformers and with --tokenizer.path DIR
  --special TOKEN...  control tokens, such as "<|im_start|>" "<|im_end|>"; they count in tokenizer.vocab_size
  --compare DIR...    other tokenizers, measured on the same text
  --force             replace another tokenizer that is in DIR (its files are kept in a folder below)
show     what it is, how it cuts a text, bytes per token, how much of the vocabulary a text uses
  FILE..., --data.paths PATH...    text to measure it on, at most --sample-mb of it (default 50)
""",
}

TO_STDERR = (
    "generate",
    "checkpoints",
    "runs",
    "why",
    "data",
    "tokenizer",
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
    if verb in ("demo", "train", "watch", "generate", "data", "tokenizer") and not quiet:
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
    from lamplighter.watch.recover import Recovery
    from lamplighter.watch.supervise import Order, Supervisor
    from lamplighter.watch.voice import Voice

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
        voice = Voice(1, console_fd=open_lines(run.console))
    except OSError as error:
        raise cannot_write(run.path, error) from error
    if moved is not None:
        voice.say(f"the old run is kept as {moved}")
    try:
        _refuse_drift(run, resolved, voice)
        code = _finished_already(run, resolved, voice) if resume == "auto" else None
        if code is not None:
            return code
        write_atomic(run.config, dump(resolved))
        voice.say(
            f"run {run.path}: everything about it is in this folder; look from elsewhere with: lamp watch {run.name}"
        )
        request = {"resume": resume, "preset": resolved.preset, "force": flags.get("force", False)}
        again = same_command(verb, words)
        order = Order(
            "train",
            request,
            again,
            resolved.run.budget,
            Recovery(resolved.run.watch.on_stuck, resolved.run.watch.patience_s),
            resolved.run.watch.notify,
            resolved.run.watch.stop_grace_s,
            began,
            lock_fd,
            flags.get("verbose", False),
        )
        code = Supervisor(run, order, voice).supervise()
        if code == 0:
            _say_next(run, flags, voice, read_record(run.status).get("step", 0))
        return code
    except OSError as error:
        raise cannot_write(run.path, error) from error
    finally:
        voice.close()


def same_command(verb: str, words: list[str]) -> str:
    import shlex

    kept = list(words[2:] if verb == "demo" and words[:2] == ["--preset", "demo"] else words)
    while "--resume" in kept:
        at = kept.index("--resume")
        del kept[at : at + 2]
    return shlex.join(["lamp", verb, *kept])


def _finished_already(run: RunDir, resolved: Resolved, voice: Any) -> int | None:
    """A finished run says so and exits 0, unless train.steps or train.epochs was raised."""
    from lamplighter.config import load_dump
    from lamplighter.rundir import read_record

    status = read_record(run.status)
    if status.get("state") != "finished" or not run.config.exists():
        return None
    before = load_dump(run.config)
    old, new = before.train, resolved.run.train
    raised = (new.steps or 0) > status.get("steps", 0) or (new.epochs is not None and new.epochs > (old.epochs or 0))
    raised = raised or (before.data.max_chunks or 0) < (resolved.run.data.max_chunks or 0)
    if raised:
        return None
    voice.say(
        f"{run.name} is finished: {status.get('step')} steps. Raise train.steps to go on, or --resume never to begin anew."
    )
    voice.say(f"next: lamp generate {run.name}")
    return 0


def _refuse_drift(run: RunDir, resolved: Resolved, voice: Any) -> None:
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
            voice.say(f"WARNING  {name}: {before} -> {now}; the schedule changes from here", "bold yellow")


def _say_next(run: RunDir, flags: dict[str, Any], voice: Any, step: int) -> None:
    where = "" if flags.get("runs_dir", Path("runs")) == Path("runs") else f" --runs-dir {flags['runs_dir']}"
    voice.say(f"made: {run.checkpoints}/checkpoint-{step} (opens with transformers as it is), {run.report}")
    voice.say(f"next: lamp generate {run.name}{where}    or: lamp checkpoints {run.name}{where}", "bold")


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
    from lamplighter.watch.follow import follow

    if "--" in words:
        place = words.index("--")
        return _watch_command(words[:place], words[place + 1 :])
    return follow(_find_run("watch", words))


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
    from lamplighter.watch.attach import Attendant, Wish
    from lamplighter.watch.terminal import leave_as

    flags = parse("watch", _watch_flags, words)
    if not command:
        raise UsageError("nothing to watch", "no command after --", "lamp watch -- python train.py")
    run = _folder_for(command, flags.get("run"), flags.get("runs_dir", Path("runs")))
    wish = Wish(command, flags.get("on_stuck", "report"), flags.get("patience_s", 600.0), flags.get("notify"))
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
    from lamplighter.watch.follow import explain

    if len(words) == 1 and words[0].isascii() and words[0].isdecimal() and not (Path("runs") / words[0]).exists():
        from lamplighter.watch.peek import peek

        _write(2, f"{time.strftime('%H:%M:%S')}  looking at process {words[0]} twice, a second apart\n")
        return peek(int(words[0]))
    return explain(_find_run("why", words, need_running=True))


def stop(words: list[str]) -> int:
    from lamplighter.watch.follow import stop_run

    return stop_run(_find_run("stop", words, need_running=True))


def save(words: list[str]) -> int:
    from lamplighter.watch.follow import save_run

    return save_run(_find_run("save", words, need_running=True))


def _runs_flags(*, json: bool = False, runs_dir: Path = Path("runs")) -> None:
    """All runs."""


def runs(words: list[str]) -> int:
    from lamplighter.watch.follow import list_runs

    flags = parse("runs", _runs_flags, words)
    return list_runs(flags.get("runs_dir", Path("runs")), flags.get("json", False))


# ---------------------------------------------------------------- verbs that end with a result


def _checkpoints_flags(run: str, /, *, json: bool = False, runs_dir: Path = Path("runs")) -> None:
    """The checkpoints of a run."""


def checkpoints(words: list[str]) -> int:
    from lamplighter.watch.follow import session

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
    from lamplighter.watch.follow import session

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
    from lamplighter.cli.plans import plan as make

    text, code = make(words)
    _write(1, text)
    return code


# ---------------------------------------------------------------- text and tokenizers


def data(words: list[str]) -> int:
    """One of the verbs about text."""
    from lamplighter.cli import texts

    return texts.data(words)


def tokenizer(words: list[str]) -> int:
    """One of the verbs about tokenizers."""
    from lamplighter.cli import texts

    return texts.tokenizer(words)


VERBS: dict[str, Callable[[list[str]], int]] = {
    "demo": demo, "train": train, "watch": watch, "why": why, "stop": stop, "save": save, "runs": runs,
    "checkpoints": checkpoints, "generate": generate, "plan": plan, "data": data, "tokenizer": tokenizer,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
