"""onnxruntime in a Python of its own, as on a phone's processor: no package of tieq's is at hand here."""

import numpy as np
import onnxruntime
from frames import serve

state = {}


def handle(document):
    """Load a model, or give the logits of one sequence."""
    if "model" in document:
        return _load(document)
    ids = np.array(document["ids"], np.int64)[None]
    length = ids.shape[1]
    values = {
        "input_ids": ids,
        "attention_mask": np.ones((1, length), np.int64),
        "position_ids": np.arange(length, dtype=np.int64)[None],
    }
    feed = {}
    for item in state["session"].get_inputs():
        if item.name in values:
            feed[item.name] = values[item.name]
        elif "past" in item.name:
            shape = [1, *(extent if isinstance(extent, int) else 0 for extent in item.shape[1:])]
            feed[item.name] = np.zeros(shape, np.float16 if "float16" in item.type else np.float32)
    logits = state["session"].run(["logits"], feed)[0][0].astype(np.float32, copy=False)
    return {}, np.ascontiguousarray(logits).tobytes()


def _load(document):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = document["threads"]
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", document["folder"])
    for name, value in document["options"].items():
        options.add_session_config_entry(name, value)
    with open(document["model"], "rb") as file:  # noqa: PTH123
        content = file.read()
    state["session"] = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    rows = next(item.shape[-1] for item in state["session"].get_outputs() if item.name == "logits")
    return {"rows": rows if isinstance(rows, int) else None, "version": onnxruntime.__version__}, b""


serve(handle)
