"""Small line and point charts as inline SVG: they scale to a phone and need no script."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.etree.ElementTree import Element, SubElement, tostring

COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#475569", "#0891b2")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 360, 72, 48, 16, 16
Points = Sequence[tuple[float, float]]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover ``[low, high]``."""
    if high <= low:
        high = low + 1
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= raw)
    first = math.floor(low / step + 1e-9) * step
    values = [first]
    while values[-1] < high - 1e-9:
        values.append(values[-1] + step)
    return [round(v, 10) for v in values]


class Axes:
    """Data to pixels, with the grid."""

    def __init__(self, series: Mapping[str, Points], *, zero: bool, logarithmic: bool) -> None:
        xs = sorted({x for points in series.values() for x, _ in points})
        ys = [y for points in series.values() for _, y in points]
        self.log = logarithmic
        self.x_ticks = xs if len(xs) <= 8 and logarithmic else ticks(xs[0], xs[-1])
        self.y_ticks = ticks(0 if zero else min(ys), max(ys))

    def _share(self, value: float, marks: Sequence[float], log: bool) -> float:
        low, high = marks[0], marks[-1]
        if log:
            value, low, high = (math.log2(max(v, 1e-9)) for v in (value, low, high))
        return 0.5 if high == low else (value - low) / (high - low)

    def x(self, value: float) -> float:
        share = self._share(value, self.x_ticks, self.log)
        return LEFT + share * (WIDTH - LEFT - RIGHT - 12) + 6

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - self._share(value, self.y_ticks, False) * (HEIGHT - BOTTOM - TOP)

    def draw_grid(self, svg: Element, x_name: str, y_name: str) -> None:
        for value in self.y_ticks:
            y = f"{self.y(value):.1f}"
            right = str(WIDTH - RIGHT)
            SubElement(svg, "line", {"class": "g", "x1": str(LEFT), "x2": right, "y1": y, "y2": y})
            _text(svg, f"{value:g}", LEFT - 8, self.y(value) + 4, "end")
        for value in self.x_ticks:
            _text(svg, f"{value:g}", self.x(value), HEIGHT - BOTTOM + 20)
        _text(svg, x_name, (LEFT + WIDTH) / 2, HEIGHT - 6)
        name = _text(svg, y_name, 0, 0)
        name.set("transform", f"translate(14 {HEIGHT / 2}) rotate(-90)")


def _text(svg: Element, text: str, x: float, y: float, anchor: str = "middle") -> Element:
    element = SubElement(svg, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor})
    element.text = text
    return element


def _draw_series(svg: Element, axes: Axes, name: str, points: Points, colour: str, lines: bool):
    at = [(f"{axes.x(x):.1f}", f"{axes.y(y):.1f}") for x, y in points]
    if lines and len(at) > 1:
        path = " ".join(",".join(pair) for pair in at)
        look = {"fill": "none", "stroke": colour, "stroke-width": "2"}
        SubElement(svg, "polyline", {"points": path, **look})
    for (px, py), (x, y) in zip(at, points, strict=True):
        dot = SubElement(svg, "circle", {"cx": px, "cy": py, "r": "5", "fill": colour})
        SubElement(dot, "title").text = f"{name}: {x:g}, {y:.3g}"


def chart(
    title: str,
    series: Mapping[str, Points],
    *,
    x: str,
    y: str,
    lines: bool = True,
    zero: bool = True,
    logarithmic: bool = False,
    names: Sequence[str] = (),
) -> str:
    """A ``<figure>`` with the chart and its legend; empty without any point.

    Args:
        series: points by name. logarithmic: the x axis, base 2. names: all that the page's charts
            may show, so that each has one colour in all of them.
    """
    series = {name: sorted(points) for name, points in series.items() if points}
    if not series:
        return ""
    axes = Axes(series, zero=zero, logarithmic=logarithmic)
    figure = Element("figure")
    SubElement(figure, "figcaption").text = title
    view = {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "role": "img", "aria-label": title}
    svg = SubElement(figure, "svg", view)
    axes.draw_grid(svg, x, y)
    legend = SubElement(figure, "ul", {"class": "legend"})
    order = [*names, *(name for name in series if name not in names)]
    for name, points in series.items():
        colour = COLOURS[order.index(name) % len(COLOURS)]
        _draw_series(svg, axes, name, points, colour, lines)
        item = SubElement(legend, "li")
        SubElement(item, "i", {"style": f"background:{colour}"}).tail = name
    return tostring(figure, encoding="unicode", method="html")
