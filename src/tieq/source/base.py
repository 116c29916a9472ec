"""What a model source offers: a config, tensors that are read one at a time, a tokenizer, a fingerprint."""

from __future__ import annotations

import abc
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.errors import RefusedError
from tieq.records import TensorInfo
from tieq.source.converter import Placement
from tieq.source.families import Family, family
from tieq.source.gguf_file import GgufValue


@dataclasses.dataclass(frozen=True)
class GgufLayout:
    """How a model looks in GGUF: metadata, where each tensor goes, and tensors that only GGUF has (float32)."""

    metadata: dict[str, GgufValue]
    placements: dict[str, Placement]
    extras: dict[str, NDArray[np.float32]]


class ModelSource(abc.ABC):
    """A model on disk, read lazily.

    Attributes:
        path: the folder or file.
        label: short name for messages and folder names.
        origin: one sentence that says where the weights came from.
        config: the text model's Hugging Face configuration.
        full_config: the configuration as stored (with nested parts).
    """

    path: Path
    label: str
    origin: str
    config: dict[str, Any]
    full_config: dict[str, Any]

    @property
    def family(self) -> Family:
        """Family data for the config's model type."""
        return family(str(self.config.get("model_type", "")))

    @abc.abstractmethod
    def names(self) -> list[str]:
        """Canonical tensor names: those of the family's causal language model in transformers."""

    @abc.abstractmethod
    def info(self, name: str) -> TensorInfo:
        """Stored name, shape, type and bytes of a canonical tensor."""

    @abc.abstractmethod
    def read(self, name: str, rows: slice = slice(None)) -> NDArray[np.float32]:
        """Values of a canonical tensor, or of a slice of its rows, as float32."""

    @abc.abstractmethod
    def role_tensors(self) -> tuple[TensorInfo | None, TensorInfo | None]:
        """Stored tensors that can play lookup and logits, None where there is none."""

    @abc.abstractmethod
    def read_role(self, info: TensorInfo, rows: slice = slice(None)) -> NDArray[np.float32]:
        """Rows of a tensor that :meth:`role_tensors` returned, as float32."""

    @abc.abstractmethod
    def parameters(self) -> int:
        """Number of stored parameters, all tensors."""

    @abc.abstractmethod
    def tokenizer_folder(self) -> Path | None:
        """A folder that holds the tokenizer's files, or None."""

    @abc.abstractmethod
    def gguf_layout(
        self, tensors: dict[str, tuple[int, ...]], tables: set[str], pre_tokenizer: str | None
    ) -> GgufLayout:
        """Metadata, tokenizer and tensor placements for a GGUF file of this model.

        Args:
            tensors: canonical name to checkpoint shape of every tensor that will be written.
            tables: those of them that are vocabulary tables.
            pre_tokenizer: llama.cpp pre-tokenizer name that overrides recognition.

        Raises:
            RefusedError: if llama.cpp's converter cannot carry the architecture or the tokenizer.
        """

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 over the weights' bytes and the configuration."""

    def license_id(self) -> str | None:
        """The license that the source's own metadata names, or None."""
        return None

    def bad_rows(self, info: TensorInfo, chunk: int = 8192) -> list[int]:
        """Rows of a role tensor that hold NaN or infinity."""
        bad: list[int] = []
        for start in range(0, info.shape[0], chunk):
            block = self.read_role(info, slice(start, start + chunk))
            rows = np.flatnonzero(~np.isfinite(block).all(axis=1))
            bad.extend(int(row) + start for row in rows)
        return bad


def license_of_card(card: Path) -> str | None:
    """``license`` in the front matter of a hub model card; None where there is no card, or one that says none."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        parts = card.read_text(encoding="utf-8").split("---", 2)
        content = YAML(typ="safe").load(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
    except (OSError, ValueError, YAMLError):
        return None
    found = content.get("license") if isinstance(content, dict) else None
    return found if isinstance(found, str) and found else None


def text_config(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The language model's part of a configuration, with the tie flag of the outer part where only that has it.

    Raises:
        RefusedError: if the configuration names no model type.
    """
    nested = config.get("text_config")
    if isinstance(nested, dict):
        inherited: dict[str, Any] = {
            k: config[k] for k in ("tie_word_embeddings", "quantization_config") if k in config
        }
        config = {**inherited, **nested}
    if not config.get("model_type"):
        raise RefusedError(
            "the configuration has no 'model_type'.",
            where=where,
            todo="Use a checkpoint folder written by transformers.",
        )
    return config
