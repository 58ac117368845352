"""Charts as inline SVG: text stays text, colours come from the page's CSS, every mark has a tooltip.

A chart is drawn `WIDTH` units wide for a column of about as many pixels, so that its letters have the page's size. Series are
told apart by CSS class: ``s0``, ``s1``, ... for trained drafters, ``untrained`` and ``unigram`` for the baselines.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH = 440
CHARACTER = 6.6
"""Width of a letter of the charts' text, in units."""


@dataclass(frozen=True)
class Interval:
    """A value with its confidence interval, of a series."""

    series: str
    label: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Line:
    """A polyline; `low` and `high` are a band around it, or whiskers where `marks` is set."""

    series: str
    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    marks: bool = False


def tag(name: str, content: Markup | str = "", title: str = "", **attributes: object) -> Markup:
    """An element. `title` is its tooltip; a trailing underscore of an attribute's name is dropped (``class_``)."""
    listed = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(_short(v))}"' for key, v in attributes.items())
    inner = (tag("title", escape(title)) if title else Markup("")) + escape(content)
    return Markup(f"<{name}{listed}>{inner}</{name}>" if inner else f"<{name}{listed}/>")


def _short(value: object) -> object:
    """Coordinates to a tenth of a unit keep the page small."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value


def figure(label: str, height: float, parts: Sequence[Markup], width: float = WIDTH) -> Markup:
    """An SVG of `width` x `height` units that reads out as `label`."""
    view = f"0 0 {_short(float(width))} {_short(float(height))}"
    return tag("svg", Markup("").join(parts), viewBox=view, width=_short(float(width)), role="img", aria_label=label)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers from `low` to `high`."""
    span = max(high - low, 1e-9)
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if span / (power * factor) <= count)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 10) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float, largest: float = 0.0) -> str:
    """A tick's label. On an axis up to `largest` beyond ten thousand all are written alike: 5k, 10k; 2M."""
    for limit, unit, factor in ((1e9, "G", 1e9), (1e6, "M", 1e6), (1e4, "k", 1e3)):
        if max(abs(value), largest) >= limit:
            return f"{value / factor:.3g}{unit}" if value else "0"
    return f"{value:,.10g}"


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def intervals(label: str, groups: Sequence[tuple[str, Sequence[Interval]]], floor: float = 1.0) -> Markup:
    """Dots with intervals: a band per group (chain, trees), a row per series in it. The axis begins at `floor`."""
    step, gap, top = 13.0, 11.0, 6.0
    left = 14 + CHARACTER * max(len(name) for name, _ in groups)
    highest = max(entry.high for _, entries in groups for entry in entries)
    low = min(floor, min(entry.low for _, entries in groups for entry in entries))
    place = _scale(low, highest + 0.02 * (highest - low), left, WIDTH - 12)
    height = top + sum(len(entries) * step + gap for _, entries in groups)
    parts = [
        tag("line", x1=place(tick), x2=place(tick), y1=top, y2=height, class_="floor" if tick == floor else "grid")
        + tag("text", number(tick), x=place(tick), y=height + 15, text_anchor="middle", class_="tick")
        for tick in ticks(low, highest, 6)
    ]
    y = top
    for name, entries in groups:
        middle = y + gap / 2 + len(entries) * step / 2
        parts.append(tag("text", name, x=left - 12, y=middle + 4, text_anchor="end", class_="name"))
        for row, entry in enumerate(entries):
            line = y + gap / 2 + (row + 0.5) * step
            text = f"{entry.label}, {name}: {entry.value:.3f} [{entry.low:.3f}, {entry.high:.3f}]"
            whisker = tag("line", x1=place(entry.low), x2=place(entry.high), y1=line, y2=line, class_="whisker")
            dot = _mark(entry.series, place(entry.value), line)
            parts.append(tag("g", whisker + dot, title=text, class_=f"series {entry.series}"))
        y += len(entries) * step + gap
        if name != groups[-1][0]:
            parts.append(tag("line", x1=0, x2=WIDTH, y1=y, y2=y, class_="rule"))
    parts.append(
        tag("text", "tokens per pass of the target", x=WIDTH - 12, y=height + 31, text_anchor="end", class_="axis")
    )
    return figure(label, height + 36, parts)


def _mark(series: str, x: float, y: float) -> Markup:
    """A disc for trained drafters, a ring for the untrained one, a diamond for unigram: told apart without colour too."""
    if series == "unigram":
        return tag("path", d=f"M{x:.1f} {y - 4.5:.1f}l4.5 4.5l-4.5 4.5l-4.5 -4.5z", class_="mark")
    return tag("circle", cx=x, cy=y, r=3.8 if series == "untrained" else 4.4, class_="mark")


def lines(
    label: str,
    entries: Sequence[Line],
    x_name: str,
    y_low: float | None = None,
    y_high: float | None = None,
    x_marks: Sequence[float] = (),
    x_ticks: Sequence[float] | None = None,
    percent: bool = False,
    width: float = WIDTH,
) -> Markup:
    """Lines over a common x axis. `x_marks` are thin verticals (ends of segments); `percent` writes y as a percentage."""
    entries = [entry for entry in entries if len(entry.x)]
    if not entries:
        return Markup("")
    height, top, bottom = 210.0, 8.0, 34.0
    values = [v for entry in entries for v in (*entry.y, *entry.low, *entry.high)]
    low, high = min(values) if y_low is None else y_low, max(values) if y_high is None else y_high
    if high <= low:
        high = low + 1.0
    y_ticks = ticks(low, high)
    names = [f"{tick:.0%}" if percent else number(tick) for tick in y_ticks]
    left = 12 + CHARACTER * max(map(len, names))
    xs = [x for entry in entries for x in entry.x]
    across = _scale(min(xs), max(xs), left + 6, width - 14)
    up = _scale(low, high, height - bottom, top)
    parts = [
        tag("line", x1=left, x2=width - 6, y1=up(tick), y2=up(tick), class_="grid")
        + tag("text", name, x=left - 7, y=up(tick) + 4, text_anchor="end", class_="tick")
        for tick, name in zip(y_ticks, names)
    ]
    parts += [tag("line", x1=across(x), x2=across(x), y1=top, y2=height - bottom, class_="mark-x") for x in x_marks]
    parts += [
        tag("text", number(tick, max(xs)), x=across(tick), y=height - bottom + 16, text_anchor="middle", class_="tick")
        for tick in (ticks(min(xs), max(xs), int(width / 70)) if x_ticks is None else x_ticks)
    ]
    parts.append(tag("text", x_name, x=width - 14, y=height - 3, text_anchor="end", class_="axis"))
    parts += [_line(entry, across, up, percent) for entry in entries]
    return figure(label, height, parts, width)


def _line(entry: Line, across: Callable[[float], float], up: Callable[[float], float], percent: bool) -> Markup:
    points = [(across(x), up(y)) for x, y in zip(entry.x, entry.y)]
    parts: list[Markup] = []
    if entry.low and not entry.marks:
        edge = [(across(x), up(y)) for x, y in zip(entry.x, entry.low)]
        edge += [(across(x), up(y)) for x, y in zip(reversed(entry.x), reversed(entry.high))]
        parts.append(tag("polygon", points=_points(edge), class_="band"))
    parts.append(tag("polyline", points=_points(points), class_="line"))
    if entry.marks:
        for n, (x, y) in enumerate(points):
            shown = f"{entry.y[n]:.1%}" if percent else f"{entry.y[n]:.3f}"
            text = f"{entry.label}, {entry.x[n]:,.0f}: {shown}"
            mark = _mark(entry.series, x, y)
            if entry.low:
                text += f" [{entry.low[n]:.3f}, {entry.high[n]:.3f}]"
                mark = tag("line", x1=x, x2=x, y1=up(entry.low[n]), y2=up(entry.high[n]), class_="whisker") + mark
            parts.append(tag("g", mark, title=text))
    else:
        parts[0] = tag("g", parts[0], title=f"{entry.label}: {entry.y[-1]:.3f} at the end")
    return tag("g", Markup("").join(parts), class_=f"series {entry.series}")


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def histogram(label: str, edges: Sequence[float], stacks: Sequence[tuple[str, str, Sequence[int]]]) -> Markup:
    """A small histogram without axes, for a table's row. `stacks` are (class, word, rows per bin), the lowest first."""
    width, height = 300.0, 34.0
    totals = [sum(column) for column in zip(*(counts for _, _, counts in stacks))]
    top, bar = max([*totals, 1]), width / len(totals)
    parts = [tag("line", x1=0, x2=width, y1=height - 0.5, y2=height - 0.5, class_="base")]
    for n, total in enumerate(totals):
        base, shapes = height - 1, []
        for name, _, counts in stacks:
            tall = counts[n] / top * (height - 3)
            if counts[n]:
                tall = max(tall, 0.8)  # A single row among thousands is still seen.
                shapes.append(tag("rect", x=n * bar, y=base - tall, width=bar - 0.8, height=tall, class_=name))
                base -= tall
        if total:
            words = ", ".join(f"{counts[n]:,} {word}" for _, word, counts in stacks if counts[n])
            last = edges[n + 1] - 1
            bounds = f"{edges[n]:,.0f}" if last == edges[n] else f"{edges[n]:,.0f} to {last:,.0f}"
            parts.append(tag("g", Markup("").join(shapes), title=f"{bounds} supervised tokens: {words}"))
    return figure(label, height, parts, width)


def histogram_axis(edges: Sequence[float]) -> Markup:
    """The axis below a column of `histogram`s."""
    width = 300.0
    place = _scale(edges[0], edges[-1], 0, width)
    parts = [
        tag("line", x1=place(tick), x2=place(tick), y1=0, y2=3, class_="base")
        + tag(
            "text",
            number(tick, edges[-1]),
            x=place(tick),
            y=15,
            text_anchor="middle" if tick else "start",
            class_="tick",
        )
        for tick in ticks(edges[0], edges[-1] * 0.97, 6)
    ]
    return figure("axis: supervised tokens in a sample", 18, parts, width)


def bar(label: str, shares: Sequence[float]) -> Markup:
    """A bar of as many pieces as a stage has jobs, each as long as its share of the longest bar."""
    width, height = 240.0, 12.0
    parts, x = [], 0.0
    for share in shares:
        wide = share * width
        parts.append(tag("rect", x=x, y=1, width=max(wide - (0.8 if wide > 3 else 0), 0.6), height=10, class_="job"))
        x += wide
    return figure(label, height, parts, width)
