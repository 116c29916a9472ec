"""The tie proof of a container as a picture: tables with their bytes, who reads them, where they lie in the file."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from tieq.report.svg import Drawing, fitted
from tieq.report.tables import megabytes

# What the structure proofs write as a payload's location.
_LOCATION = re.compile(
    r"(?P<file>.+?) (?:at byte (?P<offset>\d+)|inside as '.*')(?:, (?P<length>\d+) bytes)?(?P<more> and \d+ more)?"
)
_ROLES = ("lookup", "logits")
_PAD, _LINE, _SIZE = 1.0, 16.0, 12.0
_BAR = 18.0


@dataclasses.dataclass(frozen=True)
class _Box:
    """A table or row band: its lines of text, the first of them a title, its kind, who reads it, and its place."""

    lines: tuple[str, ...]
    kind: str
    readers: tuple[str, ...]
    file: str
    where: tuple[str, ...]
    region: tuple[int, int] | None
    height: float


def draw_tie(container: dict[str, Any], copies: int, file_sizes: dict[str, int], width: float) -> str:
    """Draw the tables of a container; one that is there twice is drawn twice.

    Args:
        container: an entry of ``checks["containers"]``.
        copies: copies of one table that validation counted in it.
        file_sizes: bytes of the container's files by name.
        width: of the picture, in pixels.
    """
    pill, gap = (57.0, 21.0) if width < 500 else (112.0, 64.0)
    inner = width - 2 * (_PAD + pill + gap)
    boxes = _boxes(container, copies, inner)
    files = list(dict.fromkeys(box.file for box in boxes))
    boxes_height = sum(box.height for box in boxes) + 12.0 * (len(boxes) - 1)
    bars_height = sum(2 * _LINE + _BAR for _ in files) + _LINE * sum(len(box.where) for box in boxes)
    drawing = Drawing(width, 2 * _PAD + boxes_height + 22 + bars_height, _words(container, copies))
    left = _PAD + pill + gap
    for role, x in zip(_ROLES, (_PAD, width - _PAD - pill), strict=True):
        _draw_role(drawing, role, x, pill, boxes_height)
    y = _PAD
    for box in boxes:
        drawing.rectangle(left, y, inner, box.height, box.kind, 5)
        for index, line in enumerate(box.lines):
            kind = "strong" if index == 0 else ""
            drawing.text(width / 2, y + 19 + index * _LINE, line, kind, "middle", _SIZE)
        middle = y + box.height / 2
        arrow = "reads wrong" if "wrong" in box.kind else "reads"
        if "lookup" in box.readers:
            drawing.arrow(_PAD + pill + 2, middle, left - 2, middle, arrow)
        if "logits" in box.readers:
            drawing.arrow(width - _PAD - pill - 2, middle, width - left + 2, middle, arrow)
        y += box.height + 12.0
    y += 10.0
    for file in files:
        # A cone from the box to its bytes reads well where it crosses nothing.
        cone = (left, width - left, y - 22.0) if len(boxes) == 1 else None
        y = _draw_file(drawing, file, file_sizes.get(file), [box for box in boxes if box.file == file], y, width, cone)
    return drawing.source()


def _boxes(container: dict[str, Any], copies: int, inner: float) -> list[_Box]:
    tables = [payload for payload in container["payloads"] if payload["band_rows"] is None]
    boxes = []
    for payload in container["payloads"]:
        readers = tuple(role for role in _ROLES if role in payload["readers"])
        wrong = copies > 1 or not readers
        if payload["band_rows"] is not None:
            title, wrong = f"row band, {payload['band_rows']:,} rows", not readers
        elif len(tables) == 1:
            title = "one table"
        elif copies > 1:
            title = f"copy {tables.index(payload) + 1} of {len(tables)}"
        else:
            title = f"table of the {' and '.join(readers) or 'model'}"
        bits, size = f"{payload['bits_per_weight']:.2f} bits/weight", megabytes(payload["nbytes"])
        facts = [f"{size}, {bits}", payload["scheme"]] if inner > 220 else [size, bits, payload["scheme"]]
        if not readers:
            facts.append("read by nobody")
        found = _LOCATION.fullmatch(payload["location"])
        file = found["file"] if found else payload["location"]
        region, where = None, [f"{title}: {payload['location'].removeprefix(file).strip() or 'in the file'}"]
        if found and found["offset"] and not found["more"]:
            start, length = int(found["offset"]), int(found["length"] or payload["nbytes"])
            region, where = (start, length), [f"{title}: bytes {start:,} to {start + length:,}"]
            if length < payload["nbytes"]:
                where.append(f"and its scales, {megabytes(payload['nbytes'] - length)}")
        kind = "band" if payload["band_rows"] is not None else "table"
        kind = f"{kind} wrong" if wrong else kind
        lines = tuple(fitted(line, inner - 10, _SIZE) for line in (title, *facts))
        boxes.append(_Box(lines, kind, readers, file, tuple(where), region, 16 + _LINE * len(lines)))
    return boxes


def _draw_role(drawing: Drawing, role: str, x: float, width: float, height: float) -> None:
    drawing.rectangle(x, _PAD, width, height, "role", 5)
    middle = _PAD + height / 2
    said = {"lookup": "token ids to rows", "logits": "states to scores"}[role]
    drawing.text(x + width / 2, middle + (4 if width < 100 else -2), role, "strong", "middle", _SIZE)
    if width >= 100:
        drawing.text(x + width / 2, middle + 14, said, "quiet", "middle", 11)


def _draw_file(
    drawing: Drawing,
    name: str,
    size: int | None,
    boxes: list[_Box],
    y: float,
    width: float,
    cone: tuple[float, float, float] | None,
) -> float:
    """The file as a bar with the tables' bytes marked, unless its size is not known; where the next one begins."""
    inner = width - 2 * _PAD
    bar = y + _LINE * 0.4
    title = f"{name}, {'no file that the manifest lists' if size is None else megabytes(size)}"
    for box in boxes:
        if box.region is None or cone is None or not size:
            continue
        begin, end = _PAD + box.region[0] / size * inner, _PAD + (box.region[0] + box.region[1]) / size * inner
        drawing.path([(cone[0], cone[2]), (cone[1], cone[2]), (max(end, begin + 2), bar), (begin, bar)],
                     f"{box.kind} cone", closed=True)  # fmt: skip
    drawing.rectangle(_PAD, bar, inner, _BAR, "file", 3)
    for box in boxes:
        if box.region is not None and size:
            begin, length = (part / size * inner for part in box.region)
            drawing.rectangle(_PAD + begin, bar, max(2.0, min(length, inner - begin)), _BAR, f"{box.kind} region")
    y = bar + _BAR + _LINE
    drawing.text(_PAD, y, fitted(title, inner, _SIZE), "strong", size=_SIZE)
    for line in (line for box in boxes for line in box.where):
        y += _LINE
        drawing.text(_PAD, y, fitted(line, inner, 11), size=11)
    return y + _LINE * 0.6


def _words(container: dict[str, Any], copies: int) -> str:
    """The picture in words."""
    tables = [payload for payload in container["payloads"] if payload["band_rows"] is None]
    kind = (
        f"{copies} copies of one table" if copies > 1 else "one table" if len(tables) == 1 else "a table for each role"
    )
    said = [
        f"{'row band' if payload['band_rows'] is not None else 'table'} of {megabytes(payload['nbytes'])} in "
        f"{payload['location']}, {payload['scheme']}, read by {' and '.join(payload['readers']) or 'nobody'}"
        for payload in container["payloads"]
    ]
    return f"{container['container']} file with {kind}: {'; '.join(said)}"
