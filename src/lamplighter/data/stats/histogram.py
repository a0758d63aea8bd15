"""Lengths as a picture: bars of characters for a terminal, an SVG for everything else.

In:  bars (data/lengths), marks such as p95 or the window.
Out: lines of text; the text of an .svg file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from lamplighter.data.stats.lengths import Bar

EIGHTHS = " ▏▎▍▌▋▊▉"
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
    return "█" * full + EIGHTHS[part].strip()


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
    parts += _marks(bars, marks, left, top, step, high)
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
