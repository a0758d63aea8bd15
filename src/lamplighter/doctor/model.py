"""The model probes, in their order; and the last of them, the compiler, which is tried in a process of its own.

In:  a Patient.
Out: the Stages (this file loads no torch); a Finding on torch.compile: how long it takes, whether it is worth it, or fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lamplighter.doctor.probe import Finding, Level, Patient, Stage
from lamplighter.doctor.trials import attempt

COMPILE_S, CURIOUS_S = 40.0, 20.0  # where the run compiles, and where it is only tried
WORTH = 1.1

STAGES = [
    Stage("model / one step", "lamplighter.doctor.one_step:one_step", 90),
    Stage("model / learning", "lamplighter.doctor.trainability:learning", 90),
    Stage("model / precision", "lamplighter.doctor.memory_fit:precision", 60),
    Stage("model / memory", "lamplighter.doctor.memory_fit:memory", 90),
    Stage("model / compile", "lamplighter.doctor.model:compiling", 90),
]


def compiling(patient: Patient) -> Iterator[Finding]:
    """The same step with torch.compile, in a process of its own with a deadline."""
    request = {
        "run": patient.run.model_dump(mode="json"), "runs_dir": str(patient.runs_dir), "scratch": str(patient.scratch),
    }  # fmt: skip
    wanted = patient.run.train.compile is True
    done = attempt(
        "lamplighter.doctor.compile_trial:measure",
        request,
        patient.scratch / "compile",
        COMPILE_S if wanted else CURIOUS_S,
        patient.now,
    )
    level: Level = "fault" if wanted else "ok"
    advice = "--train.compile false" if wanted else "nothing to do: train.compile is not asked for"
    settings: dict[str, Any] = {"train.compile": False} if wanted else {}
    last = done.last
    if done.code is None:
        at = f" ({last.get('now')})" if last.get("now") else ""
        why = (
            "a Python loop in the model is unrolled, turn by turn"
            if last.get("own")
            else "a busy machine, or a slow compiler"
        )
        what = f"torch.compile had not ended after {done.seconds:.0f} s{at}"
        yield Finding(level, what, why, advice, "compile_slow", settings=settings)
    elif "error" in last:
        yield Finding(
            level,
            f"torch.compile fails: {last['error']}",
            last.get("where", ""),
            advice,
            "compile_failed",
            settings=settings,
        )
    elif done.code != 0 or "compiled_s" not in last:
        words = [line for line in done.last_words.splitlines() if line.strip()]
        yield Finding(
            level,
            f"the compile trial {done.ended()}",
            words[-1] if words else "",
            advice,
            "compile_failed",
            settings=settings,
        )
    else:
        yield _worth(last, wanted, patient)


def _worth(last: dict[str, Any], wanted: bool, patient: Patient) -> Finding:
    gain = last["eager_s"] / last["compiled_s"]
    what = (
        f"compiled {last['compiled_s'] * 1000:,.0f} ms against uncompiled {last['eager_s'] * 1000:,.0f} ms: {gain:.2f} x,"
        f" after {last['compile_s']:.0f} s of compiling"
    )
    why = f"forward and backward of {last['words']}"
    figures = {
        "compile_s": last["compile_s"],
        "compiled_s": last["compiled_s"],
        "eager_s": last["eager_s"],
        "gain": gain,
    }
    steps = patient.run.train.steps or 0
    saved = (last["eager_s"] - last["compiled_s"]) * steps
    if wanted and gain < 1.0:
        return Finding("warn", f"{what}: slower", why, "--train.compile false", "compile_slow",
                       settings={"train.compile": False}, figures=figures)  # fmt: skip
    if not wanted and gain > WORTH and saved > 2 * last["compile_s"]:
        return Finding(
            "ok", f"{what}; --train.compile true would save about {saved / 60:.0f} min", why, figures=figures
        )
    return Finding("ok", what, why, figures=figures)
