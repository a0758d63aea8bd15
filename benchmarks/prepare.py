"""`lamp data prepare` against `tokenizers.encode_batch_fast` alone, in one run; memory of the whole process tree; gathering.

In:  a folder of real text (.txt), a tokenizer (a folder or tokenizer.json; default: one is trained), sizes in MB.
Out: MB/s of the command as a whole and after its tokenizer is loaded, the ratio to encode_batch_fast, by the clock and
     by processor time (which says more where others use the machine too), peak memory, files.

Run: .venv/bin/python benchmarks/prepare.py [TEXT_FOLDER] [TOKENIZER] [--mb 10 100 1000] [--kinds txt jsonl] [--work DIR]

The corpus is the paragraphs of the folder, shuffled and numbered over and over, so that no stretch of it comes twice as
it is. encode_batch_fast gets both cores, and texts that are in memory already; it runs before and after each command,
and its better time counts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import measured
import numpy as np
import psutil
import tokenizers

from lamplighter.data.corpus import entries

PEER_BYTES = 8_000_000
HEAD = (
    "               encode_batch_fast |    whole command    |  after the tokenizer | cpu of the command | memory    cache\n"
    "corpus         MB/s  MB/cpu-s    |     s   MB/s  ratio |     s    MB/s  ratio |     s    ratio     |     MB    files     MB"
)


def paragraphs(folder: Path) -> list[str]:
    found = []
    for path in sorted(folder.rglob("*.txt")):
        data = path.read_bytes()
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = data.decode("latin-1")
        found += [one.strip() for one in text.replace("\r\n", "\n").replace("\0", "").split("\n\n") if one.strip()]
    return found


def make_corpus(texts: list[str], path: Path, size: int, kind: str) -> None:
    rng, number, done = random.Random(1), 0, 0
    with open(path, "w", encoding="utf-8") as out:
        while done < size:
            rng.shuffle(texts)
            for text in texts:
                number += 1
                row = f"[{number}] {text}"
                done += out.write(row + "\n\n" if kind == "txt" else json.dumps({"id": number, "text": row}) + "\n")
                if done >= size:
                    break


def time_peer(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> tuple[float, float]:
    """MB a second, and a second of processor time, with all threads, on the same documents as the command (a .txt is one: given as paragraphs)."""
    sample, size = [], 0
    for number, text in enumerate(texts):
        sample.append(f"[{number}] {text}")
        size += len(sample[-1].encode())
        if size >= PEER_BYTES:
            break
    started, used = time.perf_counter(), time.process_time()
    tokenizer.encode_batch_fast(sample, add_special_tokens=False)
    return size / 1e6 / (time.perf_counter() - started), size / 1e6 / (time.process_time() - used)


def peak_memory(process: psutil.Popen) -> int:
    """The most that the process and all below it held at once, sampled."""
    peak = 0
    while process.poll() is None:
        total = 0
        for one in [process, *process.children(recursive=True)]:
            try:
                total += one.memory_info().rss
            except psutil.Error:
                continue
        peak = max(peak, total)
        time.sleep(0.02)
    return peak


def prepare(path: Path, tokenizer: Path, place: Path, workers: int | None) -> dict[str, float]:
    words = ["--data.paths", str(path), "--tokenizer.path", str(tokenizer), "--runs-dir", str(place), "--json"]
    words += ["--data.workers", str(workers)] if workers else []
    started, before = time.perf_counter(), _children_s()
    with open(place.with_suffix(".json"), "wb") as out:
        process = psutil.Popen([sys.executable, "-m", "lamplighter", "data", "prepare", *words], stdout=out)
        peak = peak_memory(process)
    seconds, used = time.perf_counter() - started, _children_s() - before
    assert process.returncode == 0, "lamp data prepare failed"
    made = json.loads(place.with_suffix(".json").read_text())
    return {**made, "whole_s": seconds, "cache_s": made["seconds"] - made["tokenizer_s"], "peak": peak, "cpu_s": used}


def _children_s() -> float:
    used = os.times()
    return used.children_user + used.children_system


def time_gather(folder: Path, length: int, rows: int) -> float:
    """Tokens a second of random windows."""
    from lamplighter.data.token_cache.reader import open_tokens

    split, rng = open_tokens(folder).train, np.random.default_rng(0)
    batches = [rng.integers(0, len(split) - length, rows) for _ in range(50)]
    best = 9e9
    for _ in range(5):
        started = time.perf_counter()
        for starts in batches:
            split.gather(starts, length)
        best = min(best, time.perf_counter() - started)
    return len(batches) * rows * length / best


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("texts", type=Path, nargs="?", help="without one: the embedded corpus, easier than real text")
    parser.add_argument("tokenizer", type=Path, nargs="?")
    parser.add_argument("--mb", type=float, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--kinds", nargs="+", default=["txt"])
    parser.add_argument("--workers", type=int)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--work", type=Path)
    wish = parser.parse_args()
    work = wish.work or Path(tempfile.mkdtemp(prefix="lamp-prepare-"))
    work.mkdir(exist_ok=True)
    texts = paragraphs(wish.texts) if wish.texts else [entry.text for entry in entries(1, 20_000)]
    where = wish.tokenizer or train_tokenizer(texts, work)
    peer = tokenizers.Tokenizer.from_file(str(where if where.is_file() else where / "tokenizer.json"))
    measured.say_machine()
    print(HEAD)
    for kind in wish.kinds:
        for size in wish.mb:
            path = work / f"{size:g}MB.{kind}"
            if not path.exists():
                make_corpus(texts, path, int(size * 1e6), kind)
            for _ in range(wish.repeat):
                one_row(path, peer, texts, where, work / "runs", wish.workers)
    for length, rows in ((1024, 32), (256, 64), (64, 512)):
        speed = time_gather(next((work / "runs" / ".cache").glob("*/manifest.json")).parent, length, rows)
        print(f"gather {rows} x {length}: {speed / 1e6:.0f} M tokens/s")
    if wish.work is None:
        shutil.rmtree(work)


def one_row(
    path: Path, peer: tokenizers.Tokenizer, texts: list[str], where: Path, place: Path, workers: int | None
) -> None:
    shutil.rmtree(place, ignore_errors=True)
    before = time_peer(peer, texts)
    row = prepare(path, where, place, workers)
    after = time_peer(peer, texts)
    speed, of_cpu = max(before[0], after[0]), max(before[1], after[1])
    mb = path.stat().st_size / 1e6
    whole, cache = mb / row["whole_s"], mb / row["cache_s"]
    print(f"{path.name:<14} {speed:>4.2f} {of_cpu:>9.2f}    | {row['whole_s']:>5.1f} {whole:>6.0f} {whole / speed:>6.1f} |"
          f" {row['cache_s']:>5.1f} {cache:>7.0f} {cache / speed:>6.1f} | {row['cpu_s']:>5.1f} {mb / row['cpu_s'] / of_cpu:>8.1f}"
          f"     | {row['peak'] / 1e6:>6.0f} {row['files']:>8} {row['disk_bytes'] / 1e6:>6.0f}", flush=True)  # fmt: skip


def train_tokenizer(texts: list[str], work: Path) -> Path:
    from lamplighter.data.tokenizer import train

    train(texts, 8192).save(work / "tokenizer")
    return work / "tokenizer"


if __name__ == "__main__":
    main()
