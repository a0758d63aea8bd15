"""MB/s per core of `lamp data clean`, by kind of file and by stage, on the files that are given.

usage: python benchmarks/cleaning.py PATH... [--repeat 3]

One process, CPU time (so that a busy machine does not count against it), the best of the repeats; and the machine. A made-up
book is used where no path is given. Beside it, in the same run, what the same core does with sha256: a machine that is slow
at that is slow at everything, and the ratio of the two can be compared between machines.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import measured

from lamplighter.clean import gutenberg, normalise, quality, worker
from lamplighter.clean.dedup import record_of
from lamplighter.clean.quality import language_of, words_of
from lamplighter.clean.raw_documents import Item, documents, find_items, kind_of_file
from lamplighter.clean.rules import Ledger, Raw, Rules
from lamplighter.readers.files import read_blocks


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("paths", nargs="*")
    arguments.add_argument("--repeat", type=int, default=3)
    given = arguments.parse_args()
    measured.say_machine()
    with tempfile.TemporaryDirectory() as folder:
        paths = given.paths or [_made_up(Path(folder))]
        items, _ = find_items(paths, None, Rules())
        worker.make(worker.CleanBatch("", (items[0],), Rules()))  # load the libraries
        _by_kind(items, given.repeat)
        _by_stage(items, given.repeat)


def _by_kind(items: list[Item], repeat: int) -> None:
    seconds: dict[str, float] = defaultdict(float)
    sizes: dict[str, int] = defaultdict(int)
    out: dict[str, int] = defaultdict(int)
    for item in items:
        kind = _kind(item)
        best = float("inf")
        for _ in range(repeat):
            started = time.process_time()
            made = worker.make(worker.CleanBatch("", (item,), Rules()))
            best = min(best, time.process_time() - started)
        seconds[kind] += best
        sizes[kind] += _unpacked(item)
        out[kind] += made["bytes_out"]
    print(f"{'kind':<16}{'MB in':>10}{'MB out':>10}{'MB/s per core':>16}")
    for kind in sorted(sizes):
        print(f"{kind:<16}{sizes[kind] / 1e6:>10.1f}{out[kind] / 1e6:>10.1f}{sizes[kind] / 1e6 / seconds[kind]:>16.1f}")
    rate = sum(sizes.values()) / 1e6 / sum(seconds.values())
    print(f"{'overall':<16}{sum(sizes.values()) / 1e6:>10.1f}{sum(out.values()) / 1e6:>10.1f}{rate:>16.1f}")
    print(f"sha256 on the same core: {_sha256():.0f} MB/s")


def _kind(item: Item) -> str:
    path = Path(item.path)
    with open(path, "rb") as file:
        head = file.read(1 << 16)
    kind = kind_of_file(item, lambda *_: None)
    if kind == "xml":
        return "ALTO" if b"<alto" in head else "METS" if b"<mets" in head else "TEI"
    if kind == "text" and b"utenberg" in head + path.read_bytes()[-20_000:]:
        return "Gutenberg"
    packed = path.suffix if path.suffix in (".gz", ".zst") else ""
    return {"text": "plain text", "html": "HTML", "json": "JSON lines"}[kind] + packed


def _unpacked(item: Item) -> int:
    return sum(map(len, read_blocks(item.file, lambda *_: None)))


def _by_stage(items: list[Item], repeat: int) -> None:
    """Each stage by itself, over the same documents."""
    rules = Rules()
    raws = [raw for item in items for raw in documents(item, rules, lambda _: None) if isinstance(raw, Raw)]
    tidy = [normalise.characters(normalise.misread(raw.text)[0])[0] for raw in raws]
    books = [normalise.blank_lines(gutenberg.strip(one).text) for one in tidy]
    clean = [worker.clean_text(raw.text, rules, Ledger())[0] for raw in raws]
    words = [words_of(one) for one in clean]
    size = sum(len(one.encode()) for one in clean) / 1e6
    stages = {
        "read, unpack, decode, markup": lambda: [list(documents(item, rules, lambda _: None)) for item in items],
        "misread encodings": lambda: [normalise.misread(raw.text) for raw in raws],
        "characters": lambda: [normalise.characters(raw.text) for raw in raws],
        "gutenberg": lambda: [gutenberg.strip(one) for one in tidy],
        "lines": lambda: [normalise.join(one) for one in books],
        "quality": lambda: [quality.judge(one, words_of(one), True) for one in clean],
        "language": lambda: [language_of(one, two) for one, two in zip(clean, words, strict=True)],
        "duplicates": lambda: [record_of(one, True) for one in words],
    }
    print(f"\n{'stage':<32}{'MB of clean text/s':>20}")
    for name, work in stages.items():
        best = float("inf")
        for _ in range(repeat):
            started = time.process_time()
            work()
            best = min(best, time.process_time() - started)
        print(f"{name:<32}{size / max(best, 1e-6):>20.0f}")


def _sha256() -> float:
    block = bytes(1 << 24)
    started = time.process_time()
    hashlib.sha256(block).digest()
    return len(block) / 1e6 / (time.process_time() - started)


def _made_up(folder: Path) -> str:
    """A book of 4 MB, wrapped at 72 columns, with a header and a last line."""
    import random
    import textwrap

    random.seed(1)
    paragraphs = [
        textwrap.fill(" ".join(random.choices(measured.WORDS, k=random.randint(20, 150))).capitalize() + ".", 72)
        for _ in range(9000)
    ]
    top, end = (
        "*** START OF THE PROJECT GUTENBERG EBOOK 1 ***\n\n\n",
        "\n\n\n*** END OF THE PROJECT GUTENBERG EBOOK 1 ***\n",
    )
    (folder / "book.txt").write_text(top + "\n\n".join(paragraphs) + end)
    return str(folder)


if __name__ == "__main__":
    main()
