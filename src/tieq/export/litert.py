"""Write the LiteRT (TFLite) container: one flatbuffer, whose table is one constant that both roles read.

The graph is built from the model's record (:mod:`tieq.source.decoder`) and takes a sequence from its beginning; it has
no cache. Source: TensorFlow Lite ``schema.fbs``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tieq.errors import MissingRuntimeError, RefusedError
from tieq.plan import Plan
from tieq.progress import stage
from tieq.quantize import QuantizedCheckpoint
from tieq.source.decoder import Decoder, decoder

MODEL = "model.tflite"
INSTALL = "pip install 'tieq[litert]'"


def check_litert(config: dict[str, Any], tensors: Collection[str], plan: Plan) -> None:
    """Refuse what the container cannot hold, before any weight is touched.

    Args:
        config: the text model's Hugging Face configuration.
        tensors: canonical names of its tensors.
        plan: the precisions.

    Raises:
        MissingRuntimeError: if ai-edge-litert, which has the format's schema, is not installed.
        RefusedError: if the model has no layer description, or the plan has row bands.
    """
    if importlib.util.find_spec("ai_edge_litert") is None:
        raise MissingRuntimeError("ai-edge-litert is not installed.", where="--format litert", todo=f"{INSTALL}.")
    _described(config, tensors)
    banded = next((decision.name for decision in plan.tables if decision.bands), None)
    if banded is not None:
        raise RefusedError("row bands are not carried into LiteRT.", where=banded, todo="Leave `bands` or litert out.")


def _described(config: dict[str, Any], tensors: Collection[str]) -> Decoder:
    try:
        return decoder(config, tensors)
    except RefusedError as error:
        raise RefusedError(
            f"the LiteRT graph cannot be built: {error.what}.", where="--format litert", todo="Leave litert out."
        ) from error


def write_litert(
    config: dict[str, Any],
    checkpoint: QuantizedCheckpoint,
    folder: Path,
    *,
    lookup: str,
    logits: str,
    tied: bool,
    integer: bool = False,
) -> Path:
    """Write ``model.tflite`` into ``folder``.

    Its signature ``serving_default`` takes ``input_ids`` int32 ``[1, length]``, to be resized, and gives ``logits``
    float32 ``[1, length, vocabulary]``.

    Args:
        config: the text model's Hugging Face configuration.
        checkpoint: what was quantized.
        folder: an existing folder.
        lookup: parameter name of the lookup table in the model.
        logits: parameter name of the logits matrix in the model.
        tied: whether the lookup table plays the logits role too.
        integer: whether products of 4-bit matrices round activations to int8, see
            :class:`tieq.export.litert_products.Products`.

    Returns:
        The path of the file.

    Raises:
        RefusedError: if the model has no layer description or is too large for a flatbuffer.
    """
    from tieq.export.litert_decoder import DecoderGraph
    from tieq.export.litert_nodes import Nodes

    described = _described(config, {*checkpoint.matrices, *checkpoint.floats})
    with stage("LiteRT: graph"):
        nodes = Nodes()
        graph = DecoderGraph(described, nodes, checkpoint, lookup=lookup, logits=logits, tied=tied, integer=integer)
        graph.build()
        nodes.save(folder / MODEL)
    return folder / MODEL
