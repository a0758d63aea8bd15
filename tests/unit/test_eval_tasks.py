"""Tasks from files: what is read, what is refused; scores with their errors and levels; period lists."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

import eval_data
from lamplighter import report
from lamplighter.commands.eval import _say_items
from lamplighter.commands.eval_of_run import cost_words
from lamplighter.errors import BadData, InputMissing, UsageError
from lamplighter.evaluate import generation, tasks
from lamplighter.evaluate.evaluation import choice_scores, tokens_of
from lamplighter.evaluate.items import Task, TaskItem
from lamplighter.evaluate.period import LONDON, Period, open_period, read_period
from lamplighter.evaluate.scores import TaskScore, _at_least, exponential, mean_score, ratio_score, wilson
from lamplighter.rundir import RunDir
from running import real

NO_SHOTS = tasks.Shots(None)


def opened(root: Path, name: str, shots: int | None = None) -> Task:
    return tasks.open_task(name, root, tasks.Shots(shots))


def test_every_kind_of_task_is_read_as_lm_eval_words_it(tmp_path: Path) -> None:
    root = eval_data.make(tmp_path)
    hella = opened(root, "hellaswag").items[0]
    assert hella.context == "Minding a hat: A man has a hat . Then he"
    assert (hella.answers[0], hella.gold, hella.lengths[0]) == (" puts the hat away .", 0, 19)
    assert opened(root, "lambada").items[1].answers == (" lamp",)
    arc = opened(root, "arc_easy").items
    assert (arc[0].context, arc[1].answers) == (
        "Question: Which one is a hat?\nAnswer:",
        (" lamp", " the moon", " soup"),
    )
    assert opened(root, "piqa").items[1].gold == 1
    boxes = opened(root, "boxes")
    assert (boxes.items[0].context, boxes.items[0].gold, boxes.items[1].gold) == ("Q: where is the hat?\nA:", 0, 1)
    assert opened(root, "notes").kind == "text"
    assert opened(root, "copying").kind == "generate"
    assert set(tasks.find_tasks(root)) == {"arc_easy", "boxes", "copying", "hellaswag", "lambada", "mmlu", "notes", "period", "piqa", "rouge"}  # fmt: skip


def test_mmlu_shows_solved_examples_of_the_subject_in_either_form_of_the_files(tmp_path: Path) -> None:
    root = eval_data.make(tmp_path)
    item = opened(root, "mmlu", 2).items[0]
    assert item.context == (
        "The following are multiple choice questions (with answers) about fog studies.\n\n"
        "What is 0 and 0, in fog_studies?\nA. one\nB. 0, surely\nC. none\nD. all\nAnswer: A\n\n"
        "What is 1 and 1, in fog_studies?\nA. one\nB. 2, surely\nC. none\nD. all\nAnswer: B\n\n"
        "What is 0 and 0, in fog_studies?\nA. one\nB. 0, surely\nC. none\nD. all\nAnswer:"
    )
    assert (item.answers, item.group) == ((" A", " B", " C", " D"), "fog_studies")
    with pytest.raises(BadData, match="too few solved examples"):
        opened(root, "mmlu", 6)
    original = [opened(real("eval"), name).items for name in ("mmlu", "mmlu_hendrycks_format")]
    assert original[0] == original[1]


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("hellaswag/val.jsonl", '{"ctx": "a", "endings": ["b", "c"], "label": 7}\n', "line 1 is not of this task"),
        ("hellaswag/val.jsonl", '{"ctx": "a", "endings": ["b", "c"], "label": 1}\n\n{"ctx": "a", "endings": "abcd", "label": 1}', "line 3 .*endings is no list of texts"),
        ("hellaswag/val.jsonl", '{"ctx": "a", "endings": ["b", "c"], "label": 1.5}', "line 1 .*label is no whole number"),
        ("hellaswag/val.jsonl", '{"ctx": "a", "endings": ["b", "c"], "label": true}', "line 1 .*label is no whole number"),
        ("hellaswag/val.jsonl", '{"ctx": "a", "endings": ["", "", "", ""], "label": 1}', "line 1 .*endings is no list of texts"),
        ("hellaswag/val.jsonl", '{"ctx": "a", "endings": ["[a]", "[b]"], "label": 1}', "line 1 .*choices are empty"),
        ("piqa/valid.jsonl", '{"goal": "half \\ud800", "sol1": "a", "sol2": "b", "label": 1}', "line 1 .*surrogates"),
        ("period/facts.jsonl", '{"prompt": "a", "right": "\\ud800", "wrong": ["c"]}\n', "line 1 is no fact.*surrogates"),
        ("period/period.yaml", 'from: 1830\nto: 1837\nprompts: ["a \\ud800"]', "no text.*surrogates"),
        ("piqa/valid.jsonl", '{"goal": 5, "sol1": "a", "sol2": "b", "label": 1}', "line 1 .*goal is no text"),
        ("copying/items.jsonl", '{"prompt": 5, "reference": "a"}', "line 1 .*prompt is no text"),
        ("copying/items.jsonl", '{"prompt": "", "reference": ""}', "line 1 .*reference is empty"),
        ("hellaswag/val.jsonl", '{"ctx": "a", "endings": ["b", "c"], "label": 1}\n{"ctx"\n', "line 2 is not JSON"),
        ("hellaswag/val.jsonl", "", "holds no items"),
        ("lambada/test.jsonl", '{"text": "word"}\n', "line 1 is not of this task"),
        ("lambada/test.jsonl", '{"text": "two words "}\n', "line 1 .*ends in white space"),
        ("mmlu/test/geese_test.csv", "q,a,b,c,d,F\n", "question 1 is damaged"),
        ("mmlu/test/geese_test.csv", "q,a,b,c,d,A\nq,a,b,A\n", "question 2 is damaged: it has 4 columns"),
        ("arc_easy/test.jsonl", '{"question": "q", "choices": {"text": ["a", "b", "c"], "label": ["A", "B"]}, "answerKey": "B"}', "line 1 .*3 choices and 2 labels"),
        ("mmlu/test/geese_test.csv", "", "holds no question"),
        ("boxes/task.yaml", "prompt: [", "is no YAML"),
        ("boxes/task.yaml", "colour: red", "describes no task"),
        ("boxes/items.csv", "ask,first,second,right\na,b,c,9\n", "line 2 is not of this task"),
        ("boxes/items.csv", 'ask,first,second,right\na,b,c,1\na,"b,c,1\nd,e,f,1\n', "is no CSV.*line 3"),
        ("boxes/task.yaml", 'choices: [first, second]\nprompt: "Q: {ask.__class__} A:"\nanswer: right', "line 2: prompt cannot be filled"),
        ("boxes/task.yaml", 'prompt: "Q: {ask[0]} A:"\nchoices: [first, second]\nanswer: right', "line 1: prompt cannot be filled"),
        ("boxes/task.yaml", 'prompt: "{ask}"\nreference: first\nmax_tokens: many', "line 3: max_tokens cannot be used"),
        ("boxes/items.csv", "ask,first,second,right\na,2,1,1\n", "line 2 .*a choice, and the number of another"),
        ("rouge/target.txt", "one line\n", "do not go together"),
        ("notes/test.txt", " \n", "is empty"),
        ("period/period.yaml", "from: 1840\nto: 1830\nprompts: [a]", "names no period"),
        ("period/words.csv", "wort,seit\n", "is empty"),
        ("period/facts.jsonl", '{"prompt": "a", "right": "b", "wrong": []}\n', "line 1 is no fact"),
        ("period/facts.jsonl", '{"prompt": "a", "right": "b", "wrong": "bc"}\n', "line 1 is no fact"),
        ("period/facts.jsonl", '\n{"prompt": "a", "right": "b", "wrong": ["c", "b"]}\n', "line 2 is no fact.*right and wrong at once"),
        ("period/facts.jsonl", '{"prompt": 5, "right": "b", "wrong": ["c"]}\n', "line 1 is no fact.*prompt is no text"),
        ("period/words.csv", "word,from,to\nfog,1100,\nwig,1900,1800\n", "line 3 is of no word list.*from 1900 to 1800"),
        ("period/words.csv", 'word,from,to\n"fog,1100,\n', "is of no word list"),
        ("period/words.csv", "word,from,to\nradio,1920,\n!!,1920,\n", "line 3 is of no word list.*no word"),
        ("period/words.csv", "word,from,to\nradio,1920,\nRadio,1895,\n", "line 3 is of no word list.*stands twice"),
        ("period/words.csv", "word,from,to\nfog,1100,\nlamp,,\n", "no word can be out of its time.*were in use"),
        ("period/period.yaml", "from: 1830\nto: 1837\ntexts: -1\nprompts: [a]", "line 3: texts cannot be used"),
        ("arc_easy/test.jsonl", b"\xff\xfe\n", "is not UTF-8"),
    ],
)  # fmt: skip
def test_a_broken_file_is_an_error_and_never_a_score(
    tmp_path: Path, file: str, content: str | bytes, said: str
) -> None:
    root = eval_data.make(tmp_path)
    (root / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadData) as caught:
        opened(root, file.split("/")[0])
    assert re.search(said, f"{caught.value.what}: {caught.value.why}")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    root = eval_data.make(tmp_path)
    with pytest.raises(InputMissing, match="there is no task helaswag"):
        opened(root, "helaswag")
    (root / "rouge" / "target.txt").unlink()
    with pytest.raises(InputMissing, match="has not both sides"):
        opened(root, "rouge")
    with pytest.raises(InputMissing, match="there is no folder"):
        tasks.find_tasks(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="needs data"):
        tasks.open_task("hellaswag", None, NO_SHOTS)


def test_a_description_cannot_reach_beyond_the_fields_of_a_row(tmp_path: Path) -> None:
    root = eval_data.make(tmp_path)
    (root / "boxes" / "task.yaml").write_text('prompt: "{0} {ask}"\nchoices: [first, second]\nanswer: right\nfirst_answer: 1\n')  # fmt: skip
    with pytest.raises(BadData, match="line 2"):  # {0} is no field
        opened(root, "boxes")


@pytest.mark.parametrize(
    ("choices", "answer", "right"),
    [(["7", "1", "0"], 1, 1), (["1", "0", "7"], 1, 1), ([1, 7, 9], 7, 1), (["rain", "oil"], "oil", 1), (["rain", "oil"], "B", 1),
     (["0", "1"], 1, 1), ([4, 5], 1, 1), (["1", "0"], "1", None), ([1, 0], 1, None)],
)  # fmt: skip
def test_an_answer_that_is_a_number_is_never_guessed(
    tmp_path: Path, choices: list[object], answer: object, right: int | None
) -> None:
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "a.jsonl").write_text(json.dumps({"question": "q", "choices": choices, "answer": answer}))
    if right is None:
        with pytest.raises(BadData, match="line 1"):
            opened(tmp_path, "sums")
    else:
        assert opened(tmp_path, "sums").items[0].gold == right


def test_scores_have_the_error_of_the_sample_and_a_word_about_chance() -> None:
    score = mean_score("acc", [1.0] * 30 + [0.0] * 70, 0.25)
    assert score.value == 0.3
    assert score.stderr == pytest.approx(math.sqrt(0.3 * 0.7 / 99))
    assert score.verdict == "not above chance"
    assert mean_score("acc", [1.0] * 50 + [0.0] * 50, 0.25).verdict == "above chance"
    assert mean_score("acc", [1.0] * 5 + [0.0] * 95, 0.25).verdict == "below chance"
    assert mean_score("acc", [1.0], 0.25).stderr is None
    with pytest.raises(ValueError, match="no item"):
        mean_score("acc", [], 0.25)
    loss = ratio_score("loss", [2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (loss.value, loss.stderr) == (2.0, 0.0)
    assert exponential("perplexity", loss).value == pytest.approx(math.exp(2.0))
    assert TaskScore("perplexity", 1.7e27, 3.2e27, 8).words() == "1.70e+27 ± 3.20e+27 (n 8)"


@pytest.mark.parametrize(
    ("hits", "n", "chance", "said"),
    [(0, 4, 0.25, "not above chance"), (4, 4, 0.25, "above chance"), (2, 2, 0.25, "too few items to tell"), (1, 1, 0.5, "too few items to tell"),
     (0, 12, 0.25, "not above chance"), (0, 13, 0.25, "below chance"), (5, 10, 0.25, "not above chance"), (6, 10, 0.25, "above chance"),
     (8.5, 9, 0.5, "above chance"), (7.5, 9, 0.5, "not above chance"), (0.5, 9, 0.5, "below chance"),
     (2616, 10_042, 0.25, "above chance"), (2590, 10_042, 0.25, "not above chance"), (2400, 10_042, 0.25, "below chance")],
)  # fmt: skip
def test_chance_is_judged_exactly_however_few_there_are(hits: float, n: int, chance: float, said: str) -> None:
    assert TaskScore("acc", hits / n, 0.0, n, chance).verdict == said


def test_the_tail_of_guessing_is_the_sum_of_its_terms() -> None:
    terms = [math.comb(20, k) * 0.25**k * 0.75 ** (20 - k) for k in range(9, 21)]
    assert _at_least(9, 20, 0.25) == pytest.approx(sum(terms), rel=1e-9)


def test_answers_of_several_lengths_are_ranked_by_both_measures() -> None:
    items = (TaskItem("a", (" b", " long one"), 1, "", (1, 8)), TaskItem("a", (" b", " c"), 0, "", (1, 1)))
    task = Task("t", "choice", items, Path("t"), "", "")
    acc, norm = choice_scores(task, {0: {"nats": [-3.0, -8.0]}, 1: {"nats": [-1.0, -2.0]}})
    assert (acc.value, norm.value, acc.chance) == (0.5, 1.0, 0.5)


def test_what_a_group_begins_with_is_read_once() -> None:
    shots = "solved " * 100
    asked = [TaskItem(f"{shots}{n}?", (" a", " b"), group="s") for n in range(10)]
    whole = sum(len(item.context) + 4 for item in asked)
    alone = [TaskItem(item.context, item.answers) for item in asked]
    made = [TaskItem("write", (), reference="x")] * 3
    assert tokens_of(Task("t", "choice", tuple(alone), Path(), "", "")) == (whole // 4, 0)
    assert tokens_of(Task("t", "choice", tuple(asked), Path(), "", "")) == ((len(shots) + 60) // 4, 0)
    assert tokens_of(Task("t", "generate", tuple(made), Path(), "", "", {"max_tokens": 7})) == (15 // 4, 21)


def test_texts_that_a_limit_leaves_whole_are_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, said = eval_data.make(tmp_path), list[str]()
    monkeypatch.setattr(report, "note", said.append)
    both: list[Task | str] = [tasks.limited(opened(root, name), 3) for name in ("hellaswag", "notes")]
    _say_items(["held-back", *both], 3)
    assert said == ["items: hellaswag 3, notes 1", "--limit counts items: held-back, notes are texts, and read whole"]
    said.clear()
    _say_items(["held-back", *both], None)
    _say_items([both[0], "lm-eval:piqa"], 3)
    assert said == ["items: hellaswag 3, notes 1", "items: hellaswag 3"]


def test_the_interval_of_a_share_holds_for_few() -> None:
    low, high = wilson(0, 5)
    assert (low, round(high, 3)) == (0.0, 0.434)
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(50, 100)[0] == pytest.approx(0.404, abs=1e-3)


def test_rouge_is_that_of_rouge_score_on_its_pairs() -> None:
    folder = real("eval", "rouge")
    from rouge_score.rouge_scorer import RougeScorer

    theirs = RougeScorer(["rouge1", "rouge2", "rougeL"])
    scorer = generation.rouge_scorer()
    task = opened(folder.parent, "rouge")
    assert len(task.items) == 500
    for item in task.items:
        expected = theirs.score(item.reference, item.given)
        assert generation.rouge(scorer, item.reference, item.given) == {k: v.fmeasure for k, v in expected.items()}


def test_repetition_and_diversity_are_counted_in_words() -> None:
    assert generation.variety("One two three four five.")["repetition"] == 0.0
    assert generation.variety("go on and on go on and on go on and on")["repetition"] == pytest.approx(5 / 9)
    assert generation.variety("a a a a")["distinct_1"] == 0.25
    assert generation.exact("Yes.", " yes")["exact_match_words"] == 1.0
    assert generation.exact("Yes.", " yes")["exact_match"] == 0.0


def test_words_and_years_out_of_their_time_are_found() -> None:
    period = Period(1830, 1839, {"telephone": (1876, None), "x ray": (1896, None), "periwig maker": (None, 1790), "fog": (1100, None)})  # fmt: skip
    seen = period.looked_at(
        "The Telephone rang in 1837; the periwig-maker, in fog, paid £1900 and 1,840 pence in 1901."
    )
    assert seen["anachronisms"] == ["telephone", "periwig maker"]
    assert (seen["years"], seen["years_that_fit"]) == ([1837, 1901], 1)
    assert period.looked_at("An X-ray of telephones.")["anachronisms"] == ["x ray"]


def test_our_own_list_fits_the_london_that_the_demo_learns() -> None:
    """No text of the embedded corpus is out of its own time, and its facts are true in it."""
    from lamplighter.data.corpus import entries

    period, task = read_period(LONDON), open_period("period", LONDON)
    texts = [entry.text for entry in entries(0, 3000)]
    assert not [word for text in texts for word in period.looked_at(text)["anachronisms"]]
    assert {year for text in texts for year in period.looked_at(text)["years"]} == {1837}
    whole = "\n".join(texts)
    for item in task.items:
        if item.group == "fact":
            assert item.context + item.answers[0] in whole, item
            assert not [wrong for wrong in item.answers[1:] if item.context + wrong in whole]


def test_a_score_is_kept_as_the_folder_promises() -> None:
    score = TaskScore("acc", 0.5, 0.1, 10, 0.25)
    record = score.record()
    assert TaskScore.of(record) == score
    assert json.loads(json.dumps(record)) == {"name": "acc", "value": 0.5, "stderr": 0.1, "n": 10, "chance": 0.25, "higher_is_better": True, "verdict": "not above chance"}  # fmt: skip


def test_what_evaluations_beside_the_training_cost_is_measured_from_its_steps(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    rows = [
        {"step": n, "t": 1000.0 + n, "train/loss": 1.0, "train/dt_ms": 130.0 if 10 <= n < 20 else 100.0}
        for n in range(1, 40)
    ]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = cost_words(run, [(1010.0, 1019.5)])
    assert "1 in 10 s" in told and "130.0 ms meanwhile and 100.0 ms otherwise (+30%)" in told
    assert "too few steps" in cost_words(run, [(5000.0, 5001.0)])
