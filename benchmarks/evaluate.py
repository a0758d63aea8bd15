"""Items a second of evaluation, against lm-eval's hf backend: the same weights, items and likelihoods.

In:  a model folder, a folder of tasks (--data) as docs/evaluation.md has it.
Out: ratio by the clock and by processor time, which says more on a machine that others use.

    python benchmarks/evaluate.py --folder DIR --data DIR [--tasks hellaswag mmlu] [--items 24] [--threads 1]

Both work in this process, in turn, with the same number of threads; lm-eval with batches of 8. Every log-probability must be
within 1e-3 of lm-eval's, else the benchmark fails.
"""

from __future__ import annotations

import time
from pathlib import Path

import measured
import torch

from lamplighter.data import tokenizer as tokenizers
from lamplighter.evaluate import encoding, likelihood, tasks
from lamplighter.model.build import load_folder


def main() -> None:
    arguments = measured.arguments(__doc__)
    arguments.add_argument("--folder", type=Path, required=True)
    arguments.add_argument("--data", type=Path, required=True)
    arguments.add_argument("--tasks", nargs="+", default=["hellaswag", "mmlu"])
    arguments.add_argument("--items", type=int, default=24)
    wanted = arguments.parse_args()
    torch.set_num_threads(wanted.threads)
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    built = load_folder(wanted.folder)
    encoder = encoding.QuestionEncoder(tokenizers.load(wanted.folder))
    theirs = HFLM(pretrained=str(wanted.folder), dtype="float32", batch_size=8, device="cpu")
    for name in wanted.tasks:
        task = tasks.open_task(name, wanted.data, tasks.Shots())
        items = tasks.limited(task, wanted.items).items[: wanted.items]
        asked = [Instance("loglikelihood", {}, (item.context, one), 0) for item in items for one in item.answers]
        cpu: dict[str, list[float]] = {"ours": [], "lm-eval hf": []}
        found: dict[str, list[float]] = {}

        def ours(items: tuple = items, cpu: dict = cpu, found: dict = found) -> float:
            began, used = time.perf_counter(), time.process_time()
            questions = [encoder.question(n, item.context, item.answers) for n, item in enumerate(items)]
            done = {one.number: one.nats for batch in likelihood.answer_all(built.model, questions, built.positions, [item.group for item in items]) for one in batch}  # fmt: skip
            cpu["ours"].append(time.process_time() - used)
            found["ours"] = [nat for n in range(len(items)) for nat in done[n]]
            return len(items) / (time.perf_counter() - began)

        def peer(items: tuple = items, asked: list = asked, cpu: dict = cpu, found: dict = found) -> float:
            began, used = time.perf_counter(), time.process_time()
            found["peer"] = [nat for nat, _ in theirs.loglikelihood(asked, disable_tqdm=True)]
            cpu["lm-eval hf"].append(time.process_time() - used)
            return len(items) / (time.perf_counter() - began)

        rates = measured.in_turn({"ours": ours, "lm-eval hf": peer}, wanted.rounds)
        worst = max(abs(a - b) for a, b in zip(found["ours"], found["peer"], strict=True))
        if worst > 1e-3:
            raise SystemExit(f"{name}: a log-probability differs from lm-eval's by {worst:.2e}")
        title = f"{name}, {len(items)} items, {wanted.threads} thread(s); largest difference {worst:.1e} nats"
        measured.show(title, "items/s by the clock", [measured.Row(who, all_) for who, all_ in rates.items()], against="lm-eval hf")  # fmt: skip
        by_cpu = {who: [len(items) / one for one in all_[1:]] for who, all_ in cpu.items()}
        measured.show(title, "items/s of processor time", [measured.Row(who, all_) for who, all_ in by_cpu.items()], against="lm-eval hf")  # fmt: skip
    if wanted.json:
        measured.keep(wanted.json)


if __name__ == "__main__":
    main()
