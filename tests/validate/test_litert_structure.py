"""What the structure proof says of TFLite files, as written and tampered with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import pytest
import tiny
from ai_edge_litert import schema_py_generated as schema

from tieq.errors import TieqError
from tieq.recipe import LitertOptions
from tieq.records import Check
from tieq.validate.gates import structure_checks
from tieq.validate.structure import prove

TABLE = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Export (once) the tiny llama: the file; ``activations`` decides whether products read the table themselves."""
    from tieq.pipeline import export

    known: dict[Any, Path] = {}

    def get(bits: int = 4, activations: Any = "float", **changes: Any) -> Path:
        key = (bits, activations, tuple(changes))
        if key not in known:
            base = tmp_path_factory.mktemp("litert")
            checkpoint = tiny.save(base / "model", **changes)
            options = {"effort": "quick", "evaluation": None, "litert": LitertOptions(activations=activations)}
            folder = export(str(checkpoint), tiny.recipe(bits, **options), base / "out", ("litert",)).folder
            known[key] = folder / "litert" / "model.tflite"
        return known[key]

    return get


def edit(path: Path, target: Path, change: Callable[[Any], None]) -> Path:
    """A changed copy of a file."""
    model = schema.ModelT.InitFromPackedBuf(path.read_bytes(), 0)
    change(model)
    builder = flatbuffers.Builder(1 << 20)
    builder.Finish(model.Pack(builder), b"TFL3")
    target.write_bytes(bytes(builder.Output()))
    return target


def checks(path: Path, tied: bool | None = True) -> dict[str, Check]:
    return {check.name: check for check in structure_checks(prove(path), tied)}


def index_of(graph: Any, name: str) -> int:
    return next(index for index, tensor in enumerate(graph.tensors) if tensor.name == name.encode())


def second_tensor(model: Any, *, own_bytes: bool) -> int:
    """Another tensor like the table, over the same buffer or over equal bytes of its own; its number."""
    graph = model.subgraphs[0]
    made = copy.copy(graph.tensors[index_of(graph, TABLE)])
    made.name = "second"
    if own_bytes:
        model.buffers.append(copy.copy(model.buffers[made.buffer]))
        made.buffer = len(model.buffers) - 1
    graph.tensors.append(made)
    return len(graph.tensors) - 1


def last_reader(model: Any) -> Any:
    """The operator of the logits role that reads the table."""
    graph = model.subgraphs[0]
    table = index_of(graph, TABLE)
    return [operator for operator in graph.operators if table in operator.inputs][-1]


def read_instead(model: Any, number: int) -> None:
    operator = last_reader(model)
    table = index_of(model.subgraphs[0], TABLE)
    operator.inputs = [number if index == table else int(index) for index in operator.inputs]


KINDS = [(4, "float"), (4, "int8"), (8, "float")]


@pytest.mark.parametrize(("bits", "activations"), KINDS)
def test_one_table_is_read_by_both_roles(bits, activations, made):
    structure = prove(made(bits, activations))
    (payload,) = structure.payloads
    assert (structure.container, structure.rows, structure.columns) == ("tflite", tiny.ROWS, 64)
    assert (payload.names, payload.readers) == ((TABLE,), ("lookup", "logits"))
    assert payload.scheme == f"q{bits}_0"
    assert payload.bits_per_weight == pytest.approx(bits + 0.5, abs=0.005)
    assert checks(structure.path)["table copies"].passed


@pytest.mark.parametrize(("bits", "activations"), KINDS)
def test_a_doubled_table_is_caught(bits, activations, made, tmp_path):
    def double(model: Any) -> None:
        read_instead(model, second_tensor(model, own_bytes=True))

    found = checks(edit(made(bits, activations), tmp_path / "m.tflite", double))
    assert (found["table copies"].value, found["table copies"].passed) == (2, False)
    assert "second" in found["table copies"].detail


@pytest.mark.parametrize(("bits", "activations"), KINDS)
def test_two_tensors_over_one_buffer_are_one_copy(bits, activations, made, tmp_path):
    def alias(model: Any) -> None:
        read_instead(model, second_tensor(model, own_bytes=False))

    path = edit(made(bits, activations), tmp_path / "m.tflite", alias)
    assert checks(path)["table copies"].passed
    assert prove(path).payloads[0].names == (TABLE, "second")


def test_a_table_that_nobody_reads_is_a_copy(made, tmp_path):
    path = edit(made(), tmp_path / "m.tflite", lambda model: second_tensor(model, own_bytes=True) and None)
    found = checks(path)["table copies"]
    assert (found.value, "read by nobody" in found.detail) == (2, True)


def test_a_copy_in_pieces_is_a_copy(made, tmp_path):
    """The logits multiply two constants of half the rows each."""

    def cut(model: Any) -> None:
        graph = model.subgraphs[0]
        operator, halves = last_reader(model), []
        table = graph.tensors[index_of(graph, TABLE)]
        for start, stop in ((0, 160), (160, 320)):
            part, scales = copy.deepcopy(table), copy.copy(graph.tensors[table.quantization.details.scales])
            for tensor, name in ((part, "part"), (scales, "part.scales")):
                values = model.buffers[tensor.buffer].data.reshape(320, -1)[start:stop].reshape(-1).copy()
                model.buffers.append(schema.BufferT(values))
                tensor.name, tensor.buffer, tensor.shape = (
                    f"{name}{start}",
                    len(model.buffers) - 1,
                    [160, tensor.shape[1]],
                )
                graph.tensors.append(tensor)
            part.quantization.details.scales = len(graph.tensors) - 1
            product = copy.copy(graph.tensors[operator.outputs[0]])
            product.name, product.shape, product.shapeSignature = f"product{start}", [1, 160], [-1, 160]
            graph.tensors.append(product)
            half = copy.copy(operator)
            half.inputs = [operator.inputs[0], len(graph.tensors) - 3, -1]
            half.outputs = [len(graph.tensors) - 1]
            halves.append(half)
        joined = next(
            op for op in graph.operators if op.builtinOptionsType == schema.BuiltinOptions.ConcatenationOptions
        )
        joined = copy.deepcopy(joined)
        joined.builtinOptions.axis = 1
        joined.inputs, joined.outputs = [half.outputs[0] for half in halves], operator.outputs
        at = graph.operators.index(operator)
        graph.operators[at : at + 1] = [*halves, joined]

    path = edit(made(4, "int8"), tmp_path / "m.tflite", cut)
    found = checks(path)["table copies"]
    assert (found.value, "part0" in found.detail) == (2, True)
    assert np.array_equal(prove(path).read_logits(slice(150, 170)), prove(made(4, "int8")).read_lookup(slice(150, 170)))


def test_untied_tables_are_two(made):
    found = checks(made(tie_word_embeddings=False), tied=False)
    assert found["table copies"].passed
    assert "a table for each role" in found["table copies"].detail


@pytest.mark.parametrize(
    "content", [b"", b"TFL3", b"\x20\0\0\0TFL3" + b"\xff" * 64, b"no flatbuffer at all, only text"]
)
def test_a_damaged_file_is_said_in_a_sentence(content, tmp_path):
    path = tmp_path / "model.tflite"
    path.write_bytes(content)
    with pytest.raises(TieqError, match="cannot be read as TFLite"):
        prove(path)


@pytest.mark.parametrize("share", [0.2, 0.9])
def test_a_file_cut_short_is_said_in_a_sentence(share, made, tmp_path):
    whole = made().read_bytes()
    path = tmp_path / "model.tflite"
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(TieqError, match="cannot be read as TFLite"):
        prove(path)


def test_an_operator_that_the_proof_does_not_know_is_named(made, tmp_path):
    def disturb(model: Any) -> None:
        graph = model.subgraphs[0]
        operator = next(op for op in graph.operators if list(op.outputs) == list(graph.outputs))
        code = copy.copy(model.operatorCodes[operator.opcodeIndex])
        code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.RELU
        model.operatorCodes.append(code)
        operator.opcodeIndex = len(model.operatorCodes) - 1

    with pytest.raises(TieqError, match="RELU between the product and the logits"):
        prove(edit(made(), tmp_path / "m.tflite", disturb))


def test_a_scale_table_of_another_row_is_another_table(made, tmp_path):
    """Codes and scales are two constants at 8 bits: the proof decodes what the operators read together."""

    def shift(model: Any) -> None:
        graph = model.subgraphs[0]
        readers = [op for op in graph.operators if index_of(graph, f"{TABLE}.scales") in op.inputs]
        codes = last_reader(model)
        readers[-1].inputs = [readers[0].inputs[0], int(readers[-1].inputs[1])]  # by the token ids
        assert codes is not readers[-1]

    with pytest.raises(TieqError, match="neither by the token ids nor by constant ones"):
        prove(edit(made(8), tmp_path / "m.tflite", shift))
