"""ONNX Runtime on the CPU, at the two accuracy levels that matter: 0 (numeric reference) and 4 (int8 activations)."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.errors import TieqError
from tieq.runtimes.base import Availability, Runtime, Session, check_ids

_LEVELS = (0, 4)
# Name and mode where the same weights are computed in float.
FLOAT_SUBJECT = "onnxruntime, accuracy level 0"


class OnnxRuntime(Runtime):
    """Runs causal language models exported with past key values."""

    name = "onnxruntime"
    suffixes = (".onnx", ".ort")
    purpose = "ONNX and ORT on the CPU"

    def availability(self) -> Availability:
        """Whether onnxruntime is installed."""
        try:
            version = importlib.metadata.version("onnxruntime")
        except importlib.metadata.PackageNotFoundError:
            return Availability(False, "", "pip install onnxruntime")
        return Availability(True, version, "")

    def modes(self, path: Path) -> Iterator[tuple[str, contextlib.AbstractContextManager[Session]]]:
        """Both accuracy levels where the file has quantized products; the file as it is elsewhere."""
        if path.suffix == ".ort":
            yield "ort format", _open(path, None)
            return
        for level, content in level_graphs(path):
            yield "" if level is None else f"accuracy level {level}", _open(path, content)


def level_graphs(path: Path) -> Iterator[tuple[int | None, bytes | None]]:
    """The graph of an ONNX file at each accuracy level, without external data; ``(None, None)`` where it has none."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    products = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    if not products:
        yield None, None
        return
    for level in _LEVELS:
        for node in products:
            _set_level(node, level)
        yield level, model.SerializeToString()


def output_rows(path: Path) -> int | None:
    """Columns of an ONNX file's logits, None where it names them alone."""
    import onnx

    graph = onnx.load(str(path), load_external_data=False).graph
    logits = next((item for item in graph.output if item.name == "logits"), None)
    return None if logits is None else logits.type.tensor_type.shape.dim[-1].dim_value or None


def external_files(path: Path) -> list[str]:
    """Names of the files beside an ONNX file that hold its tensors."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    locations = {
        entry.value for tensor in model.graph.initializer for entry in tensor.external_data if entry.key == "location"
    }
    return sorted(locations)


def save_as_onnx(path: Path, target: Path) -> None:
    """Load a model file and write its graph as ONNX, untouched by optimization.

    Raises:
        TieqError: if the file cannot be loaded.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.optimized_model_filepath = str(target)
    options.add_session_config_entry("session.save_model_format", "ONNX")
    try:
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise TieqError(f"onnxruntime cannot load the file ({error}).", where=str(path)) from error


def _set_level(node: Any, level: int) -> None:
    from onnx import helper

    kept = [attribute for attribute in node.attribute if attribute.name != "accuracy_level"]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute("accuracy_level", level)])


@contextlib.contextmanager
def _open(path: Path, content: bytes | None) -> Iterator[Session]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # Idle threads would spin and take the cores from the runtimes that are measured beside this one.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Models given as bytes look for their external data in this folder.
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    try:
        session = onnxruntime.InferenceSession(
            content if content is not None else str(path), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise TieqError(f"onnxruntime cannot load the file ({error}).", where=str(path)) from error
    yield _OnnxSession(session, _head_size(path.parent))


def _head_size(folder: Path) -> int:
    """Columns of an attention head by the ``genai_config.json`` beside a graph that names them alone; 0 without one."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        config = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
        return int(config["model"]["decoder"]["head_size"])
    return 0


class _OnnxSession:
    """Feeds ids, mask, positions and an empty cache by the names that optimum and genai give them."""

    def __init__(self, session: Any, head_size: int) -> None:
        self._session = session
        self._head_size = head_size
        self._inputs = {item.name: item for item in session.get_inputs()}
        shape = next((item.shape for item in session.get_outputs() if item.name == "logits"), [None, None, None])
        if shape[1] == 1:
            raise TieqError(
                "the graph gives logits for the last position alone, which is nothing to measure.",
                where="onnxruntime",
                todo="Validate the model.onnx beside it, which reads the same bytes.",
            )
        self._rows = shape[-1]

    def logits(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Logits ``[length, vocab]`` of one sequence."""
        if isinstance(self._rows, int):
            check_ids(ids, self._rows)
        result: NDArray[np.float32] = self._session.run(["logits"], self._feed(ids, {}, 0))[0][0]
        return result.astype(np.float32, copy=False)

    def decode(self, prompt: NDArray[np.int64], steps: int) -> float:
        """Seconds of greedy steps after a prompt, each with the cache of the one before."""
        names = [item.name for item in self._session.get_outputs()]
        found = dict(zip(names, self._session.run(names, self._feed(prompt, {}, 0)), strict=True))
        start = time.perf_counter()
        for step in range(steps):
            cache = {name.replace("present", "past_key_values", 1): value for name, value in found.items()}
            ids = np.array([found["logits"][0, -1].argmax()], np.int64)
            feed = self._feed(ids, cache, len(prompt) + step)
            found = dict(zip(names, self._session.run(names, feed), strict=True))
        return time.perf_counter() - start

    def _feed(self, ids: NDArray[np.int64], cache: dict[str, NDArray[Any]], past: int) -> dict[str, NDArray[Any]]:
        """Every input of the graph for ``ids`` after ``past`` cached positions."""
        length = len(ids)
        values: dict[str, NDArray[Any]] = {
            "input_ids": ids[None],
            "attention_mask": np.ones((1, past + length), np.int64),
            "position_ids": np.arange(past, past + length, dtype=np.int64)[None],
            **cache,
        }
        feed = {}
        for name, item in self._inputs.items():
            if name in values:
                feed[name] = values[name]
            elif "past" in name:
                shape = [extent if isinstance(extent, int) else 0 for extent in item.shape]
                # Batch, heads, positions, size of a head: all but the positions have to be known.
                if len(shape) == 4:
                    shape[3] = shape[3] or self._head_size
                if len(shape) != 4 or not shape[1] or not shape[3]:
                    raise TieqError(
                        f"the graph does not say how large its cache is (input '{name}' has shape {item.shape}).",
                        where="onnxruntime",
                        todo="Give its heads and their size as numbers.",
                    )
                shape[0] = 1
                feed[name] = np.zeros(shape, np.float16 if "float16" in item.type else np.float32)
            else:
                raise TieqError(f"the graph wants an input '{name}' that tieq does not know.", where="onnxruntime")
        return feed
