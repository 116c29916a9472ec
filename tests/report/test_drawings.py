"""The pictures as markup: what is in them, that it stays inside, and that the same data give the same bytes."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import pytest

from tieq.report.charts import Point, draw_costs, draw_sizes
from tieq.report.drawings import draw_tie
from tieq.report.svg import Axis, Drawing, fitted, number, text_width

WIDTHS = (326.0, 760.0)


def payload(**changes) -> dict:
    return {
        "names": ["a"],
        "location": "model.onnx_data at byte 1000, 4000 bytes",
        "nbytes": 4500,
        "scheme": "int4 in blocks of 32",
        "bits_per_weight": 4.5,
        "readers": ["lookup", "logits"],
        "band_rows": None,
        **changes,
    }


def container(*payloads: dict) -> dict:
    return {"container": "onnx", "file_bytes": 10_000, "payloads": list(payloads)}


def elements(source: str, kind: str) -> list[ET.Element]:
    """Elements that have a class."""
    return [element for element in ET.fromstring(source).iter() if kind in element.get("class", "").split()]


def boxes(source: str, kind: str = "table") -> list[ET.Element]:
    return [element for element in elements(source, kind) if element.tag == "rect" and element.get("rx") == "5"]


def words(source: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(source).iter("text")]


def check_inside(source: str, width: float) -> None:
    """Every line of text stays in the picture, by the width that is reckoned with."""
    root = ET.fromstring(source)
    height = float(root.get("height"))
    for element in root.iter("text"):
        x, y, size = (float(element.get(key)) for key in ("x", "y", "font-size"))
        wide = text_width(element.text or "", size)
        begin = x - wide * {"start": 0, "middle": 0.5, "end": 1}[element.get("text-anchor")]
        assert begin >= -1, element.text
        assert begin + wide <= width + 1, element.text
        assert size - 3 <= y <= height, element.text
        assert size >= 11, element.text


@pytest.mark.parametrize("width", WIDTHS)
def test_one_table_has_an_arrow_from_each_role_and_its_place_in_the_file(width):
    source = draw_tie(container(payload()), 1, {"model.onnx_data": 10_000}, width)
    assert len(boxes(source)) == 1
    assert not elements(source, "wrong")
    assert len(elements(source, "head")) == 2
    (region,) = elements(source, "region")
    # 1000 of 10,000 bytes before it, 4000 in it, on a bar that is inset by one on either side.
    assert float(region.get("x")) == pytest.approx(1 + 0.1 * (width - 2), abs=0.01)
    assert float(region.get("width")) == pytest.approx(0.4 * (width - 2), abs=0.01)
    assert "one table" in words(source)
    assert "one table: bytes 1,000 to 5,000" in words(source)
    assert "read by lookup and logits" in ET.fromstring(source).get("aria-label")
    check_inside(source, width)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_doubled_table_is_drawn_as_two(width):
    second = payload(location="second.data at byte 0, 4000 bytes", readers=["logits"])
    doubled = container(payload(readers=["lookup"]), second)
    source = draw_tie(doubled, 2, {"model.onnx_data": 10_000}, width)
    assert len(boxes(source)) == 2
    assert all("wrong" in box.get("class") for box in boxes(source))
    assert {"copy 1 of 2", "copy 2 of 2"} <= set(words(source))
    assert len(elements(source, "head")) == 2
    assert "2 copies of one table" in ET.fromstring(source).get("aria-label")
    # A file that the manifest does not list has no size, so its bytes are not marked to scale.
    assert len(elements(source, "region")) == 1
    assert any("no file that the manifest lists" in line or "second.data" in line for line in words(source))
    check_inside(source, width)


def test_two_tables_that_are_meant_are_not_wrong():
    untied = container(payload(readers=["lookup"]), payload(readers=["logits"]))
    source = draw_tie(untied, 1, {"model.onnx_data": 10_000}, 760)
    assert {"table of the lookup", "table of the logits"} <= set(words(source))
    assert not elements(source, "wrong")


def test_a_row_band_is_drawn_beside_its_table_and_an_idle_table_is_wrong():
    banded = container(payload(), payload(band_rows=4096, nbytes=100), payload(readers=[]))
    source = draw_tie(banded, 1, {"model.onnx_data": 10_000}, 326)
    assert "row band, 4,096 rows" in words(source)
    assert len(boxes(source, "band")) == 1
    assert "read by nobody" in words(source)
    assert len(boxes(source)) == 2
    assert len(elements(source, "head")) == 4
    check_inside(source, 326)


def test_a_table_inside_the_model_file_has_no_region():
    inside = container(payload(location="model.onnx inside as 'a b', 4000 bytes"))
    source = draw_tie(inside, 1, {"model.onnx": 10_000}, 760)
    assert not elements(source, "region")
    assert any("inside as 'a b'" in line for line in words(source))
    pieces = container(payload(location="model.tflite at byte 64 and 3 more"))
    source = draw_tie(pieces, 1, {"model.tflite": 10_000}, 760)
    assert not elements(source, "region")
    assert "one table: at byte 64 and 3 more" in words(source)
    unknown = draw_tie(container(payload(location="somewhere else")), 1, {}, 760)
    assert "one table: in the file" in words(unknown)


@pytest.mark.parametrize("width", WIDTHS)
def test_costs_show_each_role_measured_and_predicted(probe, width):
    source = draw_costs(probe("x"), [4.5], width)
    assert source is not None
    for series in ("series-1", "series-2", "series-3"):
        # One marker for the legend, one for each scheme but the one whose cost is zero.
        assert len([element for element in elements(source, series) if "mark" in element.get("class")]) == 3
        assert len([element for element in elements(source, series) if "curve" in element.get("class")]) == 2
    assert len(elements(source, "own")) == 1
    assert {"lookup", "logits", "both", "measured", "predicted", "this export"} <= set(words(source))
    check_inside(source, width)


def test_costs_that_are_all_zero_or_unknown_are_not_drawn(probe):
    document = probe("x")
    for entry, value in zip(document["schemes"], (0.0, None, math.inf), strict=True):
        for role in ("lookup", "logits", "both"):
            entry["measured"][role]["kl"]["value"] = entry["predicted"][role] = value
    assert draw_costs(document, [4.5], 760) is None


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [1, 2, 12])
def test_points_are_labelled_inside_the_picture_and_apart(width, count):
    points = [
        Point(f"tool {index}", int(76e6 * 1.05**index), 0.3 / 1.4**index, 0.01, ("ours", "peer", "beside")[index % 3])
        for index in range(count)
    ]
    source = draw_sizes(points, width)
    assert source is not None
    names = {str(index) if width < 500 else f"{index} tool {index - 1}" for index in range(1, count + 1)}
    assert names <= set(words(source))
    check_inside(source, width)
    places = [
        (float(e.get("x")), float(e.get("y")), text_width(e.text, 12))
        for e in ET.fromstring(source).iter("text")
        if e.text in names and "class" not in e.attrib
    ]
    for index, (x, y, _) in enumerate(places):
        for other_x, other_y, other_wide in places[:index]:
            assert abs(y - other_y) > 11 or x >= other_x + other_wide or other_x >= x + other_wide - 1


def test_equal_points_and_points_without_a_place_are_borne():
    same = [Point("a", 1_000_000, 0.1, None, "ours"), Point("b", 1_000_000, 0.1, 0.0, "peer")]
    assert draw_sizes(same, 760) is not None
    assert draw_sizes([Point("zero", 1_000_000, 0.0, None, "ours")], 760) is None
    assert draw_sizes([Point("zero", 1_000_000, 0.0, None, "ours"), *same], 760) is not None
    wide_error = draw_sizes([Point("a", 1_000_000, 0.1, 0.5, "ours")], 326)
    assert wide_error is not None
    assert "nan" not in wide_error


def test_the_same_data_give_the_same_bytes(probe):
    assert draw_costs(probe("x"), [4.5], 760) == draw_costs(probe("x"), [4.5], 760)
    tied = container(payload())
    assert draw_tie(tied, 1, {}, 326) == draw_tie(tied, 1, {}, 326)


def test_names_are_escaped_and_shortened():
    hostile = payload(scheme='"><script>alert(1)</script>\x00' * 5, location="<b>&.data at byte 0, 10 bytes")
    source = draw_tie(container(hostile), 1, {}, 326)
    assert "<script" not in source
    assert "\x00" not in source
    check_inside(source, 326)
    assert fitted("abcdefghij", 6 * 0.58 * 10, 10) == "ab…hij"


def test_axes_hold_their_values_and_have_round_ticks():
    for values in ([0.2], [76.0, 77.6], [1e-4, 3.0], [5.0, 5.0], [70.0, 155.0]):
        axis = Axis.over(values, 0, 100)
        assert all(0 <= axis.at(value) <= 100 for value in values)
        ticks = axis.ticks(5)
        assert 1 <= len(ticks) <= 7
        assert all(axis.low <= tick <= axis.high * (1 + 1e-12) for tick in ticks)
    assert Axis.over([1e-3, 1.0], 0, 100).logarithmic
    assert not Axis.over([1.0, 2.0], 0, 100).logarithmic
    assert [number(value) for value in (1.0, -0.001, 2.345, 100.0)] == ["1", "0", "2.35", "100"]


def test_markers_and_arrows_are_markup():
    drawing = Drawing(10, 10, "a & b")
    for shape in ("circle", "square", "triangle", "diamond"):
        drawing.marker(5, 5, shape, "x")
    drawing.arrow(0, 0, 10, 0, "reads")
    assert len(elements(drawing.source(), "x")) == 4
    assert re.search(r'aria-label="a &amp; b"', drawing.source())
