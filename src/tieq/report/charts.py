"""Two plots of a report: what the table costs by role and bits, and files by size and KL."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from tieq.report.svg import Axis, Drawing, text_width, tick_label

_SIZE = 12.0
_KL = "KL, nats per token"
# Class of a series in the style sheet, and its marker, so that colour is not the only difference.
_ROLES = {"lookup": ("series-1", "circle"), "logits": ("series-2", "square"), "both": ("series-3", "diamond")}


@dataclasses.dataclass(frozen=True)
class Point:
    """A file in the plot of sizes: its name, bytes, KL with standard error, and whose it is."""

    name: str
    size: int
    kl: float
    error: float | None
    kind: str

    @property
    def drawable(self) -> bool:
        """Whether a logarithmic axis can hold it."""
        return self.size > 0 and _is_drawable(self.kl)


@dataclasses.dataclass(frozen=True)
class _Frame:
    """The plot's inside in pixels, and its two axes."""

    left: float
    right: float
    top: float
    bottom: float
    x: Axis
    y: Axis


def draw_costs(probe: dict[str, Any], own_bits: Sequence[float], width: float) -> str | None:
    """KL by role against bits per weight, measured with standard errors and predicted; None where nothing is drawable.

    Args:
        probe: the document of ``tieq probe``.
        own_bits: bits per weight of the export's own tables, marked in the picture.
        width: of the picture, in pixels.
    """
    schemes = sorted(probe["schemes"], key=lambda entry: (entry["bits_per_weight"], entry["scheme"]))
    shown: list[float] = []
    bits: list[float] = []
    for entry in schemes:
        costs = [cost for role in _ROLES for cost in (entry["measured"][role]["kl"]["value"], entry["predicted"][role])]
        drawable = [cost for cost in costs if _is_drawable(cost)]
        shown += drawable
        bits += [entry["bits_per_weight"]] if drawable else []
    if not shown:
        return None
    height = 300.0 if width < 500 else 360.0
    drawing = Drawing(width, height, "KL against bits per weight of the table, by role: " + _cost_words(schemes))
    top = 26.0 + 20.0 * (2 if width < 500 else 1)
    frame = _frame(width, height, top, [*bits, *own_bits], shown, x_span=math.inf)
    _draw_axes(drawing, frame, "bits per weight", _KL)
    for value in dict.fromkeys(own_bits):
        drawing.line(frame.x.at(value), frame.top, frame.x.at(value), frame.bottom, "own")
    if own_bits:
        x = frame.x.at(own_bits[0])
        side = (x - 4, "end") if x > (frame.left + frame.right) / 2 else (x + 4, "start")
        drawing.text(side[0], frame.bottom - 6, "this export", "quiet", side[1], 11)
    for role, (kind, shape) in _ROLES.items():
        predicted = [(entry["bits_per_weight"], entry["predicted"][role]) for entry in schemes]
        _draw_curve(drawing, frame, predicted, f"{kind} predicted")
        measured = [(entry["bits_per_weight"], entry["measured"][role]["kl"]) for entry in schemes]
        _draw_curve(drawing, frame, [(x, found["value"]) for x, found in measured], kind)
        for x, found in measured:
            if _is_drawable(found["value"]):
                _draw_error(drawing, frame, x, found["value"], found["standard_error"], kind)
                drawing.marker(frame.x.at(x), frame.y.at(found["value"]), shape, f"{kind} mark", 4)
    _draw_legend(drawing, width)
    return drawing.source()


def _is_drawable(value: float | None) -> bool:
    """Whether a logarithmic axis can hold a value."""
    return value is not None and math.isfinite(value) and value > 0


def _cost_words(schemes: list[dict[str, Any]]) -> str:
    return "; ".join(
        f"{entry['scheme']} at {entry['bits_per_weight']:.2f} bits: "
        + ", ".join(f"{role} {_said(entry['measured'][role]['kl']['value'])}" for role in _ROLES)
        for entry in schemes
    )


def _said(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"


def _draw_legend(drawing: Drawing, width: float) -> None:
    x, y = 4.0, 16.0
    for role, (kind, shape) in _ROLES.items():
        drawing.marker(x + 6, y - 4, shape, f"{kind} mark", 4)
        drawing.text(x + 16, y, role, size=_SIZE)
        x += 16 + text_width(role, _SIZE) + 14
    if width < 500:
        x, y = 4.0, 36.0
    for said, kind in (("measured", "series-3"), ("predicted", "series-3 predicted")):
        drawing.line(x, y - 4, x + 24, y - 4, kind)
        drawing.text(x + 30, y, said, size=_SIZE)
        x += 30 + text_width(said, _SIZE) + 14


def draw_sizes(points: Sequence[Point], width: float) -> str | None:
    """KL against size, both logarithmic where the files span much; None where nothing is drawable.

    Each point has the number of its place in ``points``, from 1, and its name where the picture is wide.
    """
    shown = [(index, point) for index, point in enumerate(points, 1) if point.drawable]
    if not shown:
        return None
    height = 300.0 if width < 500 else 400.0
    said = "; ".join(f"{index} {p.name}, {p.size / 1e6:.1f} MB, KL {p.kl:.3g}" for index, p in shown)
    drawing = Drawing(width, height, f"KL against file size: {said}")
    tall = [value for _, p in shown for value in (p.kl + (p.error or 0.0), p.kl - (p.error or 0.0)) if value > 0]
    sizes = [p.size / 1e6 for _, p in shown]
    if width >= 500 and len(shown) > 2:
        sizes.append(min(sizes) * (min(sizes) / max(sizes)) ** 0.2)  # room for names on the left
    frame = _frame(width, height, 26.0, sizes, tall)
    _draw_axes(drawing, frame, "file size, MB", _KL)
    spots = [(frame.x.at(p.size / 1e6), frame.y.at(p.kl)) for _, p in shown]
    for (_, point), (x, y) in zip(shown, spots, strict=True):
        _draw_error(drawing, frame, point.size / 1e6, point.kl, point.error, point.kind)
        drawing.marker(
            x, y, {"ours": "circle", "peer": "square", "beside": "triangle"}[point.kind], f"{point.kind} mark"
        )
    labels = [str(index) if width < 500 else f"{index} {point.name}" for index, point in shown]
    for label, spot, place in zip(labels, spots, _placed(labels, spots, frame), strict=True):
        x, baseline = place
        end = (min(max(spot[0], x), x + text_width(label, _SIZE)), min(max(spot[1], baseline - 11), baseline + 3))
        if math.dist(spot, end) > 10:
            drawing.line(*spot, *end, "leader")
        drawing.text(x, baseline, label, size=_SIZE)
    return drawing.source()


def _placed(labels: list[str], spots: list[tuple[float, float]], frame: _Frame) -> list[tuple[float, float]]:
    """A place for each label (left end, baseline) that covers as little of points and other labels as can be."""
    taken = [(x - 7, y - 7, x + 7, y + 7) for x, y in spots]
    places = []
    for label, (x, y) in zip(labels, spots, strict=True):
        wide, best = text_width(label, _SIZE), (math.inf, 0.0, 0.0)
        for rank, distance in enumerate((10.0, 24.0, 40.0, 58.0, 78.0)):
            for side, (across, down) in enumerate(
                ((1, 0), (-1, 0), (0, -1), (0, 1), (0.8, -0.8), (0.8, 0.8), (-0.8, -0.8), (-0.8, 0.8))
            ):
                left = x + across * distance - wide * (0.5 - across / 2 if abs(across) in (0, 1) else across < 0)
                left = min(max(left, frame.left + 2), frame.right - wide)
                base = y + down * (distance + 2) + 4
                box = (left - 2, base - 12, left + wide + 2, base + 4)
                outside = 400.0 if box[1] < frame.top or box[3] > frame.bottom else 0.0
                end = (min(max(x, left), left + wide), min(max(y, base - 11), base + 3))
                crossed = sum(_crosses((x, y), end, other) for other in taken if not _holds(other, x, y))
                cost = outside + 60 * crossed + sum(_overlap(box, other) for other in taken) + 6 * rank + side
                best = min(best, (cost, left, base))
        _, left, base = best
        taken.append((left - 2, base - 12, left + wide + 2, base + 4))
        places.append((left, base))
    return places


def _holds(box: tuple[float, float, float, float], x: float, y: float) -> bool:
    return box[0] <= x <= box[2] and box[1] <= y <= box[3]


def _crosses(start: tuple[float, float], end: tuple[float, float], box: tuple[float, float, float, float]) -> bool:
    """Whether a leader from a point to its label runs through a box."""
    steps = [index / 16 for index in range(17)]
    places = ((start[0] + step * (end[0] - start[0]), start[1] + step * (end[1] - start[1])) for step in steps)
    return any(_holds(box, x, y) for x, y in places)


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> float:
    """Common area, in square pixels."""
    across = min(one[2], other[2]) - max(one[0], other[0])
    down = min(one[3], other[3]) - max(one[1], other[1])
    return across * down if across > 0 and down > 0 else 0.0


def _frame(
    width: float, height: float, top: float, xs: Sequence[float], ys: Sequence[float], *, x_span: float = 2.5
) -> _Frame:
    left, right, bottom = 50.0, width - 10.0, height - 42.0
    return _Frame(
        left, right, top, bottom, Axis.over(xs, left, right, span=x_span), Axis.over(ys, bottom, top, span=2.5)
    )


def _draw_axes(drawing: Drawing, frame: _Frame, x_title: str, y_title: str) -> None:
    wide = frame.right - frame.left
    for value in frame.y.ticks(6):
        y = frame.y.at(value)
        drawing.line(frame.left, y, frame.right, y, "grid")
        drawing.text(frame.left - 6, y + 4, tick_label(value), "quiet", "end", 11)
    for value in frame.x.ticks(5 if wide < 400 else 8):
        x = frame.x.at(value)
        drawing.line(x, frame.top, x, frame.bottom, "grid")
        drawing.text(x, frame.bottom + 16, tick_label(value), "quiet", "middle", 11)
    drawing.path([(frame.left, frame.top), (frame.left, frame.bottom), (frame.right, frame.bottom)], "axis")
    drawing.text((frame.left + frame.right) / 2, frame.bottom + 36, x_title, "quiet", "middle", _SIZE)
    drawing.text(4, frame.top - 10, y_title, "quiet", size=_SIZE)


def _draw_curve(drawing: Drawing, frame: _Frame, values: Sequence[tuple[float, float | None]], kind: str) -> None:
    points = [(frame.x.at(x), frame.y.at(y)) for x, y in values if y is not None and _is_drawable(y)]
    if len(points) > 1:
        drawing.path(points, f"{kind} curve")


def _draw_error(drawing: Drawing, frame: _Frame, x: float, y: float, error: float | None, kind: str) -> None:
    if not error:
        return
    place = frame.x.at(x)
    # A logarithmic axis has no place for what is not positive: the bar ends at its foot.
    low = frame.y.at(max(y - error, frame.y.low))
    high = frame.y.at(y + error)
    drawing.line(place, low, place, high, f"{kind} error")
    for end in (low, high):
        drawing.line(place - 4, end, place + 4, end, f"{kind} error")
