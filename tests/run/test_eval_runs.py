"""lamp eval: equal to lm-eval item by item, resumed after a kill, never a score without data, results as files."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import eval_data
from lamplighter.commands.eval_of_run import Evaluations
from lamplighter.config.schema import Eval
from lamplighter.evaluate import tasks
from lamplighter.evaluate.items import Task
from lamplighter.procs import lock
from lamplighter.rundir import RunDir, read_lines
from running import LONG, TINY, Command, Finished, copy_run, lamp, real, shared, start_lamp, wait_for
from serving import ask, serving

WORDS = [*TINY, "--train.steps", "3", "--data.seq_len", "512", "--model.family", "llama", "--save.every_steps", "2"]
NEAR = 1e-3


@pytest.fixture
def run(finished: Finished) -> RunDir:
    return finished(*WORDS)


def results(run: RunDir, task: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((run.path / "evaluations").glob(f"{task}-*.json"))]


def items_of(folder: Path, task: str) -> dict[int, dict[str, Any]]:
    [path] = (folder / "evaluations" / "items").glob(f"{task}-*.jsonl")
    return {line["item"]: line for line in read_lines(path) if "item" in line}


@functools.lru_cache(1)
def lm_eval_model(folder: Path) -> Any:
    """Of lm-eval's hf backend: it takes longer to open than to ask."""
    pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder), dtype="float32", batch_size=8, device="cpu")


def by_lm_eval(folder: Path, task: Task) -> Iterator[list[tuple[float, bool]]]:
    """What lm-eval's hf backend says of the same items."""
    model = lm_eval_model(folder)
    from lm_eval.api.instance import Instance

    asked = [Instance("loglikelihood", {}, (item.context, one), 0) for item in task.items for one in item.answers]
    found = iter(model.loglikelihood(asked, disable_tqdm=True))
    for item in task.items:
        yield [next(found) for _ in item.answers]


def compare(folder: Path, place: Path, task: Task) -> int:
    """Every likelihood within 1e-3, every choice the same but where the top two are that close; how many those are."""
    ours, close = items_of(place, task.name), 0
    for number, theirs in enumerate(by_lm_eval(folder, task)):
        nats = ours[number]["nats"]
        assert nats == pytest.approx([nat for nat, _ in theirs], abs=NEAR), (task.name, number)
        best, second = sorted((nat for nat, _ in theirs), reverse=True)[:2] if len(theirs) > 1 else (0.0, -1.0)
        close += best - second < NEAR
        if best - second >= NEAR:
            assert nats.index(max(nats)) == max(range(len(theirs)), key=lambda n: theirs[n][0])
            assert ours[number]["greedy"] == [greedy for _, greedy in theirs]
    assert len(ours) == len(task.items)
    return close


def test_every_task_is_equal_to_lm_eval_item_by_item(run: RunDir, here: Command, tmp_path: Path) -> None:
    data = eval_data.make(tmp_path / "data")
    names = ["hellaswag", "lambada", "mmlu", "arc_easy", "piqa", "boxes"]
    done = here("eval", "r", "--data", str(data), "--tasks", ",".join(names), "--num-fewshot", "2", "--json", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    folder = run.checkpoint(3)
    for name in names:
        compare(folder, run.path, tasks.open_task(name, data, tasks.Shots(2)))
    records = json.loads(done.stdout)
    assert [record["task"] for record in records] == names
    for record in records:
        assert record == results(run, record["task"])[0]
        assert record["format"] == 1 and record["step"] == 3 and record["data"]["sha256"] and record["prompt"]
    scores = {one["name"]: one for one in records[2]["scores"]}
    assert scores["acc"]["n"] == 8 and scores["acc"]["chance"] == 0.25
    assert {"acc/fog_studies", "acc/geese"} < scores.keys()
    assert {one["name"] for one in records[1]["scores"]} == {"acc", "perplexity"}
    assert [one["chance"] for one in records[3]["scores"]] == [pytest.approx((4 / 2 + 4 / 3) / 8)] * 2


def test_the_loss_on_a_text_is_lm_evals_rolling_one(run: RunDir, here: Command, tmp_path: Path) -> None:
    data = eval_data.make(tmp_path / "data")
    done = here("eval", "r", "--data", str(data), "--tasks", "notes", "--window", "512", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    model = lm_eval_model(run.checkpoint(3))
    from lm_eval.api.instance import Instance

    text = (data / "notes" / "test.txt").read_text()
    [theirs] = model.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)], disable_tqdm=True)
    rows = items_of(run.path, "notes").values()
    assert sum(row["nats"][0] for row in rows) == pytest.approx(theirs, abs=NEAR * len(rows))
    loss, perplexity, bits = json.loads(done.stdout)[0]["scores"]
    assert bits["value"] == pytest.approx(-theirs / 0.6931471805599453 / len(text.encode()), rel=1e-6)
    assert loss["n"] == len(rows) > 1 and perplexity["stderr"] > 0


def test_the_shared_halves_are_equal_to_lm_eval_on_a_real_model(here: Command, tmp_path: Path) -> None:
    folder, data = real("models", "stories260K_hf_llama"), real("eval")
    done = here("eval", str(folder), "--data", str(data), "--tasks", "hellaswag,lambada", "--limit", "30", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("hellaswag", "lambada"):
        task = tasks.limited(tasks.open_task(name, data, tasks.Shots()), 30)
        compare(folder, tmp_path / "runs" / ".evaluations" / folder.name, task)


@LONG
@pytest.mark.parametrize(("name", "items"), [("hellaswag", 1500), ("lambada", 2577), ("mmlu", 1847)])
def test_every_item_of_the_shared_halves_is_equal_to_lm_eval(name: str, items: int, here: Command, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:  # fmt: skip
    """On a small real model; MMLU with five solved examples."""
    folder, data = real("models", "stories260K_hf_llama"), real("eval")
    done = here("eval", str(folder), "--data", str(data), "--tasks", name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    task = tasks.open_task(name, data, tasks.Shots())
    near_ties = compare(folder, tmp_path / "runs" / ".evaluations" / folder.name, task)
    record_property("near ties", near_ties)
    assert len(task.items) == items and near_ties < 0.01 * items


def test_a_tokenizer_of_gpt2_puts_nothing_before_a_text_as_in_lm_eval(here: Command, tmp_path: Path) -> None:
    """Its first and its last token are one and the same: where lm-eval has none, there is none, and a text by itself begins after it."""
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    folder, data = tmp_path / "gpt2", eval_data.make(tmp_path / "data")
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=256)).save_pretrained(folder)
    end = "<|endoftext|>"
    PreTrainedTokenizerFast(tokenizer_file=str(shared("tokenizers", "gpt2", "tokenizer.json")), bos_token=end, eos_token=end, unk_token=end).save_pretrained(folder)  # fmt: skip
    done = here("eval", str(folder), "--data", str(data), "--tasks", "hellaswag,lambada,notes", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    place = tmp_path / "runs" / ".evaluations" / "gpt2"
    for name in ("hellaswag", "lambada"):
        compare(folder, place, tasks.open_task(name, data, tasks.Shots()))
    from lm_eval.api.instance import Instance

    text = (data / "notes" / "test.txt").read_text()
    [theirs] = lm_eval_model(folder).loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)], disable_tqdm=True)  # fmt: skip
    rows = items_of(place, "notes").values()
    assert sum(row["nats"][0] for row in rows) == pytest.approx(theirs, abs=NEAR * len(rows))


def test_generation_pairs_period_and_the_runs_own_text(run: RunDir, here: Command, tmp_path: Path) -> None:
    data = eval_data.make(tmp_path / "data")
    done = here("eval", "r", "--data", str(data), "--tasks", "held-back,copying,rouge,period", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    held, copying, rouge, period = json.loads(done.stdout)
    assert held["contamination"]["n"] == 13
    names = {one["name"] for one in copying["scores"]}
    assert {"rouge1", "rougeL", "exact_match", "repetition", "distinct_2"} <= names
    assert len(copying["examples"]) == 4
    assert {one["name"]: one["value"] for one in rouge["scores"]}["rouge1"] == pytest.approx((2 / 3 + 8 / 12) / 2)
    named = {one["name"] for one in period["scores"]}
    assert {"texts_with_anachronisms", "facts"} <= named
    assert ("dates_that_fit" in named) != ("names a year, so there is no score" in done.stderr)
    assert "not above chance" in here("eval", "r", "--tasks", "period", cwd=tmp_path).stdout


def test_an_evaluation_that_was_killed_goes_on_where_it_was(run: RunDir, here: Command, tmp_path: Path) -> None:
    data = tmp_path / "data"
    rows = [{"goal": f"Light the lamp number {n}" * 6, "sol1": "with a match", "sol2": "never", "label": 0} for n in range(1500)]  # fmt: skip
    (data / "piqa").mkdir(parents=True)
    (data / "piqa" / "valid.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("eval", "r", "--data", str(data), "--tasks", "piqa", "--threads", "1")
    process = start_lamp(*words, cwd=tmp_path)

    def done() -> list[Path]:
        return [path for path in (run.path / "evaluations").glob("items/*") if path.read_bytes().count(b"\n") > 40]

    [log] = wait_for(done, process=process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not results(run, "piqa")  # no file until it is whole
    before = log.read_bytes().rpartition(b"\n")[0]
    again = here(*words, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "items were done before, they are kept" in again.stderr
    assert log.read_bytes().startswith(before)
    numbers = [line["item"] for line in read_lines(log) if "item" in line]
    assert sorted(numbers) == list(range(1500))  # none lost, none twice
    [record] = results(run, "piqa")
    assert record["scores"][0]["n"] == 1500


def test_damaged_lines_of_items_are_computed_anew(run: RunDir, here: Command, tmp_path: Path) -> None:
    data = eval_data.make(tmp_path / "data")
    words = ("eval", "r", "--data", str(data), "--tasks", "piqa", "--json")
    before = json.loads(here(*words, cwd=tmp_path).stdout)
    [log] = (run.path / "evaluations" / "items").glob("piqa-*.jsonl")
    lines = log.read_text().splitlines()
    damaged = ['{"item": 0}', '{"item": 1, "nats": [NaN, 0], "greedy": [true, true]}', '{"item": 2, "nats": [1], "greedy": [true]}', '{"item": -1, "nats": [0, 0], "greedy": [true, true]}', '{"item": 9000000, "nats": [0, 0], "greedy": [true, true]}']  # fmt: skip
    log.write_text("\n".join([*lines, *damaged]) + "\n")
    done = here(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{len(lines) - 1 - 3} items were done before" in done.stderr
    assert json.loads(done.stdout)[0]["scores"] == before[0]["scores"]


def test_no_score_without_data(run: RunDir, here: Command, tmp_path: Path) -> None:
    data = eval_data.make(tmp_path / "data")
    for words, code, said in (
        (["--tasks", "hellaswag"], 2, "needs data"),
        (["--tasks", "hellaswag", "--data", "nowhere"], 66, "there is no folder"),
        (["--tasks", "winogrande", "--data", str(data)], 66, "there is no task winogrande"),
        (["--checkpoint", "17"], 74, "there is no checkpoint"),
        (["--suite", "huge"], 2, "quick, comprehensive"),
        (["--limit", "0"], 2, "--limit must be 1 or more"),
        (["--window", "-5"], 2, "--window must be 2 or more"),
        (["--num-fewshot", "-1"], 2, "--num-fewshot must be 0 or more"),
        (["r", "--human", "--checkpoint", "all"], 2, "--checkpoint all cannot be used here"),
        (["r", "--human", "--tasks", "piqa"], 2, "--tasks cannot be used here"),
        (["--page"], 2, "--page cannot be used here"),
    ):
        done = here("eval", "r", *words, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        assert said in done.stderr
    (data / "hellaswag" / "val.jsonl").write_text("{torn")
    done = here("eval", "r", "--data", str(data), "--tasks", "hellaswag", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (65, "")
    assert not (run.path / "evaluations").exists()


def test_all_checkpoints_and_a_suite(run: RunDir, here: Command, tmp_path: Path) -> None:
    data = eval_data.make(tmp_path / "data")
    done = here("eval", "r", "--checkpoint", "all", "--tasks", "piqa", "--data", str(data), "--json", cwd=tmp_path)
    assert [record["step"] for record in json.loads(done.stdout)] == [2, 3]
    done = here("eval", "r", "--suite", "quick", "--data", str(data), "--json", cwd=tmp_path)
    assert [record["task"] for record in json.loads(done.stdout)] == ["held-back", "hellaswag", "lambada", "arc_easy", "piqa"]  # fmt: skip
    assert "items: hellaswag 8" in done.stderr


def test_a_task_that_cannot_be_scored_leaves_the_others_and_time_is_said_first(run: RunDir, here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    data = eval_data.make(tmp_path / "data")
    row = {"goal": "say", "sol1": "fog " * 700, "sol2": "no", "label": 0}
    (data / "piqa" / "valid.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setattr("lamplighter.commands.eval._MUCH", 100)
    done = here("eval", "r", "--data", str(data), "--tasks", "piqa,arc_easy", "--json", cwd=tmp_path)
    assert done.returncode == 65 and "does not fit 512 positions" in done.stderr
    assert [record["task"] for record in json.loads(done.stdout)] == ["arc_easy"]
    assert re.search(r"this takes about \d+ s \([\d,]+ tokens/s now\): piqa \d+ s, arc_easy \d+ s", done.stderr)
    assert done.stderr.index("this takes about") < done.stderr.index("arc_easy: acc")


@LONG
def test_a_task_of_lm_eval_runs_on_our_model(run: RunDir, here: Command, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    data = eval_data.make(tmp_path / "data")
    (tmp_path / "yaml").mkdir()
    (tmp_path / "yaml" / "lights.yaml").write_text(
        f"task: lights\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}/piqa/valid.jsonl\n"
        'test_split: test\noutput_type: multiple_choice\ndoc_to_text: "Question: {{goal}}\\nAnswer:"\ndoc_to_target: label\n'
        'doc_to_choice: "{{[sol1, sol2]}}"\nmetric_list:\n  - metric: acc\n  - metric: acc_norm\n'
    )
    done = here("eval", "r", "--tasks", "lm-eval:lights,piqa", "--data", str(tmp_path / "yaml"), "--json", cwd=tmp_path)
    assert done.returncode == 66  # piqa is not in that folder: said before anything is computed
    done = here("eval", "r", "--tasks", "lm-eval:lights", "--data", str(tmp_path / "yaml"), "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    theirs = {one["name"]: one for one in json.loads(done.stdout)[0]["scores"]}
    ours = json.loads(here("eval", "r", "--tasks", "piqa", "--data", str(data), "--json", cwd=tmp_path).stdout)
    for one in ours[0]["scores"]:
        assert theirs[one["name"]]["value"] == pytest.approx(one["value"])
        assert theirs[one["name"]]["stderr"] == pytest.approx(one["stderr"], abs=1e-9)
    (tmp_path / "yaml" / "words.yaml").write_text(
        f"task: words\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}/lambada/test.jsonl\n"
        "test_split: test\noutput_type: loglikelihood\ndoc_to_text: \"{{text.split(' ')[:-1]|join(' ')}}\"\n"
        "doc_to_target: \"{{' '+text.split(' ')[-1]}}\"\nmetric_list:\n  - metric: perplexity\n"
    )
    done = lamp("eval", "r", "--tasks", "lm-eval:words", "--data", str(tmp_path / "yaml"), "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr  # lm-eval would fork a pool for this error, and end it by a signal
    assert json.loads(done.stdout)[0]["scores"][0]["stderr"] > 0


def test_a_finished_run_goes_on_with_the_evaluations_that_it_lacks(run: RunDir, here: Command, tmp_path: Path) -> None:
    """As one does whose parent was killed in them; what has its results is not evaluated again."""
    data = eval_data.make(tmp_path / "data")
    asked = ("--tasks", "piqa", "--data", str(data))
    assert here("eval", "r", "--checkpoint", "2", *asked, cwd=tmp_path).returncode == 0
    words = ("train", "--run", "r", *WORDS, "--eval.tasks", "piqa", "--eval.data", str(data))
    done = here(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "evaluated checkpoint-3" in done.stdout and "checkpoint-2 in" not in done.stdout
    assert [record["step"] for record in results(run, "piqa")] == [2, 3]
    assert "evaluated" not in here(*words, cwd=tmp_path).stdout


def test_an_evaluation_dies_with_the_parent_of_its_run(run: RunDir, tmp_path: Path) -> None:
    """Where it lived on, the same command would start a second one of the same checkpoint."""
    code = "import sys; from lamplighter.commands.eval_of_run import *; from lamplighter.config.schema import Eval; Evaluations(RunDir(Path(sys.argv[1])), Eval(tasks='held-back'), print).finish()"  # fmt: skip
    parent = subprocess.Popen([sys.executable, "-c", f"from pathlib import Path; {code}", str(run.path)])
    log = run.path / "evaluations" / "output.log"
    wait_for(lambda: log.exists() and b"lamp eval" in log.read_bytes(), 60, parent)
    [evaluation] = [one.pid for one in psutil.Process(parent.pid).children()]
    parent.kill()
    parent.wait()
    wait_for(lambda: not psutil.pid_exists(evaluation) or psutil.Process(evaluation).status() == psutil.STATUS_ZOMBIE)
    assert not results(run, "held-back")


def test_where_an_evaluation_is_stands_in_the_line_of_its_run(run: RunDir) -> None:
    evaluations = Evaluations(run, Eval(tasks="held-back"), print)
    assert evaluations._last_words() == ""
    (run.path / "evaluations").mkdir()
    (run.path / "evaluations" / "output.log").write_bytes(b"20:00:00  held-back \x1b[2J 3 items of 9 items\n")
    assert evaluations._last_words() == " \u00b7 held-back \\x1b[2J 3 items of 9 items"


def test_two_evaluations_do_not_write_the_same_items(run: RunDir, here: Command, tmp_path: Path) -> None:
    data = eval_data.make(tmp_path / "data")
    words = ("eval", "r", "--tasks", "piqa", "--data", str(data), "--checkpoint", "3")
    assert here(*words, cwd=tmp_path).returncode == 0
    [items] = (run.path / "evaluations" / "items").glob("piqa-*")
    held = lock.hold(items)
    assert held is not None
    done = here(*words, cwd=tmp_path)
    assert done.returncode == 69 and "another lamp eval writes" in done.stderr
    os.close(held)
    assert here(*words, cwd=tmp_path).returncode == 0


def test_the_death_of_an_evaluation_leaves_the_run_alone(here: Command, tmp_path: Path) -> None:
    words = ["train", "--run", "r", *TINY, "--train.steps", "4", "--eval.tasks", "nothing-of-ours", "--eval.data", str(tmp_path)]  # fmt: skip
    done = here(*words, "--eval.while_training", "true", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "WARNING  evaluation of checkpoint-4 ended with 66" in done.stdout
    assert "finished r" in done.stdout


def test_a_checkpoint_is_tested_against_what_was_to_be_expected(run: RunDir, here: Command, tmp_path: Path) -> None:
    (tmp_path / "asked.txt").write_text("The fog\n")
    done = here("checkpoints", "r", "test", "--prompts", "asked.txt", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row["checkpoint"] for row in found["checkpoints"]] == ["checkpoint-2", "checkpoint-3"]
    assert found["checkpoints"][0]["progress"] == pytest.approx(2 / 3)
    assert found["texts"][0]["prompt"] == "The fog"
    assert any("gibberish" in flag for flag in found["red_flags"])  # three steps teach nothing
    assert "lamp" in found["next"]
    [kept] = results(run, "checkpoint-test")
    assert kept["action"] == found["checkpoints"][-1]["action"]
    assert kept["scores"][0]["n"] == found["checkpoints"][-1]["n"] == len(items_of(run.path, "held-back-checkpoint-3"))
    done = here("checkpoints", "r", "test", "--prompts", "asked.txt", "--interactive", cwd=tmp_path)
    assert done.returncode == 2 and "goes with neither" in done.stderr
    table = here("checkpoints", "r", "test", "checkpoint-2", cwd=tmp_path).stdout
    assert "In the year 1834" in table and "expected" in table and "next: lamp" in table


def test_what_stands_in_the_training_text_is_counted_once(run: RunDir, here: Command, tmp_path: Path) -> None:
    from lamplighter.commands.eval import training_tokens
    from lamplighter.data import tokenizer as tokenizers

    tokens = training_tokens(run.checkpoint(3), run.path)
    assert tokens is not None
    whole = tokenizers.load(run.checkpoint(3)).decode(tokens.train.read(1, 2000))
    seen = " ".join(max(whole.split("<|endoftext|>"), key=len).split()[:30])
    rows = [
        {"goal": text, "sol1": "yes", "sol2": "no", "label": 0} for text in (seen, seen.upper(), "new " * 20, "short")
    ]
    (tmp_path / "data" / "piqa").mkdir(parents=True)
    (tmp_path / "data" / "piqa" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("eval", "r", "--data", "data", "--tasks", "piqa", "--checkpoint", "all", "--json")
    done = here(*words, cwd=tmp_path)
    records = json.loads(done.stdout)
    assert [one["contamination"]["items"] for one in records] == [3, 3]  # the fourth has no 13 words
    assert [one["contamination"]["share"] for one in records] == [pytest.approx(2 / 3)] * 2
    assert len(list((run.path / "evaluations" / "items").glob("contamination-*.json"))) == 1


def test_without_memory_it_is_refused_in_words(run: RunDir, here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr("lamplighter.procs.procfs.memory_available", lambda: 100 << 20)
    done = here("eval", "r", "--tasks", "held-back", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (77, "")
    assert "there is no memory for checkpoint-3" in done.stderr and "are free" in done.stderr


def test_people_choose_blindly_and_go_on_where_they_were(run: RunDir, here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    (tmp_path / "asked.txt").write_text("The fog\nMy dear Aunt\nAt dusk\n")
    words = ("eval", "r", str(run.checkpoint(2)), "--human", "--prompts", "asked.txt", "--json")
    monkeypatch.setattr("sys.stdin", io.StringIO("x\n1\nq\n"))
    done = here(*words, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("--- 1 ---")) == (75, 2), done.stderr
    monkeypatch.setattr("sys.stdin", io.StringIO("2\n=\n"))
    done = here(*words, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("--- 1 ---")) == (0, 2), done.stderr
    [score] = json.loads(done.stdout)["scores"]
    assert (score["n"], score["chance"]) == (3, 0.5)
    low, high = json.loads(done.stdout)["interval"]
    assert low < score["value"] < high
    [record] = results(run, "human-vs")
    assert (record["checkpoint"], record["step"]) == ("checkpoint-3", 3)  # and so it has its place on every curve
    [other] = [json.loads(path.read_text()) for path in tmp_path.glob("runs/.evaluations/checkpoint-2/evaluations/human-vs-*.json")]  # fmt: skip
    assert (other["checkpoint"], other["step"]) == ("checkpoint-2", 2)
    os.utime(run.checkpoint(2) / "manifest.json", ns=(1, 1))  # other weights under the same name: other texts
    monkeypatch.setattr("sys.stdin", io.StringIO("q\n"))
    done = here(*words, cwd=tmp_path)
    assert (done.returncode, "[1 of 3]" in done.stderr) == (75, True), done.stderr
    copy_run(run.path, tmp_path / "runs" / "other")
    told = here("compare", "r", "other", cwd=tmp_path)
    assert "human-vs-checkpoint-2 win_rate" in told.stdout, told.stdout + told.stderr
    assert f"({low:.3f} to {high:.3f}, n 3)" in told.stdout
    told = here("compare", "r", "other", "--runs-dir", str(tmp_path / "runs"), cwd=tmp_path)
    assert f"next: lamp dash --runs-dir {tmp_path / 'runs'} shows" in told.stdout
    from lamplighter.export import model_card

    assert f"(95 %: {low:.3f} to {high:.3f})" in model_card._evaluation(run, 3)


def test_people_choose_on_the_page(run: RunDir, here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    if not Path("/usr/bin/chromium").exists():
        assert os.environ.get("CI") != "true", "CI must have Chromium"
        pytest.skip("there is no Chromium here")
    from playwright.sync_api import sync_playwright

    (tmp_path / "asked.txt").write_text("The <b>fog</b>\nMy dear Aunt\n")
    words = ("eval", "r", str(run.checkpoint(2)), "--human", "--page", "--prompts", "asked.txt")
    monkeypatch.setattr("sys.stdin", io.StringIO("q\n"))
    assert (
        here(*words[:4], *words[5:], cwd=tmp_path).returncode == 75
    )  # the texts are written here: that process needs no torch
    process = start_lamp(*words, cwd=tmp_path)
    wait_for(lambda: "http://127.0.0.1:" in (tmp_path / "out.txt").read_text(), 60, process)
    [address] = re.findall(r"http://127\.0\.0\.1:\S+", (tmp_path / "out.txt").read_text())[:1]
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-background-networking"])  # fmt: skip
        page = browser.new_page()
        page.goto(address)
        page.locator("#place", has_text="1 of 2").wait_for()
        page.keyboard.press("1")
        page.locator("#place", has_text="2 of 2").wait_for()
        assert page.locator("#prompt b").count() == 0  # shown, not obeyed
        page.get_by_role("button", name="Alike").click()
        page.locator("#place", has_text="Done").wait_for()
        browser.close()
    assert process.wait(20) == 0, (tmp_path / "out.txt").read_text()
    assert "95 % interval" in (tmp_path / "out.txt").read_text()
    [record] = results(run, "human-vs")
    assert record["scores"][0]["n"] == 2 and record["scores"][0]["value"] in (0.25, 0.75)


@LONG
def test_a_model_of_the_hub_is_fetched_once_for_eval_generate_and_serve(here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    from test_hub_models_runs import use

    from hub_server import hub_server

    data = eval_data.make(tmp_path / "data")
    with hub_server(tiny__stories=shared("models", "stories260K_hf_llama")) as hub:
        use(hub, monkeypatch, tmp_path)
        done = lamp("eval", "tiny/stories", "--data", str(data), "--tasks", "piqa", "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        asked = len(hub.asked)
    assert asked and json.loads(done.stdout)[0]["checkpoint"] == "tiny--stories"
    assert list((tmp_path / "runs" / ".evaluations" / "tiny--stories" / "evaluations").glob("piqa-*.json"))
    use(None, monkeypatch, tmp_path)  # the hub is gone, its cache is here
    done = lamp("generate", "tiny/stories", "--prompt", "Once", "--max-tokens", "3", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("Once"), done.stderr
    with serving(tmp_path, "tiny/stories") as (port, _):
        status, reply = ask(port, "/v1/completions", {"prompt": "Once", "max_tokens": 3})
        assert (status, reply["model"]) == (200, "tiny--stories")
    done = lamp("eval", "tiny/nothing", "--data", str(data), "--tasks", "piqa", cwd=tmp_path)
    assert done.returncode in (66, 67) and done.stdout == "", done.stderr
