"""Lengths in tokens become advice on window, packing and batch; pure arithmetic.

In:  an array of lengths, the window and the batch that are set.
Out: percentiles, bars, what a window holds and cuts, the padding of each strategy, advice with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from lamplighter.data.chat.packing import STRATEGIES, padding_share

Lengths = np.ndarray[Any, np.dtype[Any]]
_WINDOWS = "windows"
_HOLDS = 0.98  # of the examples whole: the window that is advised
_LITTLE = 0.05  # padding that is not worth a longer window
_FEW_STEPS = 20  # in an epoch: too few updates to learn by
SMALL_STEP, MANY_STEPS = 8192, 10_000
_MEANINGS = {
    "to seq_len": "each alone, padded to the window",
    "to 128-multiple": "each padded to the next 128",
    "dynamic": "batches in random order, padded to the longest",
    "grouped": "batches of like length, padded to the longest",
    "packed": "several in a window, longest first",
    _WINDOWS: "one stream, cut into windows; the last one is padded",
}


@dataclass(frozen=True)
class Spread:
    """Lengths in nine numbers."""

    count: int = 0
    total: int = 0
    mean: float = 0.0
    shortest: int = 0
    p5: int = 0
    p50: int = 0
    p95: int = 0
    p99: int = 0
    longest: int = 0


def spread(lengths: Lengths) -> Spread:
    """Percentiles are lengths that occur: p95 holds at least 95 % whole."""
    if not len(lengths):
        return Spread()
    total = int(np.sum(lengths, dtype=np.int64))
    percentiles = (int(n) for n in np.quantile(lengths, (0, 0.05, 0.5, 0.95, 0.99, 1), method="inverted_cdf"))
    return Spread(len(lengths), total, total / len(lengths), *percentiles)


@dataclass(frozen=True)
class Bar:
    """How many lengths lie in low..high, both included, and how many tokens those are."""

    low: int
    high: int
    count: int
    tokens: int


def bars(lengths: Lengths, most: int = 24) -> list[Bar]:
    """A histogram: of equal steps where the lengths are alike, else growing ones (1, 1.5, 2, 3, 4, 6, 8, ...)."""
    if not len(lengths):
        return []
    least, top = int(lengths.min()), int(lengths.max())
    if top <= 8 * max(1, least) or top <= most:
        step = max(1, math.ceil((top - least + 1) / most))
        edges = [*range(least, top + 1, step), least + step * math.ceil((top - least + 1) / step)]
    else:
        parts = (1, 1.5) if math.log2(top / max(1, least)) < most / 2 - 1 else (1,)
        edges = [*dict.fromkeys(max(1, int(part * 2**n)) for n in range(64) for part in parts if 2**n <= 2 * top)]
        begin = max(0, sum(edge <= least for edge in edges) - 1)
        end = next(n for n, edge in enumerate(edges) if edge > top)
        edges = edges[begin : end + 1]
        if least < edges[0]:
            edges = [least, *edges]
    counts, _ = np.histogram(lengths, bins=edges)
    tokens, _ = np.histogram(lengths, bins=edges, weights=lengths.astype(np.float64))
    made = zip(edges[:-1], edges[1:], counts.tolist(), tokens.tolist(), strict=True)
    return [Bar(low, high - 1, int(count), round(total)) for low, high, count, total in made]


@dataclass(frozen=True)
class Window:
    """What windows of one length would do."""

    seq_len: int
    whole: int
    """Lengths that fit into one window."""
    whole_share: float
    over: int
    beyond: int
    """Tokens after the first window of those that do not fit: cut off where each is an example of its own."""
    beyond_share: float
    padding_alone: float
    """Share of positions that would be padding with each alone in a window."""


def window(lengths: Lengths, seq_len: int) -> Window:
    """Count what fits."""
    count, total = len(lengths), int(np.sum(lengths, dtype=np.int64))
    long = lengths[lengths > seq_len].astype(np.int64)
    beyond = int(long.sum()) - seq_len * len(long)
    alone = 1 - (total - beyond) / (count * seq_len) if count else 0.0
    whole = count - len(long)
    return Window(
        seq_len,
        whole,
        whole / max(1, count),
        over=len(long),
        beyond=beyond,
        beyond_share=beyond / max(1, total),
        padding_alone=alone,
    )


def windows(lengths: Lengths, seq_len: int) -> list[Window]:
    """The powers of two around the lengths, and the one that is set."""
    top = int(lengths.max()) if len(lengths) else 1
    sizes = {2**n for n in range(5, 21) if 2 ** (n - 1) < top or 2**n <= 64}
    return [window(lengths, size) for size in sorted({*sorted(sizes)[-10:], seq_len})]


@dataclass(frozen=True)
class Padding:
    """What a strategy would fill up."""

    strategy: str
    share: float
    work: float
    """Positions that are computed for each one that counts."""
    about: str


def padding(lengths: Lengths, seq_len: int, batch_size: int) -> list[Padding]:
    """Of each strategy; those that keep examples apart cut at seq_len."""
    shares = {name: padding_share(np.asarray(lengths, np.int64), name, seq_len, batch_size) for name in STRATEGIES}
    total = int(np.sum(lengths, dtype=np.int64))
    stream = math.ceil(max(1, total - 1) / seq_len) * seq_len
    shares[_WINDOWS] = 1 - (total - 1) / stream if total > 1 else 0.0
    return [Padding(name, share, 1 / max(1e-9, 1 - share), _MEANINGS[name]) for name, share in shares.items()]


# ---------------------------------------------------------------- advice


@dataclass(frozen=True)
class LengthAdvice:
    """advice / because / set."""

    advice: str
    because: str
    set: str


def fitting(lengths: Lengths, share: float = _HOLDS) -> int:
    """The least power of two, from 32 on, that holds so large a share whole."""
    need = int(np.quantile(lengths, share, method="inverted_cdf")) if len(lengths) else 1
    return max(32, 1 << (max(1, need) - 1).bit_length())


def packing_window(lengths: Lengths) -> int:
    """The least power of two that holds enough of them whole, and in which packing leaves little padding; of few examples, which
    leave more of any window empty, the one in which it leaves least."""
    first = fitting(lengths)
    shares: dict[int, float] = {}
    for size in (first << doublings for doublings in range(5)):
        shares[size] = padding_share(np.asarray(lengths, np.int64), "packed", size, 1)
        if shares[size] <= _LITTLE:
            return size
    return min(shares, key=lambda size: (shares[size], size))


def advise(lengths: Lengths, seq_len: int, batch_size: int, examples: bool) -> list[LengthAdvice]:
    """On the window, the packing and the batch; `examples` are kept apart, documents of text follow each other."""
    if not len(lengths):
        return []
    found = [*_advise_examples(lengths, seq_len, batch_size)] if examples else [*_advise_text(lengths, seq_len)]
    best = packing_window(lengths) if examples else seq_len
    return [*found, _advise_batch(lengths, best, batch_size, examples)]


def _percent(share: float) -> str:
    """98.2 %, but never 100 % or 0 % of what is not all or nothing."""
    text = f"{share:.1%}"
    if text == "100.0%" and share < 1:
        text = "over 99.9%"
    if text == "0.0%" and share > 0:
        text = "under 0.1%"
    return text.replace("%", " %")


def _advise_examples(lengths: Lengths, seq_len: int, batch_size: int) -> Sequence[LengthAdvice]:
    facts, holds, best = spread(lengths), fitting(lengths), packing_window(lengths)
    now, then = window(lengths, seq_len), window(lengths, best)
    shares = {one.strategy: one for one in padding(lengths, best, batch_size)}
    because = (
        f"p50 = {facts.p50:,}, p95 = {facts.p95:,}, longest = {facts.longest:,} tokens: {best:,} holds"
        f" {_percent(then.whole_share)} whole ({then.over:,} are longer, {then.beyond:,} tokens beyond)"
    )
    if best > holds:
        tight = _percent(padding_share(np.asarray(lengths, np.int64), "packed", holds, batch_size))
        because += (
            f"; {holds:,} would do, but leaves {tight} padding when packed, {best:,} {_percent(shares['packed'].share)}"
        )
    if seq_len > best:
        because += (
            f"; alone in {seq_len:,}, {_percent(now.padding_alone)} would be padding,"
            f" {1 / max(1e-9, 1 - now.padding_alone):.0f} x the work"
        )
    elif seq_len < best:
        because += f"; {seq_len:,} holds {_percent(now.whole_share)} whole and cuts {now.over:,} of {facts.count:,}"
    what = f"a window of {best:,} tokens" if best != seq_len else f"keep the window of {seq_len:,} tokens"
    costs = f"in windows of {best:,}: padding is {_percent(shares['to seq_len'].share)} with each alone," + ",".join(
        f" {_percent(shares[name].share)} {name}" for name in ("dynamic", "grouped", "packed")
    )
    return [
        LengthAdvice(what, because, f"data.seq_len: {best}"),
        LengthAdvice("pack: packed, as data.packing auto does", costs, "data.packing: packed"),
    ]


def _advise_text(lengths: Lengths, seq_len: int) -> Sequence[LengthAdvice]:
    facts, now = spread(lengths), window(lengths, seq_len)
    alone = _percent(now.padding_alone)
    if now.beyond_share > 0.5 and fitting(lengths, 0.5) > seq_len:
        best = min(4096, fitting(lengths, 0.9))
        then = window(lengths, best)
        what, value = (f"a longer window, up to {best:,}", best) if best > seq_len else ("keep the window", seq_len)
        because = (
            f"p50 = {facts.p50:,}, p95 = {facts.p95:,} tokens: {now.over:,} of {facts.count:,} documents go on after"
            f" {seq_len:,} tokens, and {_percent(now.beyond_share)} of all tokens stand there, seen without their beginning"
            f" (none is lost: the next window has them); {best:,} holds {_percent(then.whole_share)} whole"
        )
    else:
        what, value = f"keep the window of {seq_len:,} tokens", seq_len
        because = (
            f"p50 = {facts.p50:,}, p95 = {facts.p95:,} tokens: {_percent(now.whole_share)} of the documents fit whole,"
            f" and {_percent(1 - now.beyond_share)} of all tokens stand in the first {seq_len:,} of their document"
            + (f"; the {now.over:,} longer ones go on in further windows" if now.over else "")
        )
    stream = padding(lengths, seq_len, 1)[-1]
    costs = f"documents follow each other: padding {_percent(stream.share)}; each alone in a window: {alone}"
    return [
        LengthAdvice(what, because, f"data.seq_len: {value}"),
        LengthAdvice("pack: windows over the stream", costs, "data.packing: windows"),
    ]


def _advise_batch(lengths: Lengths, seq_len: int, batch_size: int, examples: bool) -> LengthAdvice:
    total = int(np.minimum(lengths, seq_len).sum(dtype=np.int64)) if examples else int(np.sum(lengths, dtype=np.int64))
    step = batch_size * seq_len
    steps = max(1, math.ceil(total / step))
    sums = f"{batch_size} x {seq_len:,} = {step:,} tokens a step; {total:,} tokens make {steps:,} steps an epoch"
    if steps < _FEW_STEPS and batch_size > 1:
        fewer = max(1, 2 ** int(math.log2(max(1.0, total / (_FEW_STEPS * seq_len)))))
        if fewer < batch_size:
            return LengthAdvice(f"a smaller batch: {fewer}", f"{sums}: few to learn by", f"train.batch_size: {fewer}")
    if step < SMALL_STEP and steps > MANY_STEPS:
        more = max(batch_size, 2 ** math.ceil(math.log2(SMALL_STEP / seq_len)))
        sums += f"; {more} would make {math.ceil(total / (more * seq_len)):,} steps with a steadier gradient"
        return LengthAdvice(f"a larger batch: {more}", sums, f"train.batch_size: {more}")
    return LengthAdvice(f"keep the batch of {batch_size}", sums, f"train.batch_size: {batch_size}")


# ---------------------------------------------------------------- drawn


_EIGHTHS = " ▏▎▍▌▋▊▉"
WIDTH = 44


def draw(bars: Sequence[Bar], marks: Mapping[str, int], width: int = WIDTH) -> list[str]:
    """One line a bar: lengths, bar, count, share of documents, share of tokens, the marks that lie in it."""
    most = max((bar.count for bar in bars), default=0)
    total = max(1, sum(bar.count for bar in bars))
    tokens = max(1, sum(bar.tokens for bar in bars))
    names = [f"{bar.low:,}-{bar.high:,}" if bar.high > bar.low else f"{bar.low:,}" for bar in bars]
    wide = max(map(len, [*names, "tokens"]))
    lines = [f"{'tokens':>{wide}}  {'':<{width}} {'count':>11} {'of all':>7} {'of tokens':>9}"] if bars else []
    for bar, name in zip(bars, names, strict=True):
        inside = [mark for mark, at in marks.items() if bar.low <= at <= bar.high]
        said = f"  <- {', '.join(inside)}" if inside else ""
        line = f"{name:>{wide}}  {_bar(bar.count, most, width):<{width}} {bar.count:>11,}"
        lines.append(f"{line} {bar.count / total:>7.1%} {bar.tokens / tokens:>9.1%}{said}")
    return lines


def _bar(count: int, most: int, width: int) -> str:
    """At least a sliver for what is not nothing."""
    eighths = max(1, round(8 * width * count / most)) if count else 0
    full, part = divmod(eighths, 8)
    return "█" * full + _EIGHTHS[part].strip()


def svg(bars: Sequence[Bar], marks: Mapping[str, int], title: str, about: str) -> str:
    """The same as a picture that any browser shows, on light and dark paper."""
    left, top, wide, high, foot = 70, 56, 860, 300, 84
    most = max((bar.count for bar in bars), default=1) or 1
    step = wide / max(1, len(bars))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + wide + 30} {top + high + foot}"'
        ' font-family="sans-serif" font-size="12" role="img">',
        f"<title>{escape(title)}</title><desc>{escape(about)}</desc>",
        '<rect width="100%" height="100%" fill="#fffdf7"/>',
        f'<text x="{left}" y="24" font-size="16" fill="#222">{escape(title)}</text>',
        f'<text x="{left}" y="42" fill="#666">{escape(about)}</text>',
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = top + high * (1 - share)
        parts.append(f'<line x1="{left}" x2="{left + wide}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#666">{most * share:,.0f}</text>')
    for number, bar in enumerate(bars):
        tall = high * bar.count / most
        x, y = left + number * step, top + high - tall
        words = f"{bar.low:,} to {bar.high:,} tokens: {bar.count:,} documents, {bar.tokens:,} tokens"
        parts.append(
            f'<rect x="{x + 1:.1f}" y="{y:.1f}" width="{step - 2:.1f}" height="{tall:.1f}" fill="#d9902f">'
            f"<title>{escape(words)}</title></rect>"
        )
        at = f"{x + step / 2:.1f} {top + high + 14}"
        turn = f'transform="translate({at}) rotate(40)"'
        parts.append(f'<text {turn} fill="#444">{bar.low:,}</text>')
    parts += _marks(bars, marks, left, top=top, step=step, high=high)
    parts.append(
        f'<text x="{left + wide}" y="{top + high + foot - 10}" text-anchor="end" fill="#666">'
        "tokens in a document (left edge of each bar)</text></svg>"
    )
    return "\n".join(parts) + "\n"


def _marks(
    bars: Sequence[Bar], marks: Mapping[str, int], left: float, top: float, step: float, high: float
) -> list[str]:
    """A line for each mark, where it lies inside its bar; names that would meet stand below each other."""
    parts: list[str] = []
    for row, (name, at) in enumerate(sorted(marks.items(), key=lambda mark: mark[1])):
        number = next((n for n, bar in enumerate(bars) if bar.low <= at <= bar.high), None)
        if number is None:
            continue
        bar = bars[number]
        x = left + (number + (at - bar.low + 0.5) / (bar.high - bar.low + 1)) * step
        y = top + 12 + 14 * (row % 4)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + high}" stroke="#27496d" stroke-dasharray="4 3"/>'
        )
        parts.append(f'<text x="{x + 4:.1f}" y="{y}" fill="#27496d">{escape(name)} = {at:,}</text>')
    return parts
