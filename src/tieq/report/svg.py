"""Elements of inline SVG, and axes: what the drawings of a report share. Same arguments, same bytes."""

from __future__ import annotations

import dataclasses
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence

# Width of a glyph of the page's sans serif over its font size, on the wide side, so that boxes do not overflow.
_GLYPH = 0.58
# XML has no place for these, escaped or not.
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class Drawing:
    """An SVG picture that takes its colours from the page's style sheet by class names.

    Args:
        width: in units that are pixels where the picture is shown at its own size.
        height: likewise.
        label: what it shows, in words, for those who cannot see it.
    """

    def __init__(self, width: float, height: float, label: str) -> None:
        box = f"0 0 {number(width)} {number(height)}"
        self._root = ET.Element("svg", {"viewBox": box, "role": "img", "aria-label": clean(label)})
        self._root.set("width", number(width))
        self._root.set("height", number(height))

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        """A straight line."""
        self._add("line", kind, x1=x1, y1=y1, x2=x2, y2=y2)

    def rectangle(self, x: float, y: float, width: float, height: float, kind: str, radius: float = 0) -> None:
        """A rectangle, its corners rounded by ``radius``."""
        self._add("rect", kind, x=x, y=y, width=width, height=height, rx=radius)

    def path(self, points: Sequence[tuple[float, float]], kind: str, *, closed: bool = False) -> None:
        """Straight lines through points."""
        steps = " L".join(f"{number(x)} {number(y)}" for x, y in points)
        ET.SubElement(self._root, "path", {"class": kind, "d": f"M{steps}" + (" Z" if closed else "")})

    def text(self, x: float, y: float, said: str, kind: str = "", anchor: str = "start", size: float = 12) -> None:
        """One line of text, ``y`` its baseline."""
        places = {"x": number(x), "y": number(y), "text-anchor": anchor, "font-size": number(size)}
        element = ET.SubElement(self._root, "text", {**({"class": kind} if kind else {}), **places})
        element.text = clean(said)

    def arrow(self, x1: float, y1: float, x2: float, y2: float, kind: str, head: float = 6) -> None:
        """A line with a head at its second end."""
        angle = math.atan2(y2 - y1, x2 - x1)
        back = (x2 - head * math.cos(angle), y2 - head * math.sin(angle))
        side = (head / 2 * math.sin(angle), -head / 2 * math.cos(angle))
        self.line(x1, y1, *back, kind)
        left, right = (back[0] + side[0], back[1] + side[1]), (back[0] - side[0], back[1] - side[1])
        self.path([(x2, y2), left, right], f"{kind} head", closed=True)

    def marker(self, x: float, y: float, shape: str, kind: str, size: float = 5) -> None:
        """A point: ``circle``, ``square``, ``triangle`` or ``diamond``."""
        if shape == "circle":
            self._add("circle", kind, cx=x, cy=y, r=size)
        elif shape == "square":
            self.rectangle(x - size * 0.9, y - size * 0.9, size * 1.8, size * 1.8, kind)
        elif shape == "triangle":
            self.path([(x, y - size * 1.2), (x + size * 1.1, y + size * 0.8), (x - size * 1.1, y + size * 0.8)], kind,
                      closed=True)  # fmt: skip
        else:
            self.path([(x, y - size * 1.25), (x + size * 1.25, y), (x, y + size * 1.25), (x - size * 1.25, y)], kind,
                      closed=True)  # fmt: skip

    def source(self) -> str:
        """The markup."""
        return ET.tostring(self._root, encoding="unicode")

    def _add(self, tag: str, kind: str, **places: float) -> None:
        ET.SubElement(self._root, tag, {"class": kind, **{key: number(value) for key, value in places.items()}})


def number(value: float) -> str:
    """A coordinate with at most two decimals, the same on every machine."""
    shown = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if shown == "-0" else shown


def clean(said: str) -> str:
    """Text without the control characters that markup cannot hold."""
    return _CONTROLS.sub("�", said)


def text_width(said: str, size: float) -> float:
    """About the width of a line of text."""
    return len(said) * _GLYPH * size


def fitted(said: str, width: float, size: float) -> str:
    """The text, its middle left out where it is wider than ``width``."""
    room = int(width / (_GLYPH * size))
    if len(said) <= room:
        return said
    head = max(1, (room - 1) // 2)
    return f"{said[:head]}…{said[len(said) - max(1, room - 1 - head) :]}"


@dataclasses.dataclass(frozen=True)
class Axis:
    """Values to places along one side of a plot, ``begin`` at ``low``; logarithmic where the values span much."""

    low: float
    high: float
    begin: float
    end: float
    logarithmic: bool

    @classmethod
    def over(cls, values: Sequence[float], begin: float, end: float, *, span: float = 3.0) -> Axis:
        """An axis that holds the values with room on both sides.

        Args:
            values: positive and finite.
            begin: place of the low end.
            end: place of the high end.
            span: highest over lowest value from which the axis is logarithmic.
        """
        low, high = min(values), max(values)
        if high >= span * low:
            room = (high / low) ** 0.12
            return cls(low / room, high * room, begin, end, True)
        room = max(0.15 * (high - low), 0.04 * high)
        return cls(max(0.0, low - room), high + room, begin, end, False)

    def at(self, value: float) -> float:
        """The place of a value."""
        if self.logarithmic and value > 0:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.begin + min(1.0, max(0.0, share)) * (self.end - self.begin)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values between the ends, at most about ``most``."""
        if self.logarithmic:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            for steps in ((1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
                found = [step * 10.0**power for power in range(first, last + 1) for step in steps]
                inside = [value for value in found if self.low <= value <= self.high]
                if len(inside) <= most:
                    return inside
            return inside[:: math.ceil(len(inside) / most)]
        rough = (self.high - self.low) / max(1, most - 1)
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
        first_step, last_step = math.ceil(self.low / step), math.floor(self.high / step)
        return [index * step for index in range(first_step, last_step + 1)]


def tick_label(value: float) -> str:
    """A round value, without a tail of rounding."""
    return f"{value:.6g}"
