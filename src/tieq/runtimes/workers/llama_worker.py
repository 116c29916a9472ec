"""llama.cpp's own shared libraries through ctypes.

The parameter structures are passed as opaque memory: they are larger than two registers, so the AArch64 procedure
call standard hands both results and arguments over by address, and only the leading fields that are set here have
to be known. Source: llama.cpp, include/llama.h; Arm, "Procedure Call Standard for the Arm 64-bit Architecture".
"""

import ctypes
import os
import sys

from frames import serve

# n_ctx, n_batch, n_ubatch, n_seq_max: the defaults that the layout is recognized by.
CONTEXT_DEFAULTS = [512, 2048, 512, 1]
LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
state = {"errors": []}


class Opaque(ctypes.Structure):
    """Memory for a parameter structure."""

    _fields_ = [("words", ctypes.c_uint32 * 256)]


class Batch(ctypes.Structure):
    """``llama_batch``."""

    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


def _library(folder):
    names = sorted(os.listdir(folder))  # noqa: PTH208 - names are wanted
    loaded = {}
    for stem in ("libggml-base", "libggml.", "libllama."):
        name = next(name for name in names if name.startswith(stem))
        loaded[stem] = ctypes.CDLL(os.path.join(folder, name), mode=ctypes.RTLD_GLOBAL)  # noqa: PTH118
    llama = loaded["libllama."]
    for name, result, arguments in (
        ("llama_model_default_params", Opaque, []),
        ("llama_context_default_params", Opaque, []),
        ("llama_model_load_from_file", ctypes.c_void_p, [ctypes.c_char_p, Opaque]),
        ("llama_init_from_model", ctypes.c_void_p, [ctypes.c_void_p, Opaque]),
        ("llama_model_get_vocab", ctypes.c_void_p, [ctypes.c_void_p]),
        ("llama_vocab_n_tokens", ctypes.c_int32, [ctypes.c_void_p]),
        ("llama_set_n_threads", None, [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32]),
        ("llama_batch_init", Batch, [ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]),
        ("llama_get_memory", ctypes.c_void_p, [ctypes.c_void_p]),
        ("llama_memory_clear", None, [ctypes.c_void_p, ctypes.c_bool]),
        ("llama_decode", ctypes.c_int32, [ctypes.c_void_p, Batch]),
        ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), [ctypes.c_void_p, ctypes.c_int32]),
        ("llama_print_system_info", ctypes.c_char_p, []),
        ("llama_log_set", None, [LOG, ctypes.c_void_p]),
    ):
        function = getattr(llama, name)
        function.restype, function.argtypes = result, arguments
    state["log"] = LOG(
        lambda level, text, data: state["errors"].append(text.decode(errors="replace")) if level == 4 else None
    )
    llama.llama_log_set(state["log"], None)
    loaded["libggml."].ggml_backend_load_all_from_path.argtypes = [ctypes.c_char_p]
    loaded["libggml."].ggml_backend_load_all_from_path(folder.encode())
    llama.llama_backend_init()
    return llama


def _refuse(what):
    raise RuntimeError(f"{what} ({' '.join(state['errors'])})")


def _load(document):
    llama = state["llama"] = _library(document["libraries"])
    model = llama.llama_model_load_from_file(document["model"].encode(), llama.llama_model_default_params())
    if not model:
        _refuse("llama.cpp cannot load the file")
    length = document["length"]
    parameters = llama.llama_context_default_params()
    if list(parameters.words[:4]) != CONTEXT_DEFAULTS:
        _refuse("llama.cpp's context parameters are laid out in a way that is not known here")
    parameters.words[:3] = [length, length, length]
    state["context"] = llama.llama_init_from_model(model, parameters)
    if not state["context"]:
        _refuse("llama.cpp cannot make a context")
    llama.llama_set_n_threads(state["context"], document["threads"], document["threads"])
    state["batch"] = llama.llama_batch_init(length, 0, 1)
    state["rows"] = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    return {"rows": state["rows"], "system": llama.llama_print_system_info().decode()}, b""


def handle(document):
    """Load a model, or give the logits of one sequence."""
    if "model" in document:
        return _load(document)
    llama, batch, ids = state["llama"], state["batch"], document["ids"]
    llama.llama_memory_clear(llama.llama_get_memory(state["context"]), True)
    batch.n_tokens = len(ids)
    for at, token in enumerate(ids):
        batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.logits[at] = token, at, 1, 1
        batch.seq_id[at][0] = 0
    code = llama.llama_decode(state["context"], batch)
    if code:
        _refuse(f"llama_decode gave {code}")
    width = ctypes.sizeof(ctypes.c_float) * state["rows"]
    rows = (llama.llama_get_logits_ith(state["context"], at) for at in range(len(ids)))
    return {}, b"".join(ctypes.string_at(row, width) for row in rows)


if sys.byteorder != "little":
    raise SystemExit("answers are little-endian float32")
serve(handle)
