"""A few words from the model while it learns, for people.

In:  a RunContext, a TrainState, after a step.
Out: an event with the text; the share of it that repeats, as a metric and to the anomaly detector.
"""

from __future__ import annotations

from lamplighter import report
from lamplighter.model.generate import stream as sample_stream
from lamplighter.train.anomalies.detector import announce
from lamplighter.train.anomalies.history import repeat_share
from lamplighter.train.state import RunContext, TrainState

_TEMPERATURE = 0.8


def show_sample(context: RunContext, state: TrainState, step: int) -> None:
    """A few words from the model, for people."""
    section, tokenizer = context.run.eval, context.tokenizer
    end = tokenizer.end_of_text if context.chat is None else context.chat.stop_id
    made: list[int] = []
    with report.phase("sample", total=section.sample_tokens, unit="tokens") as phase:
        ids, shown = _prompt(context)
        choice = {
            "max_tokens": section.sample_tokens,
            "seed": step,
            "stop_id": end,
            "window": context.built.positions,
        }
        for (token,) in sample_stream(context.model, ids, temperature=_TEMPERATURE, **choice):
            phase.tick()
            if token is None or token == end:
                break
            made.append(token)
    if state.anomalies is not None and (repeat := repeat_share(made)) is not None:
        report.metric(step, {"eval/sample_repeat": repeat, "eval/iter": step})
        announce(state.anomalies.sampled(step, repeat))
    report.event("sample", step=step, text=tokenizer.decode([*shown, *made]))


def _prompt(context: RunContext) -> tuple[list[int], list[int]]:
    """What a sample begins with, and what of it is shown: of a chat model a question that was held out."""
    prompt = context.run.eval.sample_prompt
    if context.chat is None:
        ids = [context.tokenizer.end_of_text, *context.tokenizer.encode(prompt).tolist()]
        return ids, ids[1:]
    ids = list(context.data.question)
    if prompt:
        ids = context.chat.prompt_ids([{"role": "user", "content": prompt}])
    return ids, ids
