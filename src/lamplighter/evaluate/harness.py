"""Tasks of lm-eval by its own code, on our model in this process.

In:  a loaded model, the name of one of lm-eval's tasks.
Out: its scores as a result of ours. Its data comes from its own place (the hub's local cache where there is no network).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lamplighter import report
from lamplighter.errors import BadData, InputMissing
from lamplighter.evaluate.encoding import Question, QuestionEncoder
from lamplighter.evaluate.evaluation import Candidate, HowLong, Manner, stream_texts
from lamplighter.evaluate.items import Task, TaskItem
from lamplighter.evaluate.likelihood import answer_all
from lamplighter.evaluate.results import log_name, write_result
from lamplighter.evaluate.scores import TaskScore
from lamplighter.model.generate import Choice


def run_harness(candidate: Candidate, name: str, manner: Manner, request: dict[str, Any]) -> list[dict[str, Any]]:
    """One of lm-eval's tasks (or groups); one result for each that it reports."""
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise InputMissing("tasks of lm-eval need lm-eval", str(error), "pip install 'lamplighter[eval]'") from error
    # Without this lm-eval forks a pool for standard errors and ends it by SIGTERM, which the forks take for a stop of this process.
    os.environ["DISABLE_MULTIPROC"] = "1"
    began = time.monotonic()
    data = request.get("data")
    with report.phase(f"lm-eval {name}", unit="requests") as phase:
        manager = TaskManager(include_path=data) if data else TaskManager()
        if not manager.match_tasks([name]):
            raise InputMissing(
                f"lm-eval has no task {name}", "", "lm-eval ls tasks lists them; a YAML of yours: --data DIR"
            )
        try:
            found = lm_eval.simple_evaluate(
                model=_adapter(candidate, manner, phase), tasks=[name], task_manager=manager, limit=request["limit"],
                num_fewshot=request["num_fewshot"], bootstrap_iters=100, log_samples=False, verbosity="ERROR",
            )  # fmt: skip
        except (OSError, ConnectionError, ValueError, KeyError) as error:
            why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise BadData(f"lm-eval could not run {name}", why[:200], "its data must be in the hub's local cache, or --data a YAML with local files") from error  # fmt: skip
    seconds = round(time.monotonic() - began, 3)
    version = str(getattr(lm_eval, "__version__", ""))
    return [_record(candidate, manner, task, figures, found, seconds, version) for task, figures in found["results"].items()]  # fmt: skip


def _record(
    candidate: Candidate, manner: Manner, name: str, figures: dict[str, Any], found: dict[str, Any], seconds: float, version: str
) -> dict[str, Any]:  # fmt: skip
    count = int(found.get("n-samples", {}).get(name, {}).get("effective", 0))
    better = found.get("higher_is_better", {}).get(name, {})
    scores = []
    for key, value in figures.items():
        metric, _, filtered = key.partition(",")
        if (
            metric.endswith("_stderr")
            or not isinstance(value, int | float)
            or isinstance(value, bool)
            or metric == "sample_len"
        ):
            continue
        error = figures.get(f"{metric}_stderr,{filtered}")
        spread = float(error) if isinstance(error, int | float) and math.isfinite(error) else None
        shown = metric if filtered in ("", "none") else f"{metric}/{filtered}"
        scores.append(TaskScore(shown, float(value), spread, count, None, better.get(metric) is not False))  # fmt: skip
    config = found.get("configs", {}).get(name, {})
    task = Task(f"lm-eval:{name}", "choice", tuple(TaskItem("", ()) for _ in range(count)), Path(str(config.get("dataset_path", ""))), "", str(config.get("doc_to_text", "")), {"num_fewshot": found.get("n-shot", {}).get(name), "lm_eval": version})  # fmt: skip
    label = log_name(task.name, candidate.subject, dict(task.settings))
    return write_result(manner.folder, label, candidate.subject, task, scores, seconds=seconds)


def _adapter(candidate: Candidate, manner: Manner, phase: report.Phase) -> Any:
    """lm-eval's interface to a model, filled by our scoring and our generation."""
    from lm_eval.api.model import LM

    encoder = QuestionEncoder(candidate.tokenizer)

    class Adapter(LM):  # type: ignore[misc]  # lm-eval asks for a class of its own
        def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            found = {}
            questions = [encoder.question(n, one.args[0], [one.args[1]]) for n, one in enumerate(requests)]
            for batch in answer_all(candidate.built.model, questions, candidate.built.positions, [""] * len(questions)):
                for one in batch:
                    found[one.number] = (one.nats[0], one.greedy[0])
                phase.tick(len(batch))
            return [found[n] for n in range(len(requests))]

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            windows = [
                Question(n, one.context, one.answers)
                for n, asked in enumerate(requests)
                for one in encoder.windows(n, asked.args[0], candidate.built.positions)
            ]
            sums = [0.0] * len(requests)
            for batch in answer_all(candidate.built.model, windows, candidate.built.positions, [""] * len(windows)):
                for one in batch:
                    sums[one.number] += one.nats[0]
                phase.tick(len(batch))
            return sums

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            made = {}
            for n, one in enumerate(requests):
                wanted = dict(one.args[1])
                until = wanted.get("until") or []
                how = HowLong(int(wanted.get("max_gen_toks", 256)), Choice(float(wanted.get("temperature", 0.0)) if wanted.get("do_sample") else 0.0, 0, 1.0))  # fmt: skip
                for number, text in stream_texts(candidate, "generate", [(n, one.args[0])], manner, how):
                    made[number] = _cut(text, [until] if isinstance(until, str) else until)
                phase.tick()
            return [made[n] for n in range(len(requests))]

    return Adapter()


def _cut(text: str, until: Sequence[str]) -> str:
    ends = [text.find(one) for one in until if one and one in text]
    return text[: min(ends)] if ends else text
