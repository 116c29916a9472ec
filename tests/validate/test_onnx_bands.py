"""What the structure proof says of a file whose row bands were tampered with."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from tieq.errors import TieqError
from tieq.records import Check
from tieq.validate.gates import equality_checks, structure_checks
from tieq.validate.structure import prove

BAND = "model.embed_tokens.weight.band0"


@pytest.fixture
def file(banded_export: Callable[..., Any], tmp_path: Path) -> Path:
    """A model file that a test may change."""
    shutil.copytree(banded_export().folder / "onnx", tmp_path / "onnx")
    return tmp_path / "onnx" / "model.onnx"


def failed(path: Path) -> dict[str, Check]:
    """The structure checks that do not hold, by name."""
    return {check.name: check for check in structure_checks(prove(path), True) if not check.passed}


def entries(tensor: Any) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def values(path: Path, name: str) -> np.ndarray:
    """A writable map of an initializer's bytes."""
    model = onnx.load(str(path), load_external_data=False)
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    where = entries(tensor)
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return np.memmap(path.parent / where["location"], dtype, "r+", int(where["offset"]), tuple(tensor.dims))


def edit(path: Path, change: Callable[[Any], None]) -> None:
    """Change the graph."""
    model = onnx.load(str(path), load_external_data=False)
    change(model.graph)
    onnx.save(model, str(path))


def scatters(graph: Any) -> list[Any]:
    return [node for node in graph.node if node.op_type == "ScatterElements"]


def point_past(graph: Any, name: str, other: str) -> None:
    """Let the readers of a value read another one, and the model's output too."""
    for node in graph.node:
        for at, read in enumerate(node.input):
            if read == name:
                node.input[at] = other
    for node in graph.node:
        if graph.output[0].name == name and other in node.output:
            node.output[list(node.output).index(other)] = name


def copy_bytes(path: Path, graph: Any, name: str, change: Callable[[np.ndarray], np.ndarray] = np.array) -> str:
    """A second initializer with bytes of its own, in a file of its own."""
    tensor = next(tensor for tensor in graph.initializer if tensor.name == name)
    content = change(np.array(values(path, name)))
    (path.parent / "second.data").write_bytes(content.tobytes())
    made = onnx.TensorProto()
    made.CopyFrom(tensor)
    made.name = f"{name}.second"
    for entry in made.external_data:
        entry.value = {"location": "second.data", "offset": "0", "length": str(content.nbytes)}.get(
            entry.key, entry.value
        )
    graph.initializer.append(made)
    return made.name


def read_instead(graph: Any, kind: str, name: str, other: str) -> None:
    for node in graph.node:
        if node.op_type == kind:
            for at, read in enumerate(node.input):
                if read == name:
                    node.input[at] = other


def widen_instead(graph: Any, kind: str, name: str, other: str) -> None:
    """Let operators of a kind read other scales, through a Cast of their own."""
    cast = next(node for node in graph.node if node.op_type == "Cast" and node.input[0] == name)
    made = onnx.NodeProto()
    made.CopyFrom(cast)
    made.name, made.input[0], made.output[0] = f"{other}/Cast", other, f"{other}/wide"
    graph.node.insert(list(graph.node).index(cast), made)
    read_instead(graph, kind, cast.output[0], made.output[0])


def test_the_file_as_written_holds(file: Path) -> None:
    assert not failed(file)
    structure = prove(file)
    assert [(band.band_rows, band.readers) for band in structure.bands] == [
        (16, ("lookup", "logits")),
        (32, ("lookup", "logits")),
    ]
    assert len(structure.tables) == 1


def test_a_row_map_with_two_rows_exchanged_fails(file: Path) -> None:
    places, rows = values(file, f"{BAND}.row_map"), values(file, f"{BAND}.rows")
    places[rows[2]], places[rows[3]] = places[rows[3]], places[rows[2]]
    places.flush()
    found = failed(file)
    assert f"differ at row {rows[2]}" in str(found["row band"].value)
    assert found["refined table"].value == f"row {rows[2]} differs"


def test_a_row_map_that_leaves_a_row_out_fails(file: Path) -> None:
    places, rows = values(file, f"{BAND}.row_map"), values(file, f"{BAND}.rows")
    places[rows[5]] = len(rows) - 1  # the zero row
    places.flush()
    assert set(failed(file)) == {"row band", "refined table"}


def test_columns_that_name_another_row_fail(file: Path) -> None:
    rows = values(file, f"{BAND}.rows")
    rows[0] = next(row for row in range(320) if row not in rows)
    rows.flush()
    assert set(failed(file)) == {"row band", "refined table"}


@pytest.mark.parametrize(("name", "wrong"), [(f"{BAND}.row_map", 17), (f"{BAND}.rows", 320), (f"{BAND}.rows", -1)])
def test_indices_outside_are_refused_by_name(name: str, wrong: int, file: Path) -> None:
    stored = values(file, name)
    stored[0] = wrong
    stored.flush()
    with pytest.raises(TieqError, match=f"'{name}' points outside of"):
        prove(file)


def test_a_band_that_only_the_lookup_reads_fails(file: Path) -> None:
    def drop(graph: Any) -> None:
        node = scatters(graph)[0]
        graph.node.remove(node)
        point_past(graph, node.output[0], node.input[0])

    edit(file, drop)
    found = failed(file)
    assert found["row band"].value == "read by lookup"
    assert "refined table" in found


def test_a_band_that_only_the_logits_read_fails(file: Path) -> None:
    def drop(graph: Any) -> None:
        producers = {output: node for node in graph.node for output in node.output}
        residuals = [node for node in graph.node if node.op_type == "GatherBlockQuantized" and BAND in node.input[0]]
        node = next(node for node in graph.node if node.op_type == "Add" and residuals[0].output[0] in node.input)
        base = next(name for name in node.input if producers[name] is not residuals[0])
        graph.node.remove(node)
        point_past(graph, node.output[0], base)

    edit(file, drop)
    found = failed(file)
    assert found["row band"].value == "read by logits"
    assert "refined table" in found


def test_equal_bytes_in_two_places_are_two_bands_and_fail(file: Path) -> None:
    edit(file, lambda g: read_instead(g, "MatMulNBits", f"{BAND}.codes", copy_bytes(file, g, f"{BAND}.codes")))
    bands = [check for check in structure_checks(prove(file), True) if check.name == "row band" and not check.passed]
    assert [check.value for check in bands] == ["read by lookup", "read by logits"]
    assert "second.data at byte 0" in bands[1].detail
    assert set(failed(file)) == {"row band"}


def test_other_bytes_for_one_role_fail_in_the_decoded_table_too(file: Path) -> None:
    edit(
        file,
        lambda g: read_instead(
            g, "MatMulNBits", f"{BAND}.codes", copy_bytes(file, g, f"{BAND}.codes", lambda codes: codes ^ 1)
        ),
    )
    assert set(failed(file)) == {"row band", "refined table"}


def test_other_scales_for_one_role_fail(file: Path) -> None:
    edit(
        file,
        lambda g: widen_instead(
            g, "MatMulNBits", f"{BAND}.scales", copy_bytes(file, g, f"{BAND}.scales", lambda scales: scales * 2)
        ),
    )
    found = failed(file)
    assert "two sets of scales" in str(found["row band"].value)
    assert "refined table" in found


def test_a_scatter_that_replaces_logits_is_refused(file: Path) -> None:
    def replace(graph: Any) -> None:
        for attribute in scatters(graph)[0].attribute:
            if attribute.name == "reduction":
                attribute.s = b"none"

    edit(file, replace)
    with pytest.raises(TieqError, match="puts no row band's logits into the logits"):
        prove(file)


def test_a_band_that_reads_other_hidden_states_is_refused(file: Path) -> None:
    def detach(graph: Any) -> None:
        node = next(node for node in graph.node if node.op_type == "MatMulNBits" and BAND in node.input[1])
        node.input[0] = next(n for n in graph.node if n.op_type == "MatMulNBits").input[0]

    edit(file, detach)
    with pytest.raises(TieqError, match="puts no row band's logits into the logits"):
        prove(file)


def test_rows_that_are_read_with_and_without_the_band_are_refused(file: Path) -> None:
    def tap(graph: Any) -> None:
        base = next(node for node in graph.node if node.op_type == "GatherBlockQuantized" and BAND not in node.input[0])
        graph.node.append(helper.make_node("Neg", [base.output[0]], ["aside"], name="aside"))

    edit(file, tap)
    with pytest.raises(TieqError, match="is read with a row band and without it"):
        prove(file)


def test_a_container_that_lost_its_bands_differs_from_one_that_has_them(banded_export: Callable[..., Any]) -> None:
    folder = banded_export().folder
    whole, other = prove(folder / "onnx" / "model.onnx"), prove(folder / "ort" / "model.ort")
    lost = dataclasses.replace(other, read_lookup=other.base_lookup, read_logits=other.base_logits)
    assert all(check.passed for check in equality_checks([whole, other]))
    assert not any(check.passed for check in equality_checks([whole, lost]))
    assert all(check.passed for check in equality_checks([whole, prove(folder / "gguf" / "model.gguf")]))


def test_a_changed_base_differs_from_the_gguf_table(file: Path, banded_export: Callable[..., Any]) -> None:
    codes = values(file, "model.embed_tokens.weight.codes")
    codes[7, 0, 0] ^= 1
    codes.flush()
    checks = equality_checks([prove(file), prove(banded_export().folder / "gguf" / "model.gguf")])
    assert [check.value for check in checks] == ["row 7 differs", "row 7 differs"]
