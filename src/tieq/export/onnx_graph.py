"""The float graph: optimum's export of the reference model with past key values, weights under their own names."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

from tieq.errors import RefusedError
from tieq.source.reference import ReferenceModel


def export_float_graph(model: ReferenceModel, folder: Path, matrices: list[str]) -> Path:
    """Write the float ONNX graph of a causal language model into ``folder``.

    Constant folding stays off: folded, the weights would be transposed copies under numbers instead of names, and
    the quantized ones could not be put in their places. ``matrices`` are the parameters that will be replaced; each
    keeps an initializer of its own even where two are equal.

    Returns:
        The path of ``model.onnx``.

    Raises:
        RefusedError: if optimum has no exporter for the architecture.
    """
    from optimum.exporters.onnx import onnx_export_from_model

    try:
        with _quiet(), _distinct(model, matrices):
            onnx_export_from_model(
                model.module,
                folder,
                task="text-generation-with-past",
                do_validation=False,
                do_constant_folding=False,
                no_post_process=True,
            )
    except (ValueError, KeyError, NotImplementedError) as error:  # what optimum raises for models it does not know
        raise RefusedError(
            f"optimum cannot export this architecture to ONNX ({error}).",
            where=str(model.module.config.model_type),
            todo="Export with `--format gguf` only.",
        ) from error
    return folder / "model.onnx"


@contextlib.contextmanager
def _distinct(model: ReferenceModel, names: list[str]) -> Iterator[None]:
    """Mark each parameter during the trace: the exporter merges initializers that are equal, and with them names."""
    parameters = [model.module.get_parameter(name).data.view(-1) for name in names]
    firsts = [float(flat[0]) for flat in parameters]
    for number, flat in enumerate(parameters):
        flat[0] = 1e6 + number
    try:
        yield
    finally:
        for flat, first in zip(parameters, firsts, strict=True):
            flat[0] = first


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the tracer's warnings off the terminal; they concern branches that the traced shapes do not take."""
    loggers = [logging.getLogger(name) for name in ("optimum", "transformers", "torch.onnx")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
