"""The parent's entry point: the verb is found in a static table, and the first word is on the screen before anything is loaded.

In:  a command line.
Out: an exit code. A verb's parent part reads the command line and the config; everything that lasts runs in a
     child (child_main.py).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from importlib import import_module

from lamplighter import first_words
from lamplighter.commands.help import HELP, VERB_HELP
from lamplighter.errors import DONE, LEFT_AT_ONCE, STOPPED_EARLY, CannotWrite, LampError

VERBS = {
    "demo": "train",
    "train": "train",
    "launch": "launch",
    "watch": "watch",
    "why": "ask",
    "stop": "ask",
    "save": "ask",
    "runs": "runs",
    "track": "track",
    "dash": "dash",
    "sweep": "sweep",
    "compare": "compare",
    "report": "report",
    "checkpoints": "checkpoints",
    "generate": "generate",
    "eval": "eval",
    "serve": "serve",
    "export": "export",
    "publish": "publish",
    "plan": "plan",
    "data": "data",
    "tokenizer": "tokenizer",
    "doctor": "doctor",
    "selftest": "selftest",
}  # the file of this folder that holds the verb, as a function of its name
_TALK_ON_STDOUT = (
    "demo",
    "train",
    "watch",
    "stop",
    "save",
    "dash",
    "sweep",
)  # the others have a result there: all other words go to stderr
_MEANT = {
    "runs": "status ps ls list",
    "train --test": "test dry-run dryrun smoke",
    "train": "fit run finetune sft pretrain resume start",
    "watch RUN": "logs log tail attach monitor top follow",
    "generate RUN --interactive": "chat talk",
    "generate RUN": "sample infer inference predict complete",
    "dash": "dashboard ui web board",
    "track RUN --to": "tensorboard wandb trackio mlflow csv sync",
    "compare RUN RUN": "diff versus",
    "stop RUN": "kill cancel end abort",
    "sweep --over NAME=A,B": "search tune hpo grid hyperparameters",
    "launch slurm|sky|kubernetes": "submit sbatch slurm sky skypilot k8s kubernetes kubectl",
    "plan": "estimate cost budget",
    "doctor": "check diagnose verify env",
    "data prepare": "tokenize tokenise prepare preprocess",
    "data clean": "clean dedup",
    "data stats": "stats",
    "why RUN": "explain debug hang",
    "checkpoints RUN": "ckpt checkpoint",
    "serve RUN": "server api openai host",
    "eval RUN": "evaluate evaluation score benchmark lm-eval lm_eval",
    "export RUN": "convert merge gguf quantize ollama",
    "publish RUN --to org/name": "push upload hub",
}  # fmt: skip  what other tools and habits call our verbs
_NOT_THERE: dict[str, str] = {}


def main(argv: list[str] | None = None) -> int:
    """Run one command. Without `argv` it is this process's own: its streams and signals are taken care of as well."""
    if argv is not None:
        return _run(argv)
    _keep_streams()
    _forget_start_folder()
    signal.signal(signal.SIGTERM, _leave_early)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a shell's background job ignores Ctrl+C
        signal.signal(signal.SIGINT, _leave_early)
    return _run(sys.argv[1:])


def _keep_streams() -> None:
    """With stdout closed, the next file to be opened would become stdout."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _forget_start_folder() -> None:
    """Take the current folder, or that of the script, off the import path where Python has put it first (`python -P`).

    A file xxhash.py in somebody else's folder would otherwise be loaded in the library's place.
    """
    started_in = {os.path.realpath(folder) for folder in ("", os.path.dirname(sys.argv[0]))}  # noqa: PTH120  no pathlib yet
    if not sys.flags.safe_path and sys.path and os.path.realpath(sys.path[0]) in started_in:
        del sys.path[0]


_ON_LEAVING = ["before anything was started"]


def say_on_leaving(words: str) -> None:
    """What Ctrl+C and SIGTERM say from here on, where no supervisor handles them."""
    _ON_LEAVING[:] = [words]


def _leave_early(number: int, _: object) -> None:
    """At once, and by no exception: one that is raised in the middle of an import can make a library panic."""
    interrupted = number == signal.SIGINT
    write(2, f"{'left (Ctrl+C)' if interrupted else 'stopped (SIGTERM)'} {_ON_LEAVING[0]}\n")
    os._exit(LEFT_AT_ONCE if interrupted else STOPPED_EARLY)


def _run(words: list[str]) -> int:
    """One command; a user's mistake is three lines and an exit code, never a traceback."""
    try:
        return _run_verb(words)
    except LampError as error:
        first_words.end()
        write(2, "\n".join(error.lines()) + "\n")
        return error.code
    finally:
        first_words.end()


def _run_verb(words: list[str]) -> int:
    """The verb's parent part, or what was asked about it."""
    verb = words[0] if words else "--help"
    if verb in ("-h", "--help", "help"):
        return result(HELP)
    if verb in ("-V", "--version"):
        from lamplighter import __version__

        return result(f"lamp {__version__}\n")
    if verb not in VERBS:
        return _unknown_verb(verb)
    ours = words[: words.index("--")] if verb == "watch" and "--" in words else words
    if "--help" in ours or "-h" in ours:
        return _verb_help(verb)
    has_result = verb not in _TALK_ON_STDOUT or "--" in words or "--print-config" in words
    if has_result or verb not in ("train", "demo") or not _follows(os.environ):
        first_words.begin(2 if has_result else 1, verb)
    act: Callable[[list[str]], int] = getattr(import_module(f"lamplighter.commands.{VERBS[verb]}"), verb)
    return act(words[1:])


def _follows(environ: Mapping[str, str]) -> bool:
    """Whether torchrun or srun have started another process of this node, which speaks for all (commands/launched.py)."""
    return any(environ.get(name, "0") not in ("", "0") for name in ("LOCAL_RANK", "SLURM_LOCALID"))


def write(fd: int, text: str) -> None:
    """Words to a stream of ours, at once."""
    first_words.spoke()
    try:
        os.write(fd, text.encode("utf-8", "backslashreplace"))
    except OSError:  # nobody reads any more; what was asked for still happens
        return


def result(text: str) -> int:
    """What was asked for, on stdout, without control characters and secrets; 0 for the exit code."""
    from lamplighter.safe_text import safe

    return _to_stdout(safe(text))


def _to_stdout(text: str) -> int:
    first_words.end()
    data = text.encode("utf-8", "replace")
    try:
        while data:
            data = data[os.write(1, data) :]
    except BrokenPipeError:  # whoever read the result has enough of it
        return DONE
    except OSError as error:
        raise CannotWrite(f"the result cannot be written to stdout: {error.strerror}") from error
    return DONE


def _unknown_verb(verb: str) -> int:
    import difflib

    from lamplighter.safe_text import clean, mask

    meant = [ours for ours, theirs in _MEANT.items() if verb.lower() in theirs.split()]
    near = meant or difflib.get_close_matches(verb, VERBS, 1, 0.6)
    why = f"did you mean lamp {near[0]}?" if near else "verbs: " + " ".join(VERBS)
    why = _NOT_THERE.get(verb.lower(), why)
    write(2, f"error: lamp has no verb {clean(mask(verb))}\nwhy:   {why}\nnext:  lamp --help\n")
    return 2


def _verb_help(verb: str) -> int:
    text = VERB_HELP[verb]
    if verb == "train":
        from lamplighter.config import fields, flat, preset_names, resolve

        text = text.format(presets=", ".join(preset_names()))
        default = flat(resolve().run)
        rows = [f"  --{name:<26} {info.description} (default: {default[name]})" for name, info in fields().items()]
        text += "\n".join(rows) + "\n"
    return _to_stdout(text)  # words of ours alone: the one after --token is no secret
