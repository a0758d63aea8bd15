"""MB a second of encoding, and seconds of BPE training, against tokenizers and tiktoken: the same ids, the same merges.

In:  a folder of real text (.txt; without one, the embedded corpus, which is easier than real text).
Out: ratios to tokenizers.encode_batch_fast: the first call in a new process, and later ones (which may remember words).

    python benchmarks/tokenising.py [TEXT_FOLDER] [--mb 8] [--vocab 16384]

`lamp data prepare` as a whole, from files to a token cache, is measured by prepare.py.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import measured
import peers
from prepare import paragraphs

READ = """
import hashlib
def opened(ask):
    global texts, size
    texts = json.loads(open(ask["texts"]).read())
    size = sum(len(text.encode()) for text in texts) / 1e6

def timed(encode):
    began = time.perf_counter()
    lists = encode(texts)
    seconds = time.perf_counter() - began
    digest = hashlib.sha256()
    for ids in lists:
        digest.update(json.dumps([int(i) for i in ids]).encode())
    return {"mb_s": size / seconds, "ids": digest.hexdigest()}
"""
OURS = """
from pathlib import Path
from lamplighter.data.tokenizer import load
import numpy as np
def answer(ask):
    global tokenizer
    if "texts" in ask:
        opened(ask)
        tokenizer = load(Path(ask["tokenizer"]))
        return "ready"
    began = time.perf_counter()
    made = tokenizer.encode_batch(texts)
    seconds = time.perf_counter() - began
    digest = hashlib.sha256()
    for ids in np.split(made.ids, made.offsets[1:-1]):
        digest.update(json.dumps([int(i) for i in ids]).encode())
    return {"mb_s": size / seconds, "ids": digest.hexdigest()}
"""
TOKENIZERS = """
import tokenizers
def answer(ask):
    global made
    if "texts" in ask:
        opened(ask)
        made = tokenizers.Tokenizer.from_file(ask["tokenizer"] + "/tokenizer.json")
        return "ready"
    return timed(lambda texts: [one.ids for one in made.encode_batch_fast(texts, add_special_tokens=False)])
"""
TIKTOKEN = r'''
import tiktoken
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
def answer(ask):
    global made
    if "texts" in ask:
        opened(ask)
        content = json.loads(open(ask["tokenizer"] + "/tokenizer.json").read())
        letters = {letter: byte for byte, letter in zip(ask["bytes"], ask["letters"])}
        special = {token["content"] for token in content["added_tokens"]}
        ranks = {bytes(letters[c] for c in token): i for token, i in content["model"]["vocab"].items() if token not in special}
        made = tiktoken.Encoding("ours", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
        return "ready"
    return timed(lambda texts: made.encode_ordinary_batch(texts, num_threads=ask["threads"]))
'''
TRAIN_OURS = """
from lamplighter.data.tokenizer import train
def answer(ask):
    texts = json.loads(open(ask["texts"]).read())
    began = time.perf_counter()
    made = train(texts, ask["vocab"])
    return {"s": time.perf_counter() - began, "merges": [list(pair) for pair in made.content["model"]["merges"]]}
"""
TRAIN_TOKENIZERS = """
import tokenizers
from tokenizers import models, pre_tokenizers, trainers
def answer(ask):
    texts = json.loads(open(ask["texts"]).read())
    began = time.perf_counter()
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=ask["vocab"] - 1, special_tokens=[], initial_alphabet=alphabet, show_progress=False))
    seconds = time.perf_counter() - began
    return {"s": seconds, "merges": [list(pair) for pair in json.loads(made.to_str())["model"]["merges"]]}
"""


def texts_of(folder: Path | None, size: int) -> list[str]:
    """Paragraphs of real text, or documents of the embedded corpus, up to a size."""
    if folder is not None:
        every: Iterable[str] = paragraphs(folder)
    else:
        from lamplighter.data.corpus import entries

        every = (entry.text for entry in entries(1, size))
    found, done = [], 0
    for text in every:
        found.append(text)
        done += len(text.encode())
        if done >= size:
            break
    return found


def encode(folder: Path, wanted: Any, environment: dict[str, str]) -> None:
    from lamplighter.data.tokenizer import LETTER

    chosen = {"lamp": (sys.executable, OURS)}
    if not wanted.no_peers:
        theirs = str(peers.python("hf"))
        chosen |= {"encode_batch_fast": (theirs, TOKENIZERS), "tiktoken": (theirs, TIKTOKEN)}
    later: dict[str, list[float]] = {name: [] for name in chosen}
    ids: dict[str, str] = {}

    def turn(name: str) -> float:
        python, program = chosen[name]
        letters = dict(LETTER)
        with peers.Worker(python, READ + program, folder / "errors.log", environment) as worker:
            worker.ask({"texts": str(folder / "texts.json"), "tokenizer": str(folder / "tokenizer"),
                        "bytes": list(letters), "letters": list(letters.values())})  # fmt: skip
            first = worker.ask({"threads": wanted.threads})
            later[name].append(float(worker.ask({"threads": wanted.threads})["mb_s"]))
        ids[name] = first["ids"]
        return float(first["mb_s"])

    found = measured.in_turn({name: (lambda name=name: turn(name)) for name in chosen}, wanted.rounds)
    different = [name for name in ids if ids[name] != ids["lamp"]]
    assert not different, f"other ids than ours: {different}"
    against = "encode_batch_fast" if "encode_batch_fast" in chosen else "lamp"
    for title, values in (("the first call", found), ("a later call", {k: v[1:] for k, v in later.items()})):
        rows = [measured.Row(name, rates) for name, rates in values.items()]
        measured.show(f"encoding {wanted.mb:g} MB, {title}; all ids are equal", "MB/s", rows, against)


def learn(folder: Path, wanted: Any, environment: dict[str, str]) -> None:
    chosen = {"lamp": (sys.executable, TRAIN_OURS)}
    if not wanted.no_peers:
        chosen["tokenizers"] = (str(peers.python("hf")), TRAIN_TOKENIZERS)
    merges: dict[str, Any] = {}

    def turn(name: str) -> float:
        with peers.Worker(*chosen[name], folder / "errors.log", environment) as worker:
            done = worker.ask({"texts": str(folder / "texts.json"), "vocab": wanted.vocab})
        merges[name] = done["merges"]
        return float(done["s"])

    found = measured.in_turn({name: (lambda name=name: turn(name)) for name in chosen}, wanted.rounds)
    assert all(pairs == merges["lamp"] for pairs in merges.values()), "the merges differ"
    rows = [measured.Row(name, values, more_is_better=False) for name, values in found.items()]
    title = f"training BPE on {wanted.mb:g} MB: {len(merges['lamp']):,} merges, all equal"
    measured.show(title, "seconds", rows, list(chosen)[-1])


def main() -> None:
    parser = measured.arguments(__doc__ or "")
    parser.add_argument("texts", type=Path, nargs="?")
    parser.add_argument("--mb", type=float, default=8)
    parser.add_argument("--vocab", type=int, default=16_384)
    wanted = parser.parse_args()
    if wanted.quick:
        wanted.rounds, wanted.mb, wanted.vocab = 1, 0.2, 400
    measured.say_machine()
    environment = {**os.environ, "PYTHONPATH": str(measured.ROOT / "src"), "RAYON_NUM_THREADS": str(wanted.threads)}
    from lamplighter.data.tokenizer import train

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        texts = texts_of(wanted.texts, int(wanted.mb * 1e6))
        (folder / "texts.json").write_text(json.dumps(texts))
        train(texts, wanted.vocab).save(folder / "tokenizer")
        encode(folder, wanted, environment)
        learn(folder, wanted, environment)
    measured.keep(wanted.json)


if __name__ == "__main__":
    main()
