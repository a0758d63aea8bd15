"""What is learned in equal time: bits per byte of held-back real text, ours against Hugging Face's Trainer and nanoGPT's recipe.

In:  a folder of real text (--text; .txt), a budget in seconds of training, seeds, recipes.
Out: bits per byte and its difference to the first recipe, seed by seed; tokens and seconds to the loss that the first one ends with.

    python benchmarks/time_to_loss.py --text BOOKS --budget 75 --seeds 1 --results FILE.jsonl     a part of it
    python benchmarks/time_to_loss.py --results FILE.jsonl --show                                 the tables of all parts

All have one tokenizer (--vocab, trained on the text that is not held back), the same windows in the same order, the same
precision and threads, and a schedule that ends with the budget: how many steps fit is measured first, with all taking turns,
and written to the results. Then they take turns of a few seconds until everybody has made their steps. What is not
counted for anybody: starting, and the first two steps (compiling). A recipe that has its line for a seed is not run again, so a long
comparison can be made in parts, and goes on where it was ended.

A recipe is a word and its settings: "trainer batch=8 lr=1e-3", "nanogpt ...", "lamp preset=modern train.batch_size=16 ..." (any settings
of ours). The first one of --recipes is what the others are compared with.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measured
import peers
from learners import PROGRAMS
from training import environment

# Those of the table in docs/recipe.md; a few rates were tried, fewest for nanoGPT. All have about as many parameters.
RECIPES = [
    "trainer layers=6 width=384 batch=8 lr=2e-3",
    "nanogpt layers=6 width=384 batch=8 lr=2e-3",
    "lamp model.family=gpt2 train.batch_size=8 train.lr=2e-3",
    "lamp model.layers=7 model.width=320 train.batch_size=8",
    "lamp model.layers=7 model.width=320 train.batch_size=8 train.optimizer=muon train.lr=0.04",
    "lamp model.layers=6 model.width=384 train.batch_size=8 model.tie_embeddings=true",
]
QUICK = [
    "trainer layers=1 width=64 batch=2",
    "nanogpt layers=1 width=64 batch=2",
    "lamp preset=modern model.layers=1 model.width=64 train.batch_size=2",
]
PIECE = 20_000  # characters of a document
HELD_EVERY = 25  # documents
UNCOUNTED = 2  # steps: compiling
PACE_STEPS = 2_000  # of the schedule while the pace is measured, which ends long before
SMOOTHED = 40_000  # tokens over which a training loss is averaged, to tell when it was reached
Line = dict[str, Any]


# ---------------------------------------------------------------- the text


def pieces(folder: Path) -> list[str]:
    """Every file without what a library has put around it, cut at ends of paragraphs."""
    found = []
    for path in sorted(folder.rglob("*.txt")):
        data = path.read_bytes()
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = data.decode("latin-1")
        text = text.replace("\r\n", "\n").replace("\0", "")
        begin, end = text.find("*** START OF"), text.find("*** END OF")
        text = text[text.find("\n", begin) if begin >= 0 else 0 : end if end >= 0 else None]
        while text.strip():
            cut = text.find("\n\n", PIECE) if len(text) > PIECE else -1
            piece, text = (text, "") if cut < 0 else (text[:cut], text[cut:])
            found.append(piece.strip() + "\n")
    if not found:
        raise SystemExit(f"no .txt files in {folder}")
    return found


def prepare_text(wanted: Any) -> Line:
    """Documents to learn from, windows that are held back, the tokenizer: made once, in a folder beside the results."""
    import numpy as np

    place = Path(f"{wanted.results}.data")
    about = place / "about.json"
    if about.exists():
        told: Line = json.loads(about.read_text())
        if (told["length"], told["asked"]) != (wanted.length, wanted.vocab):
            raise SystemExit(f"{place} was made with another --length or --vocab: other --results")
        return told
    if wanted.text is None:
        raise SystemExit("--text FOLDER: real text (.txt) to learn from")
    place.mkdir(parents=True, exist_ok=True)
    found = pieces(wanted.text)
    parts = {
        "train": [one for number, one in enumerate(found) if number % HELD_EVERY],
        "held": found[::HELD_EVERY],
    }
    text = place / "train.jsonl"
    text.write_text("".join(json.dumps({"text": one}) + "\n" for one in parts["train"]))
    context = our_context(wanted, place, text, seed=1, extra={})
    from lamplighter.train.checkpointer import TokenizerFiles

    (place / "tokenizer").mkdir(exist_ok=True)
    TokenizerFiles(context.tokenizer).save(place / "tokenizer")
    context.source.close()
    ids = np.concatenate([context.tokenizer.encode(one) for one in parts["held"]]).astype(np.int32)
    count = (len(ids) - 1) // wanted.length
    rows = np.stack([ids[at * wanted.length : (at + 1) * wanted.length + 1] for at in range(count)])
    rows = rows[np.linspace(0, count - 1, min(count, wanted.held)).astype(int)]
    np.save(place / "held.npy", rows)
    told = {
        "asked": wanted.vocab, "text": str(text), "tokenizer": str(place / "tokenizer"), "held": str(place / "held.npy"), "held_tokens": int(rows[:, 1:].size),
        "held_bytes": sum(len(context.tokenizer.decode(row.tolist()).encode()) for row in rows[:, 1:]), "length": wanted.length,
        "vocab": context.tokenizer.vocab_size, "bytes_per_token": sum(map(len, (one.encode() for one in parts["held"]))) / len(ids),
    }  # fmt: skip
    about.write_text(json.dumps(told, indent=1))
    return told


def our_context(wanted: Any, place: Path, text: Path, seed: int, extra: dict[str, Any]) -> Any:
    """A run of ours over the text, prepared and not begun: for its tokenizer and its order of windows."""
    from lamplighter.commands.start_up import prepare
    from lamplighter.config import resolve
    from lamplighter.rundir import RunDir

    settings = {**our_data(wanted, text, seed), "tokenizer.vocab_size": wanted.vocab, "model.layers": 1, "model.width": 64,
                "model.heads": 1, "train.steps": 1000, "train.batch_size": 32, **extra}  # fmt: skip
    folder = RunDir(place / "runs" / f"rows-{seed}")
    folder.create()
    found = resolve(None, None, {name: [str(value)] for name, value in settings.items()})
    return prepare(found.run, folder, {"cache": str(place / "cache")})[0]


def our_data(wanted: Any, text: Path, seed: int) -> dict[str, Any]:
    return {"data.paths": str(text), "data.seq_len": wanted.length, "data.val_fraction": 0.005, "train.seed": seed}


def windows(wanted: Any, about: Line, seed: int, tokens: int) -> Path:
    """In the order in which a run of ours sees them with this seed."""
    import numpy as np

    place = Path(about["text"]).parent
    file = place / f"rows-{seed}.npy"
    count = math.ceil(tokens / (32 * wanted.length)) + 1
    if not file.exists() or len(np.load(file, mmap_mode="r")) < 32 * count:
        context = our_context(wanted, place, Path(about["text"]), seed, {"tokenizer.path": about["tokenizer"]})
        context.source.start(1, None)
        batches = [context.source.next(step) for step in range(1, count + 1)]
        context.source.close()
        np.save(
            file, np.concatenate([np.concatenate([b.inputs, b.targets[:, -1:]], axis=1) for b in batches]).astype("i4")
        )
    return file


# ---------------------------------------------------------------- the recipes


def parsed(recipe: str) -> tuple[str, dict[str, str]]:
    kind, *words = recipe.split()
    settings = dict(word.split("=", 1) for word in words)
    if kind not in PROGRAMS:
        raise SystemExit(f"{recipe!r}: a recipe begins with {', '.join(PROGRAMS)}")
    if kind == "lamp":
        settings.setdefault("train.batch_size", "16")  # derived ones would depend on the pace, and the pace on them
    else:
        for name, value in {"layers": "6", "width": "384", "batch": "8", "lr": "1e-3"}.items():
            settings.setdefault(name, value)
    return kind, settings


def pace_key(recipe: str) -> str:
    """Those of one key are equally fast: the rate has no part in it."""
    kind, settings = parsed(recipe)
    return " ".join(
        [kind, *sorted(f"{name}={value}" for name, value in settings.items() if name not in ("lr", "train.lr"))]
    )


def known_pace(wanted: Any) -> dict[str, float]:
    """Seconds of a step: of the newest run, else as it was measured for this."""
    lines = read(wanted)
    found = {pace_key(line["pace"]): line["step_s"] for line in lines if "pace" in line}
    return found | {
        pace_key(one["recipe"]): one["seconds"] / (one["steps"] - UNCOUNTED) for one in lines if "recipe" in one
    }


def rows_of(recipe: str) -> int:
    settings = parsed(recipe)[1]
    return int(settings.get("batch") or settings["train.batch_size"])


class Learner:
    """A recipe in a process of its own, with its schedule laid out for so many steps."""

    def __init__(self, recipe: str, wanted: Any, about: Line, place: Path, *, seed: int, planned: int) -> None:
        kind, settings = parsed(recipe)
        self.recipe, self.steps, self.seconds, self.batch = recipe, 0, 0.0, rows_of(recipe)
        self.losses: list[float] = []
        self.turns: list[tuple[int, float]] = []
        self.planned = planned
        ours = kind == "lamp"
        python = sys.executable if ours or kind == "nanogpt" else str(interpreter())
        log = place / f"{abs(hash((recipe, seed, planned)))}.log"
        self.worker = peers.Worker(python, PROGRAMS[kind], log, environment(ours))
        if ours:
            preset = settings.pop("preset", None)
            fixed = {**our_data(wanted, Path(about["text"]), seed), "tokenizer.path": about["tokenizer"], "tokenizer.vocab_size": wanted.vocab,
                     "train.steps": planned + 1, "train.threads": wanted.threads, "train.dtype": wanted.dtype, "eval.every_steps": 0,
                     "eval.sample_every_steps": 0, "save.every_steps": 0, "save.every_s": 7200}  # fmt: skip
            if "model.width" in settings:
                fixed["model.heads"] = int(settings["model.width"]) // 64
            ask: Line = {"run": str(place / log.stem), "preset": preset, "settings": {**fixed, **settings}, "cache": str(Path(about["text"]).parent / "cache")}  # fmt: skip
        else:
            ask = {"rows": str(windows(wanted, about, seed, (planned + 2) * self.batch * wanted.length)), "settings": settings, "seed": seed,
                   "planned": planned, "vocab": about["vocab"], "length": wanted.length, "threads": wanted.threads, "dtype": wanted.dtype,
                   "out": str(place / log.stem)}  # fmt: skip
        self.about: Line = self.worker.ask(ask)

    def turn(self, steps: int, counted: bool = True) -> float:
        told = self.worker.ask({"steps": steps})
        self.steps += steps
        self.losses += told["losses"]
        self.seconds += told["s"] if counted else 0.0
        self.turns.append((self.steps, self.seconds))
        return float(told["s"])

    def ends(self) -> None:
        self.worker.__exit__(None, None, None)


def interpreter() -> Path | str:
    """One that has transformers and accelerate."""
    import importlib.util

    have = all(importlib.util.find_spec(name) for name in ("transformers", "accelerate"))
    return sys.executable if have else peers.python("hf")


# ---------------------------------------------------------------- measuring


def read(wanted: Any) -> list[Line]:
    if not wanted.results.exists():
        return []
    return [json.loads(line) for line in wanted.results.read_text().splitlines()]


def write(wanted: Any, line: Line) -> None:
    with open(wanted.results, "a") as out:
        out.write(json.dumps(line) + "\n")


def measure_pace(wanted: Any, about: Line, recipes: list[str], place: Path) -> None:
    """Seconds of a step of each, all taking turns."""
    learners = [Learner(recipe, wanted, about, place, seed=1, planned=PACE_STEPS) for recipe in recipes]
    try:
        for learner in learners:
            learner.turn(UNCOUNTED + 1)
        each = {learner.recipe: [learner.turn(wanted.pace_steps) for learner in [learner]] for learner in learners}
        for _ in range(wanted.pace_rounds - 1):
            for learner in learners:
                each[learner.recipe].append(learner.turn(wanted.pace_steps))
    finally:
        for learner in learners:
            learner.ends()
    for recipe, seconds in each.items():
        write(
            wanted,
            {"pace": recipe, "step_s": statistics.median(seconds) / wanted.pace_steps, "machine": measured.machine()},
        )


def learn(wanted: Any, about: Line, planned: dict[str, int], seed: int, place: Path) -> None:
    """All of them, in turns; then what each has learned."""
    learners = [Learner(recipe, wanted, about, place, seed=seed, planned=steps) for recipe, steps in planned.items()]
    began = time.time()
    try:
        for learner in learners:
            learner.turn(UNCOUNTED, counted=False)
        each = {one.recipe: max(1, round(one.planned * wanted.turn / wanted.budget)) for one in learners}
        number = 0
        while left := [one for one in learners if one.steps < one.planned]:
            first = number % len(left)  # whose turn is the first one goes round
            for learner in left[first:] + left[:first]:
                learner.turn(min(each[learner.recipe], learner.planned - learner.steps))
            number += 1
            worst = max(one.planned - one.steps for one in left) / max(one.planned for one in left)
            print(f"  seed {seed}: {1 - worst:.0%} after {time.time() - began:.0f} s", flush=True)
        for learner in learners:
            nats = learner.worker.ask({"held": about["held"]})["nats"]
            write(wanted, {
                "recipe": learner.recipe, "seed": seed, "budget_s": wanted.budget, "seconds": learner.seconds, "steps": learner.steps,
                "tokens": learner.steps * learner.batch * wanted.length, "bits_per_byte": nats / math.log(2) / about["held_bytes"],
                "loss": nats / about["held_tokens"], **learner.about, "batch": learner.batch, "length": wanted.length, "dtype": wanted.dtype,
                "turns": learner.turns, "losses": [round(one, 4) for one in learner.losses], "date": time.strftime("%Y-%m-%d", time.gmtime()),
                "commit": measured.commit(), "machine": measured.machine(), "bytes_per_token": about["bytes_per_token"],
            })  # fmt: skip
    finally:
        for learner in learners:
            learner.ends()


# ---------------------------------------------------------------- the tables


def reached(line: Line, loss: float) -> tuple[float, float] | None:
    """Tokens and seconds at which the smoothed training loss first was this low."""
    step_tokens = line["batch"] * line["length"]
    size = max(1, round(SMOOTHED / step_tokens))
    for at in range(size, len(line["losses"]) + 1):
        if statistics.fmean(line["losses"][at - size : at]) <= loss:
            return at * step_tokens, seconds_at(line, at)
    return None


def last_loss(line: Line) -> float:
    size = max(1, round(SMOOTHED / (line["batch"] * line["length"])))
    return statistics.fmean(line["losses"][-size:])


def seconds_at(line: Line, step: int) -> float:
    """Between two turns, in a straight line."""
    before = (0, 0.0)
    for steps, seconds in line["turns"]:
        if steps >= step:
            share = (step - before[0]) / max(1, steps - before[0])
            return float(before[1] + share * (seconds - before[1]))
        before = (steps, seconds)
    return float(line["seconds"])


def spread(values: list[float], form: str = "{:.3f}") -> str:
    """The mean, and what lies around it."""
    if not values:
        return "-"
    middle = form.format(statistics.fmean(values))
    return f"{middle} ({form.format(min(values))} - {form.format(max(values))})" if len(values) > 1 else middle


def show(wanted: Any) -> dict[str, float]:
    """For each budget a table; figures of the longest one by the words of a recipe."""
    lines = [line for line in read(wanted) if "recipe" in line]
    recipes = wanted.recipes or list(dict.fromkeys(line["recipe"] for line in lines))
    figures: dict[str, float] = {}
    for budget in sorted({line["budget_s"] for line in lines}):
        here = {(line["recipe"], line["seed"]): line for line in lines if line["budget_s"] == budget}
        base = next((recipe for recipe in recipes if any(recipe == key[0] for key in here)), None)
        if base is None:
            continue
        print(f"\n{budget:g} s of training each, seeds {sorted({seed for _, seed in here})}; against: {base}")
        print(
            "bits per byte | difference, by seed | seconds | tokens | parameters | tokens and seconds to its loss, as shares"
        )
        for recipe in recipes:
            mine = {seed: line for (name, seed), line in here.items() if name == recipe}
            if not mine:
                continue
            both = [(line, here[base, seed]) for seed, line in mine.items() if (base, seed) in here]
            apart = [one["bits_per_byte"] - other["bits_per_byte"] for one, other in both]
            shares = []
            for one, other in both:
                goal = last_loss(other)
                found, theirs = reached(one, goal), reached(other, goal)
                if found and theirs:
                    shares.append((found[0] / theirs[0], found[1] / theirs[1]))
            missed = f"; not reached in {len(both) - len(shares)} of {len(both)}" if len(shares) < len(both) else ""
            first = next(iter(mine.values()))
            print(f"{recipe}\n    {spread([line['bits_per_byte'] for line in mine.values()])} | {spread(apart, '{:+.3f}')}"
                  f" | {spread([line['seconds'] for line in mine.values()], '{:.0f}')} | {first['tokens']:,} | {first['parameters']:,}"
                  f" | {spread([one for one, _ in shares], '{:.2f}')}, {spread([one for _, one in shares], '{:.2f}')}{missed}")  # fmt: skip
            if apart:
                figures |= {f"{budget:g}: {recipe}": statistics.fmean(apart)}
    return figures


def main() -> None:
    parser = measured.arguments(__doc__ or "")
    parser.add_argument("--text", type=Path, help="a folder of .txt files")
    parser.add_argument("--results", type=Path, default=Path("time_to_loss.jsonl"), help="lines are appended to it")
    parser.add_argument("--budget", type=float, default=75.0, help="seconds of training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--recipes", nargs="+", help="instead of those of the file; the first is what the others are compared with"
    )
    parser.add_argument(
        "--turn", type=float, default=5.0, help="seconds that each has before it is the next one's turn"
    )
    parser.add_argument("--show", action="store_true", help="only the tables of what is there")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], help="bf16 where the processor has it, else fp32")
    for name, value in {"vocab": 8192, "length": 256, "held": 256, "pace-steps": 4, "pace-rounds": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    wanted = parser.parse_args()
    if not wanted.show:
        from lamplighter.train.bf16 import cpu_has_it, make_it_work

        wanted.dtype = wanted.dtype or ("bf16" if cpu_has_it() and make_it_work() else "fp32")
        measured.say_machine()
        about = prepare_text(wanted)
        wanted.recipes = wanted.recipes or RECIPES
        if wanted.quick:
            wanted.budget, wanted.seeds, wanted.turn, wanted.pace_rounds, wanted.pace_steps = 1.0, [1], 0.5, 1, 2
            wanted.recipes = QUICK
        wanted.recipes = [one for one in wanted.recipes if not wanted.no_peers or one.startswith("lamp")]
        with tempfile.TemporaryDirectory(prefix="lamp-bench-") as place:
            known = known_pace(wanted)
            if new := {pace_key(recipe): recipe for recipe in wanted.recipes if pace_key(recipe) not in known}:
                measure_pace(wanted, about, list(new.values()), Path(place))
            for seed in wanted.seeds:
                pace = known_pace(wanted)
                done = {line["recipe"] for line in read(wanted) if line.get("seed") == seed and line["budget_s"] == wanted.budget}  # fmt: skip
                planned = {one: max(UNCOUNTED + 1, round(wanted.budget / pace[pace_key(one)]) + UNCOUNTED) for one in wanted.recipes if one not in done}  # fmt: skip
                if planned:
                    learn(wanted, about, planned, seed, Path(place))
    measured.keep(wanted.json, show(wanted))


if __name__ == "__main__":
    main()
