"""What the page is told of a run: bounded points with their extremes, redone steps, damage, comparison, one file without a server."""

from __future__ import annotations

import json
import math
import platform
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from lamplighter.dash import facts, report_page
from lamplighter.dash.comparison import Summary, compare, conclusions, evaluation_rows, table
from lamplighter.dash.facts import RunsDir
from lamplighter.dash.panels import _normal, panels_of
from lamplighter.dash.series import MOST_POINTS, Floats, RunSeries, SeriesCache, thin
from lamplighter.dash.server_answers import points_of, rounded
from lamplighter.rundir import RunDir
from lamplighter.watch.curves import CurveSketch
from lamplighter.watch.environment import changes, gather, record
from lamplighter.watch.trackers.follower import Follower
from lamplighter.watch.trackers.writers import Setting
from tracked import expected, write_evaluation, write_killed_run
from tracked import record as step_record

WHOLE = (-math.inf, math.inf, MOST_POINTS)


def _write_steps(run: RunDir, count: int, spikes: dict[int, float]) -> RunSeries:
    run.create()
    run.events.touch()
    with open(run.metrics, "w") as file:
        for step in range(1, count + 1):
            loss = spikes.get(step, 3.0 / (1 + step / 1000))
            file.write(f'{{"step": {step}, "attempt": 1, "t": {1.7e9 + step!r}, "train/loss": {loss}, "train/dt_ms": 1000.0, "train/tokens": {step * 10}}}\n')  # fmt: skip
    series = RunSeries(run)
    series.update()
    return series


def test_thinning_keeps_every_extreme_and_both_ends() -> None:
    x, y = np.arange(100_000.0), np.random.default_rng(1).normal(size=100_000)
    y[77_777], y[12_345], y[500] = 99.0, -99.0, math.nan
    at, kept = thin(x, y, 4000)
    assert len(at) <= 4000 and (at[0], at[-1]) == (0.0, 99_999.0) and np.all(np.diff(at) > 0)
    assert kept[at == 77_777] == 99.0 and kept[at == 12_345] == -99.0
    assert list(at[:10]) == list(range(10)), "on a logarithmic axis the first decade is a large part of the picture"


def test_a_panel_gets_at_most_4000_points_and_a_zoom_gets_more_of_them(tmp_path: Path) -> None:
    series = _write_steps(RunDir(tmp_path / "r"), 30_000, {20_001: 50.0, 20_500: 0.001})
    whole = points_of(series, ["train/loss"], "step", 0.0, WHOLE)["curves"]["train/loss"]
    assert len(whole["x"]) <= MOST_POINTS and 50 in whole["y"] and 0.001 in whole["y"]
    near = points_of(series, ["train/loss"], "step", 0.0, (20_000, 22_000, MOST_POINTS))["curves"]["train/loss"]
    assert near["x"] == list(range(20_000, 22_001)) and 50 in near["y"]


def test_every_x_can_be_asked_for(tmp_path: Path) -> None:
    series = _write_steps(RunDir(tmp_path / "r"), 3601, {})
    assert series.x_of("tokens", 0)[-1] == 36_010
    assert math.isclose(series.x_of("time", 0)[-1], 1.0, rel_tol=1e-3)
    assert math.isclose(series.x_of("usd", 2.0)[-1], 2.0, rel_tol=1e-3)


def test_redone_steps_are_shown_once_with_their_last_values(tmp_path: Path) -> None:
    run = write_killed_run(tmp_path / "r")
    series = RunSeries(run)
    series.update()
    wanted = {step: value for (name, step), value in expected(run).items() if name == "train/loss"}
    assert list(series.steps) == sorted(wanted) and list(series.columns["train/loss"]) == [
        wanted[step] for step in sorted(wanted)
    ]
    assert series.update() == 0
    with open(run.metrics, "a") as file:
        file.write("\n" + json.dumps(step_record(401, 30)) + "\n")
    assert series.update() == 1 and series.steps[-1] == 401
    with open(run.metrics, "a") as file:
        file.write(json.dumps(step_record(120, 31)) + "\n")
    assert series.update() == 1 and series.steps[-1] == 120
    assert max(series.scores["eval/val_loss"]) == 100, "validations of what is done again are as if they had not been"


def test_lines_taken_together_are_as_lines_taken_one_by_one(tmp_path: Path) -> None:
    """Odd ones at random places: nulls, other names, steps that go back, torn and foreign lines."""
    odd = ['{"step": 7, "train/lo', "[1, 2]", '{"step": 1.5, "train/loss": 1.0}', '{"step": 9, "train/loss": NaN}', '{"step": 9, "train/loss": 1e999}',
           '{"step": 5, "attempt": 2, "t": 3, "train/loss": null, "train/lr": 1}', '{"step": 90, "eval/val_loss": 2.5}', "", '{"step": true, "train/loss": 1}',
           '{"step": 3, "attempt": "x", "t": "y", "train/loss": 1.25}', f'{{"step": 4, "train/loss": {"9" * 400}}}', '{"step": 1}', "{}", "nonsense"]  # fmt: skip
    choose = np.random.default_rng(3)
    for number in range(30):
        run = RunDir(tmp_path / str(number))
        run.create()
        lines = [json.dumps(step_record(step, 1)) for step in range(1, 200)]
        for _ in range(number % 6):
            lines.insert(int(choose.integers(len(lines))), odd[int(choose.integers(len(odd)))])
        run.metrics.write_text("\n".join(lines) + "\n")
        together, single = RunSeries(run), RunSeries(run)
        single._take_many = lambda lines, one=single: sum(map(one._take, lines))  # type: ignore[method-assign, misc]
        assert together.update() == single.update() and together.damaged == single.damaged
        assert together.scores == single.scores and together.columns.keys() == single.columns.keys()
        for name in ("steps", "times", "attempts"):
            np.testing.assert_array_equal(getattr(together, name), getattr(single, name))
        for name, column in together.columns.items():
            np.testing.assert_array_equal(column, single.columns[name])


def test_a_damaged_run_is_shown_as_such_and_harms_no_other(tmp_path: Path) -> None:
    good, bad = write_killed_run(tmp_path / "good", steps=40, kills=1), RunDir(tmp_path / "bad")
    bad.create()
    bad.events.write_text('[[[\n{"type": 3}\n' + "x" * 5000 + "\n")
    bad.status.write_text('{"state": ["x"], "step": "many", "flags": {"a": 1}}')
    bad.metrics.write_text(
        '{"step": 1e400}\n{"step": 1, "train/loss": "x"}\n{"step": 2, "train/loss": 1.5}\n' + "[" * 5000 + "\n"
    )
    (bad.path / "plan.json").write_text('{"params": "x", "mfu": [1]}')
    bad.config.write_text("train: [1")
    (bad.checkpoint(5) / "training").mkdir(parents=True)
    where = RunsDir(0, tmp_path)
    rows = {row["name"]: row for row in facts.rows([where])}
    assert rows["bad"]["state"] == "damaged" and rows["good"]["state"] == "finished"
    series = RunSeries(bad)
    series.update()
    told = facts.describe(where, bad, series)
    assert series.damaged == 3 and told["config_problem"] and not told["checkpoints"][0]["valid"]
    assert panels_of(series, told)[0]["id"] == "loss"
    assert told["events_problem"] == "no line of events.jsonl is an event"
    assert not facts.describe(where, good, RunSeries(good))["events_problem"]
    assert "bad" in report_page.build(bad) and "good" in report_page.build(good)


def test_the_loss_panel_names_the_vocabulary_that_the_model_has(tmp_path: Path) -> None:
    """tokenizer.vocab_size is what was asked for: bytes have 257 tokens, and a small text gives fewer pieces."""
    run, where = write_killed_run(tmp_path / "r", steps=20, kills=0), RunsDir(0, tmp_path)
    series = RunSeries(run)
    series.update()

    def normal() -> str:
        return str(panels_of(series, facts.describe(where, run, series))[0]["normal"])

    assert "ln(vocabulary)" not in normal(), "nothing says it"
    run.checkpoint(20).mkdir(parents=True)
    (run.checkpoint(20) / "config.json").write_text('{"vocab_size": 257}')
    assert "ln(vocabulary) = 5.55 " in normal()
    (run.path / "plan.json").write_text('{"vocab_size": 1000}')
    assert "ln(vocabulary) = 6.91 " in normal()


def test_how_far_a_tracker_is_stands_in_its_own_file(tmp_path: Path) -> None:
    """status.json is as the run's parent left it; `lamp track` has sent the rest since."""
    run = write_killed_run(tmp_path / "r", steps=20, kills=0)
    status = json.loads(run.status.read_text())
    left = [{"to": name, "step": 3, "lag": 17, "problem": "", "url": ""} for name in ("csv", "wandb")]
    run.status.write_text(json.dumps({**status, "track": left}))
    for done in Follower(run, "csv", Setting("r", run.path / "track" / "csv"), print).follow(until_end=False):
        assert done
    told = {one["to"]: one["lag"] for one in facts.row(RunsDir(0, tmp_path), run)["track"]}
    assert told == {"csv": 0, "wandb": 17}


def test_nothing_outside_of_the_runs_dir_is_reached(tmp_path: Path) -> None:
    inside, outside = (
        write_killed_run(tmp_path / "runs" / "r", steps=20, kills=1),
        write_killed_run(tmp_path / "else", steps=20, kills=1),
    )
    (tmp_path / "runs" / "link").symlink_to(outside.path)
    (tmp_path / "secret.txt").write_text("secret")
    (inside.stacks / "leads-out.txt").symlink_to(tmp_path / "secret.txt")
    (inside.stacks / "fine.txt").write_text("a stack \x1b[31m token=abc")
    dirs = [RunsDir(0, tmp_path / "runs")]
    assert facts.find(dirs, "0/r") is not None
    for key in (
        "0/..",
        "0/../else",
        "0/.",
        "0/",
        "1/r",
        "r",
        "0/link",
        "0/r/../../else",
        "0/r\0",
        "/etc",
        "0//etc",
        "0/" + "a" * 5000,
    ):
        assert facts.find(dirs, key) is None, key
    assert [row["name"] for row in facts.rows(dirs)] == ["r"]
    assert facts.read_inside(inside, "stacks", "leads-out.txt") is None
    for name in ("../status.json", "..", "", "nothing", "/etc/passwd"):
        assert facts.read_inside(inside, "stacks", name) is None
    assert "\x1b" not in (facts.read_inside(inside, "stacks", "fine.txt") or "\x1b")


def test_the_memory_of_the_server_is_bounded(tmp_path: Path) -> None:
    cache = SeriesCache(most_values=40_000)
    for number in range(12):
        series = _write_steps(RunDir(tmp_path / str(number)), 2000, {})
        cache.of(series.run)
        assert sum(one.values for one in cache.kept.values()) <= 40_000
    assert len(cache.kept) == 3


def test_numbers_are_as_short_as_a_picture_needs() -> None:
    found = rounded(np.array([1.23456789, math.nan, 1e-7 / 3, 5.0, math.inf, 0.0, -123456.789]), 6)
    assert found == [1.23457, None, 3.33333e-08, 5, None, 0, -123457]


def test_report_html_is_one_file_that_asks_for_nothing(tmp_path: Path) -> None:
    run = write_killed_run(tmp_path / "</title><script>alert(1)", steps=60, kills=2)
    html = report_page.build(run)
    assert "<script>alert(1)" not in html and html.count("<script") == 2
    assert "default-src 'none'" in html and not re.search(r'(src|href)="(?!data:|#)', html)
    assert not re.search(r"^(import|export) ", html, re.MULTILINE)


def test_report_html_of_100000_steps_is_small(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    run.create()
    run.events.touch()
    with open(run.metrics, "w") as file:
        line = json.dumps({**step_record(7, 1), "step": 10**9, "train/loss": 0.1234567})
        for step in range(1, 100_001):
            file.write(line.replace("1000000000", str(step), 1).replace("0.1234567", str(step % 97 + 0.5), 1) + "\n")
    series = RunSeries(run)
    assert series.update() == 100_000
    assert len(report_page.build(run).encode()) < 2_000_000


def test_the_picture_of_the_curves_is_bounded_and_valid(tmp_path: Path) -> None:
    import xml.etree.ElementTree as ElementTree

    run = write_killed_run(tmp_path / "<r>&")
    sketch = CurveSketch(run)
    sketch.write_all(floor=0.5)
    text = (run.path / "curves.svg").read_text()
    ElementTree.fromstring(text)
    assert "entropy bound" in text and len(sketch.buckets["train/loss"]) <= 400 and sketch.last == 400
    empty = CurveSketch(RunDir(tmp_path))
    assert "no numbers yet" in empty.draw()
    series = _write_steps(RunDir(tmp_path / "long"), 5000, {})
    long = CurveSketch(series.run)
    long.write_all()
    assert len(long.buckets["train/loss"]) <= 400 and len((series.run.path / "curves.svg").read_text()) < 60_000


# How the three kinds of colour-blindness see (Machado and others, 2009), of linear RGB; and sRGB to XYZ.
EYES = {
    "usual": np.eye(3),
    "no green": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    "no red": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "no blue": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
}  # fmt: skip
XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)


def test_the_colours_of_the_curves_are_told_apart_by_the_colour_blind() -> None:
    """By CIE's distance of 1976, of which 2.3 can just be seen; and every one stands out from its ground (3:1, as WCAG wants)."""
    text = (report_page.PAGE / "format.js").read_text()
    palettes = [re.findall(r"#[0-9a-f]{6}", line) for line in re.findall(r"^    [?:] \[(.*)\]", text, re.MULTILINE)]
    for ground, palette in zip(("#1c1f25", "#ffffff"), palettes, strict=True):
        light = _linear([*palette, ground])
        bright = light @ XYZ[1]
        ratios = (np.maximum(bright[:-1], bright[-1]) + 0.05) / (np.minimum(bright[:-1], bright[-1]) + 0.05)
        assert ratios.min() >= 3.0
        for kind, seen in EYES.items():
            lab = _lab(np.clip(light[:-1] @ seen.T, 0, 1))
            apart = np.linalg.norm(lab[:, None] - lab[None], axis=-1)[np.triu_indices(len(palette), 1)]
            assert len(palette) == 8 and apart.min() > 18, (ground, kind, apart.min())


def _linear(colours: list[str]) -> Floats:
    found = np.array([[int(one[i : i + 2], 16) / 255 for i in (1, 3, 5)] for one in colours])
    return np.where(found <= 0.04045, found / 12.92, ((found + 0.055) / 1.055) ** 2.4)


def _lab(light: Floats) -> Floats:
    x, y, z = (light @ XYZ.T / np.array([0.95047, 1.0, 1.08883])).T
    x, y, z = (np.where(one > 0.008856, np.cbrt(one), 7.787 * one + 16 / 116) for one in (x, y, z))
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=-1)


# ---------------------------------------------------------------- comparison


def _summary(name: str, val: float, **more: object) -> Summary:
    given: dict[str, object] = {"train_loss": val - 0.1, "train_error": 0.01, "val_loss": val, "val_error": 0.01, "best_val": val, "best_step": 90,
                                "tokenizer": "t", "wall_s": 60.0, "tokens": 1e6, "parameters": 1e6}  # fmt: skip
    return Summary(name, **{**given, **more})  # type: ignore[arg-type]


def _says(*found: Summary, same: bool = True) -> dict[str, str]:
    return {one["name"]: one["text"] for one in conclusions(found, same)}


def test_within_the_noise_two_runs_are_not_distinguishable() -> None:
    near, far = (_summary("a", 2.00), _summary("b", 2.01, wall_s=30.0)), (_summary("a", 2.0), _summary("b", 2.2))
    assert (
        "not distinguishable" in _says(*near)["Recommendation"] and "cheaper one, b" in _says(*near)["Recommendation"]
    )
    assert next(row for row in table(near, True) if row["name"] == "validation loss")["best"] == []
    assert _says(*far)["Recommendation"].startswith("a, checkpoint-90")
    assert next(row for row in table(far, True) if row["name"] == "validation loss")["best"] == [0]


def test_equal_runs_have_no_winner_and_a_tiny_difference_of_unknown_noise_neither() -> None:
    unknown = {"val_error": math.nan, "train_error": math.nan}
    for other in (2.3066, 2.3067):
        told = _says(_summary("a", 2.3066, **unknown), _summary("copy", other, **unknown))["Recommendation"]
        assert "not distinguishable" in told and "neither is recommended" in told, told
    assert "neither" in _says(_summary("a", 2.3066), _summary("copy", 2.3066))["Recommendation"]
    apart = _says(_summary("a", 2.0, **unknown), _summary("b", 2.5, **unknown))["Recommendation"]
    assert apart.startswith("a, checkpoint-90") and "noise is not known" in apart


def test_all_that_are_best_are_marked_also_where_one_lacks_a_validation() -> None:
    lacking = {"val_loss": math.nan, "best_val": math.nan, "val_error": math.nan}
    rows = {row["name"]: row for row in table((_summary("a", 2.0), _summary("b", 2.0), _summary("c", 3.0), _summary("d", 2.0, **lacking)), True)}  # fmt: skip
    assert rows["validation loss"]["best"] == [0, 1] and rows["validation loss"]["difference"] == "2.0000 to 3.0000"
    assert rows["parameters"]["difference"] == "the same" and rows["time"]["best"] == []
    two = {row["name"]: row for row in table((_summary("a", 2.0), _summary("d", 2.0, **lacking)), True)}
    assert two["validation loss"]["best"] == [] and two["validation loss"]["difference"] == ""


def test_which_one_learns_faster_is_said_only_beyond_the_noise() -> None:
    tokens, wobble = np.arange(1.0, 1001.0), np.random.default_rng(0).normal(0, 0.01, 2000)
    slow, again = (1 + 4 * np.exp(-tokens / 300) + wobble[at : at + 1000] for at in (0, 1000))
    fast = 1 + 4 * np.exp(-tokens / 100) + wobble[1000:]
    alike = _says(_summary("a", 2.0, curve=(tokens, slow)), _summary("b", 2.0, curve=(tokens, again)))["Convergence"]
    assert "not distinguishable" in alike and "fewer" not in alike
    told = _says(_summary("a", 2.0, curve=(tokens, slow)), _summary("b", 2.0, curve=(tokens, fast)))["Convergence"]
    assert "b needs" in told and 2.0 < float(told.split("b needs ")[1].split()[0]) < 4.0, told
    assert "tokens than a" in told


def test_overfitting_is_told_from_a_model_that_is_too_large() -> None:
    heart = _says(_summary("a", 2.0), _summary("b", 2.5, rose=0.2, parameters=3e6))["Generalisation"]
    assert "by heart" in heart and "can fill" not in heart
    large = _says(_summary("small", 2.0), _summary("big", 2.005, parameters=5e6))["Generalisation"]
    assert "5.0 times the parameters" in large and "0.2 per parameter" in large and "by heart" not in large


def test_a_difference_that_is_not_shown_has_no_direction() -> None:
    text = _says(_summary("a", 2.0, train_loss=2.0003), _summary("b", 2.2, train_loss=2.1))["Generalisation"]
    assert "a: validation is as training." in text and "b: validation is 0.100 above training." in text


def test_losses_of_different_tokenizers_are_never_compared() -> None:
    rows = {row["name"]: row for row in table((_summary("a", 2.0, bpb=0.9), _summary("b", 1.0, bpb=1.2)), False)}
    assert "not comparable" in rows["validation loss"]["difference"] and rows["validation loss"]["best"] == []
    assert rows["bits per byte"]["best"] == [0]
    assert _says(_summary("a", 2.0, bpb=0.9), _summary("b", 1.0, bpb=1.2), same=False)["Recommendation"].startswith(
        "a: bits per byte"
    )


def test_two_folders_are_compared_as_they_are(tmp_path: Path) -> None:
    first, second = write_killed_run(tmp_path / "a"), write_killed_run(tmp_path / "b", steps=200, kills=3)
    write_evaluation(first, 50)
    cache = SeriesCache()
    told = compare([(first, cache), (second, cache)])
    assert told["names"] == ["a", "b"] and {row["name"] for row in told["rows"]} >= {
        "train loss",
        "perplexity",
        "MFU",
        "steps",
    }
    assert all(one["text"] for one in told["says"])
    same_name = write_killed_run(tmp_path / "other" / "a", steps=200, kills=3)
    names = compare([(first, cache), (same_name, cache)])["names"]
    assert names == [f"a ({tmp_path})", f"a ({tmp_path / 'other'})"], "which of them is in which folder"


def test_a_damaged_run_is_compared_with_a_word_on_what_is_damaged(tmp_path: Path) -> None:
    good, bad = (
        write_killed_run(tmp_path / "good", steps=40, kills=1),
        write_killed_run(tmp_path / "bad", steps=40, kills=1),
    )
    cache = SeriesCache()
    whole = compare([(good, cache), (bad, cache)])
    assert "Damage" not in [one["name"] for one in whole["says"]] and not whole["unread_settings"]
    bad.status.write_text('{"state": "fini')
    bad.config.write_text("train: [1")
    bad.metrics.write_text("garbage\n\x00\n" + bad.metrics.read_text())
    (bad.checkpoint(5) / "training").mkdir(parents=True)
    cache = SeriesCache()
    told = compare([(good, cache), (bad, cache)])
    assert told["unread_settings"] == ["bad"] and told["states"][1]["state"] == "damaged"
    damage = told["says"][0]
    assert damage["name"] == "Damage" and damage["text"].startswith("bad: ") and "good" not in damage["text"]
    for word in ("status.json", "config.yaml cannot be read", "2 lines of metrics.jsonl", "checkpoint-5"):
        assert word in damage["text"], damage["text"]


def test_a_run_without_losses_keeps_nobody_from_comparing_the_others(tmp_path: Path) -> None:
    """A watched command that tells none, and a folder of which nothing is left; what is not known of them is no zero."""
    tokens = {"name": "a", "vocab_size": 300}
    runs = [write_killed_run(tmp_path / name, steps=60, kills=1) for name in ("a", "b")]
    for run in runs:
        (run.checkpoint(10)).mkdir(parents=True)
        (run.checkpoint(10) / "tokenizer.json").write_text(json.dumps(tokens))
    watched, empty = RunDir(tmp_path / "watched"), RunDir(tmp_path / "empty")
    for other in (watched, empty):
        other.create()
        other.events.touch()
    watched.metrics.write_text('{"step": 1, "attempt": 1, "t": 1.7e9, "train/iter": 1, "train/dt_ms": 9.0}\n')
    cache = SeriesCache()
    told = compare([(run, cache) for run in (watched, *runs, empty)])
    rows = {row["name"]: row for row in told["rows"]}
    assert told["same_tokenizer"] and "not comparable" not in json.dumps(told)
    assert rows["loss spikes"]["words"] == ["-", "0", "0", "-"]
    assert rows["steps"]["words"] == ["1", "60", "60", "-"]
    assert "watched: no losses are known; a: 0 loss spikes" in {one["name"]: one["text"] for one in told["says"]}["Stability"]  # fmt: skip


def test_losses_of_commands_whose_tokenizers_nobody_knows_are_compared_under_that_condition(tmp_path: Path) -> None:
    runs = [write_killed_run(tmp_path / name, steps=60, kills=1) for name in ("a", "b")]  # without settings
    cache = SeriesCache()
    says = {one["name"]: one["text"] for one in compare([(run, cache) for run in runs])["says"]}
    assert "only if they have the same one" in says["Tokenizers"]


def test_the_shorter_run_is_not_the_better_one_by_its_time() -> None:
    alike, not_alike = ({"step": 90.0}, {"step": 90.0}), ({"step": 90.0}, {"step": 40.0})
    for (first, second), best in ((alike, [1]), (not_alike, [])):
        rows = table((_summary("a", 2.0, **first), _summary("b", 2.0, wall_s=20.0, **second)), True)
        assert next(row for row in rows if row["name"] == "time")["best"] == best


def test_the_rate_panel_says_what_this_schedule_does() -> None:
    told = {"config": {"train": {"lr": 3e-4, "warmup_steps": 10, "decay_ratio": 0.4}}, "steps": 100.0}
    for schedule, words in (
        ("cosine", "falls along a cosine to step 100"),
        ("constant", "stays to step 100"),
        ("wsd", "stays to step 60, and falls in a straight line to step 100"),
    ):
        told["config"]["train"]["schedule"] = schedule  # type: ignore[index]
        assert words in _normal("lr", told, np.empty(0))


# ---------------------------------------------------------------- surroundings


def test_the_environment_of_each_attempt_is_kept_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_geheim")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    run = RunDir(tmp_path / "r")
    run.create()
    monkeypatch.setattr(
        "lamplighter.watch.environment._git", lambda _: {"commit": "a" * 40, "dirty": False, "diff": ""}
    )
    assert record(run, 1, tmp_path) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert record(run, 2, tmp_path) == ["CUDA_VISIBLE_DEVICES 0 -> 1"]
    text = (run.path / "environment.json").read_text()
    assert "geheim" not in text and (run.path / "environment.json").stat().st_mode & 0o777 == 0o600
    entries = json.loads(text)["attempts"]
    assert [one["attempt"] for one in entries] == [1, 2] and entries[0]["packages"]["numpy"] and entries[0]["python"]
    now = {**gather(tmp_path), "packages": {"torch": "2"}}
    assert changes({**now, "packages": {"torch": "1"}}, now) == ["torch 1 -> 2"]
    (run.path / "environment.json").write_text('{"attempts": [3, {"packages": 7}]}')
    assert any("numpy" in one for one in record(run, 3, tmp_path))


def test_a_watched_command_has_the_surroundings_of_its_own_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamplighter.watch.environment._git", lambda _: {})
    place = tmp_path / "venv"
    (place / "bin").mkdir(parents=True)
    (place / "bin" / "python3").symlink_to(sys.executable)
    (place / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.9.2\n")
    (place / "lib" / "python3.9" / "site-packages" / "torch-1.2.3.dist-info").mkdir(parents=True)
    (place / "bin" / "launch").write_text(f"#!{place / 'bin' / 'python3'}\nimport x\n")
    (place / "bin" / "launch").chmod(0o755)
    for words in ([str(place / "bin" / "python3"), "x.py"], [str(place / "bin" / "launch")]):
        told = gather(tmp_path, words)
        assert (told["python"], told["packages"]) == ("3.9.2", {"torch": "1.2.3"}), words
    ours = gather(tmp_path, [sys.executable, "x.py"])
    assert ours["python"] == platform.python_version() and ours["packages"]["numpy"]
    assert gather(tmp_path, ["sleep", "1"])["packages"] == {}, "no Python, and nothing of ours in its place"


def test_models_that_are_no_runs_are_listed_with_their_scores(tmp_path: Path) -> None:
    for name in ("smol", "empty"):
        (tmp_path / ".evaluations" / name).mkdir(parents=True)
    write_evaluation(RunDir(tmp_path / ".evaluations" / "smol"), 1)
    [found] = facts.evaluated_models([RunsDir(0, tmp_path)])
    assert found["name"] == "smol" and found["evaluations"][0]["value"] == 0.31
    assert facts.evaluated_models([RunsDir(0, tmp_path / "none")]) == []


def test_evaluations_are_compared_by_their_errors_and_only_on_the_same_items(tmp_path: Path) -> None:
    def keep(run: str, name: str, value: float, stderr: float, sha: str = "a", step: int = 5) -> None:
        folder = tmp_path / run / "evaluations"
        folder.mkdir(parents=True, exist_ok=True)
        score = {
            "name": name,
            "value": value,
            "stderr": stderr,
            "n": 9,
            "chance": 0.25,
            "higher_is_better": name != "loss",
            "verdict": "above chance",
        }
        record = {
            "format": 1,
            "task": "t",
            "step": step,
            "t": 1.0,
            "scores": [score],
            "data": {"sha256": sha, "items": 9},
        }
        (folder / f"t-{name}-{step}.json").write_text(json.dumps(record))

    for run, value in (("one", 0.5), ("two", 0.6)):
        keep(run, "acc", 0.9, 0.0, step=1)  # an older one
        keep(run, "acc", value, 0.01)
        keep(run, "loss", value, 0.01)
        keep(run, "rouge", value, 0.2)
        keep(run, "other", value, 0.01, sha=run)
    runs = [RunDir(tmp_path / name) for name in ("one", "two")]
    rows = {row["name"]: row for row in evaluation_rows(runs, same=True)}
    assert rows["t acc"]["words"] == ["0.5000 ± 0.0100 (n 9)", "0.6000 ± 0.0100 (n 9)"]
    assert (rows["t acc"]["best"], rows["t loss"]["best"], rows["t rouge"]["best"]) == ([1], [0], [])
    assert rows["t rouge"]["difference"] == "+0.1000 (not distinguishable)"
    assert rows["t other"]["difference"] == "not comparable: other data"
    apart = {row["name"]: row for row in evaluation_rows(runs, same=False)}
    assert apart["t loss"]["difference"] == "not comparable: other tokenizers" and apart["t acc"]["best"] == [1]


def test_the_fullest_result_is_compared_and_not_a_few_items_that_were_tried_later(tmp_path: Path) -> None:
    folder = tmp_path / "evaluations"
    folder.mkdir()
    kept = (("human-vs-b", 0.75, 40, 1.0), ("human-vs-b", 1.0, 2, 2.0), ("t", 0.34, 1500, 1.0), ("t", 0.35, 1500, 2.0), ("t", 1.0, 3, 3.0))  # fmt: skip
    for at, (task, value, n, t) in enumerate(kept):
        score = {"name": "acc", "value": value, "stderr": 0.01, "n": n, "chance": 0.25, "higher_is_better": True}
        more = {"interval": [0.6, 0.86]} if task != "t" else {}
        record = {"format": 1, "task": task, "step": at, "t": t, "scores": [score], "data": {"sha256": "a", "items": n}}
        (folder / f"{task}-{at}.json").write_text(json.dumps({**record, **more}))
    rows = {row["name"]: row["words"] for row in evaluation_rows([RunDir(tmp_path)], same=True)}
    assert rows == {"human-vs-b acc": ["0.750 (0.600 to 0.860, n 40)"], "t acc": ["0.3500 ± 0.0100 (n 1,500)"]}


def test_a_run_on_pairs_has_panels_of_its_rewards(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    run.create()
    run.events.touch()
    lines = [
        {"step": n, "attempt": 1, "t": 1.7e9 + n, "train/loss": 0.69 - n / 100, "train/reward_margin": n / 10,
         "train/reward_chosen": n / 20, "train/reward_rejected": -n / 20, "train/reward_accuracy": n / 20,
         "train/logp_chosen": -30.0, "train/logp_rejected": -30.0 - n}
        for n in range(20)
    ]  # fmt: skip
    run.metrics.write_text("".join(json.dumps(one) + "\n" for one in lines))
    series = RunSeries(run)
    series.update()
    panels = {one["id"]: one for one in panels_of(series, {"config": {"train": {"objective": "dpo"}}})}
    assert {"margin", "rewards", "preferred", "logps"} <= panels.keys()
    assert "ln 2 = 0.693" in panels["loss"]["normal"] and panels["margin"]["curves"] == ["train/reward_margin"]
    assert panels["margin"]["seen"].startswith("From 0 to 1.9") and all(panels[one]["normal"] for one in panels)
    assert panels["preferred"]["seen"].startswith("From 0 to 95 "), "in percent"
    plain = panels_of(_write_steps(RunDir(tmp_path / "s"), 5, {}), {})
    assert not {"margin", "rewards", "preferred", "logps"} & {one["id"] for one in plain}
