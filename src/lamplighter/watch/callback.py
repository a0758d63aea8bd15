"""A Hugging Face Trainer that says where it is: `Trainer(..., callbacks=[lamplighter.TrainerCallback()])`.

In:  the Trainer's events.
Out: the phases train, evaluate and save, with steps and the last loss. Where nobody watches it does nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import lamplighter

_NEEDS = "lamplighter.TrainerCallback needs transformers, and it is not installed here; try: pip install transformers"


class _Teller:
    """The phases that are open, outermost first."""

    def __init__(self) -> None:
        self.open: list[tuple[str, lamplighter.PhaseLike]] = []
        self.step = 0

    def begin(self, name: str, total: float | None = None, unit: str = "") -> lamplighter.PhaseLike:
        phase = lamplighter.phase(name, total, unit)
        phase.__enter__()
        self.open.append((name, phase))
        return phase

    def innermost(self, name: str) -> lamplighter.PhaseLike | None:
        return self.open[-1][1] if self.open and self.open[-1][0] == name else None

    def end(self, name: str) -> None:
        """Close the phase of this name and whatever was left open inside it."""
        if any(open_name == name for open_name, _ in self.open):
            closed = ""
            while closed != name:
                closed, phase = self.open.pop()
                phase.__exit__(None, None, None)


@functools.cache
def trainer_callback() -> type:
    """The class; transformers is imported only where somebody asks for it."""
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise ImportError(_NEEDS) from error

    class LampCallback(TrainerCallback):
        """Reports phases, steps and loss to whoever watches."""

        def __init__(self) -> None:
            self._teller = _Teller()

        def _may_save(self, control: Any) -> None:
            """There is no event before a save: it comes after the logging and the evaluation of the same step."""
            comes_first = control.should_log or control.should_evaluate
            if control.should_save and not comes_first and self._teller.innermost("train") is not None:
                self._teller.begin("save")

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._teller.step = state.global_step
            phase = self._teller.begin("train", state.max_steps, "steps")
            phase.tick(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            phase = self._teller.innermost("train")
            if phase is not None:
                phase.tick(state.global_step - self._teller.step)
            self._teller.step = state.global_step
            self._may_save(control)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._may_save(control)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            phase = self._teller.innermost("train")
            if phase is not None and logs and "loss" in logs:
                phase.tick(0, f"loss {logs['loss']}")
            self._may_save(control)

        def on_prediction_step(
            self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **_: Any
        ) -> None:
            phase = self._teller.innermost("evaluate")
            if phase is None:
                batches = len(eval_dataloader) if hasattr(eval_dataloader, "__len__") else None
                phase = self._teller.begin("evaluate", batches, "batches")
            phase.tick(1)

        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._teller.end("evaluate")
            self._may_save(control)

        def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
            self._teller.end("evaluate")

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._teller.end("save")

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._teller.end("train")

    return LampCallback
