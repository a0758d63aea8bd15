"""Small tasks of our own in the layout of --data, for the tests of evaluation.

In:  a folder.
Out: hellaswag/ lambada/ mmlu/ arc_easy/ piqa/ boxes/ (described) rouge/ period/ notes/ (text) in it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

THINGS = ("hat", "lamp", "goose", "piano", "boat", "wig", "parrot", "candle")
SUBJECTS = ("fog_studies", "geese")


def _lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make(root: Path) -> Path:
    """Every kind of task, each with a few items."""
    ends = [[f"puts the {thing} away [step].", f"eats the {thing}", f"sells a {thing} to the lamplighter.", "sings."] for thing in THINGS]  # fmt: skip
    _lines(root / "hellaswag" / "val.jsonl", [
        {"activity_label": f"Minding a {thing}", "ctx_a": f"A man has a {thing} [header].", "ctx_b": "then he", "endings": ends[n], "label": str(n % 4)}
        for n, thing in enumerate(THINGS)
    ])  # fmt: skip
    _lines(root / "lambada" / "test.jsonl", [
        {"text": f"The fog took my {thing}.\n\n\"Have you seen it?\" I asked. Nobody had seen the {thing}"} for thing in THINGS
    ])  # fmt: skip
    for subject in SUBJECTS:
        for part, count in (("dev", 5), ("test", 4)):
            rows = [f'"What is {n} and {n}, in {subject}?  ",one,"{2 * n}, surely",none,all,{"ABCD"[n % 4]}' for n in range(count)]  # fmt: skip
            (root / "mmlu" / part).mkdir(parents=True, exist_ok=True)
            (root / "mmlu" / part / f"{subject}_{part}.csv").write_text("\n".join(rows) + "\n")
    _lines(root / "arc_easy" / "test.jsonl", [
        {"question": f"Which one is a {thing}?", "choices": {"text": [thing, "the moon", "soup"][: 2 + n % 2], "label": ["A", "B", "C"][: 2 + n % 2]}, "answerKey": "A"}
        for n, thing in enumerate(THINGS)
    ])  # fmt: skip
    _lines(root / "piqa" / "valid.jsonl", [
        {"goal": f"How do you light a {thing}?", "sol1": "with a match", "sol2": "with a long and careful letter", "label": n % 2}
        for n, thing in enumerate(THINGS)
    ])  # fmt: skip
    (root / "boxes").mkdir()
    (root / "boxes" / "items.csv").write_text("ask,first,second,right\n" + "".join(f"where is the {t},in the box,gone,{1 + n % 2}\n" for n, t in enumerate(THINGS)))  # fmt: skip
    (root / "boxes" / "task.yaml").write_text('prompt: "Q: {ask}?\\nA:"\nchoices: [first, second]\nanswer: right\nfirst_answer: 1\n')  # fmt: skip
    (root / "rouge").mkdir()
    (root / "rouge" / "prediction.txt").write_text("the cat sat on the mat\na goose in the fog\n")
    (root / "rouge" / "target.txt").write_text("a cat sat on a mat\nthe goose was in the thick fog\n")
    _lines(root / "copying" / "items.jsonl", [{"prompt": f"The {t} is", "reference": f" a {t}"} for t in THINGS[:4]])
    (root / "notes").mkdir()
    (root / "notes" / "test.txt").write_text("The fog came in by the window after tea and asked for cold mutton. £1, café.\n" * 12)  # fmt: skip
    (root / "period").mkdir()
    (root / "period" / "period.yaml").write_text(
        'from: 1830\nto: 1839\ntexts: 2\nmax_tokens: 12\nprompts: ["At dusk"]\n'
    )
    (root / "period" / "words.csv").write_text("word,from,to\ntelephone,1876,\nperiwig maker,,1790\nfog,1100,\n")
    _lines(root / "period" / "facts.jsonl", [{"prompt": "In the year", "right": "1837", "wrong": ["1937", "2037"]}])
    return root
