"""A GGUF file as a model source: its tensors under checkpoint names, its configuration and tokenizer rebuilt."""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.errors import RefusedError
from tieq.records import TensorInfo
from tieq.source.base import GgufLayout, ModelSource
from tieq.source.converter import Converter, Placement
from tieq.source.families import Family, family_of_gguf
from tieq.source.gguf_file import GgufFile, GgufValue
from tieq.source.gguf_tokenizer import write_tokenizer

LOOKUP, LOGITS = "token_embd.weight", "output.weight"
# Tensors that llama.cpp computes from the configuration.
_EXTRAS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
# llama3 rope scaling as published: factor per model generation, the rest in common (Llama 3.1 and 3.2 configs).
_LLAMA3_FACTORS = (8.0, 32.0)


class GgufSource(ModelSource):
    """A GGUF file read as if it were the checkpoint it was made from.

    Tensor names and layouts follow from inverting llama.cpp's converter (:class:`Converter.place`).

    Raises:
        TieqError: if the file is damaged or its architecture has no family entry.
    """

    def __init__(self, path: Path, *, label: str | None = None, origin: str | None = None) -> None:
        self.path = path
        self.file = GgufFile(path)
        self.label = label or path.stem
        self.origin = origin or f"GGUF file {path}"
        parts = self.file.get("split.count", 0)
        if isinstance(parts, int) and parts > 1:
            raise RefusedError(
                f"is one of {parts} parts of a split model.",
                where=str(path),
                todo="Join them with `llama-gguf-split --merge` first.",
            )
        if LOOKUP not in self.file.tensors and LOGITS not in self.file.tensors:
            raise RefusedError("has no vocabulary table.", where=str(path), todo="Use a language model's GGUF file.")
        entry = family_of_gguf(self.file.architecture)
        try:
            self.config = self.full_config = self._config(entry)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise RefusedError(
                f"the metadata does not describe a whole model ({type(error).__name__}: {error}).",
                where=str(path),
                todo="Convert the model again, or use the original checkpoint folder.",
            ) from error
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def _config(self, entry: Family) -> dict[str, Any]:
        config: dict[str, Any] = {
            "model_type": entry.model_type,
            "architectures": [entry.architecture],
            "tie_word_embeddings": LOGITS not in self.file.tensors or LOOKUP not in self.file.tensors,
            "torch_dtype": "float32",
            **entry.gguf_defaults,
        }
        for key, names in entry.gguf_keys().items():
            value = self.file.get(f"{entry.gguf}.{key}")
            if value is not None:
                config.update(dict.fromkeys(names, value))
        if entry.gguf_partial_rotary:
            head = config["hidden_size"] // config["num_attention_heads"]
            config["partial_rotary_factor"] = self.file.get(f"{entry.gguf}.rope.dimension_count", head) / head
        # Absent ones are None: the architecture's defaults may lie beyond this vocabulary.
        for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
            config[f"{role}_token_id"] = self.file.get(f"tokenizer.ggml.{key}_token_id")
        table = self.file.tensors.get(LOOKUP) or self.file.tensors[LOGITS]
        config["vocab_size"] = table.info.shape[0]
        self._add_rope(entry, config)
        return config

    def _add_rope(self, entry: Family, config: dict[str, Any]) -> None:
        scaling = self.file.get(f"{entry.gguf}.rope.scaling.type")
        if scaling == "linear":
            factor = self.file.get(f"{entry.gguf}.rope.scaling.factor")
            config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
        elif scaling not in (None, "none"):
            raise RefusedError(
                f"the rope scaling '{scaling}' cannot be rebuilt from GGUF.",
                where=str(self.path),
                todo="Use the original checkpoint folder as the model.",
            )
        if "rope_freqs.weight" in self.file.tensors:
            config["rope_scaling"] = self._llama3_scaling(config)

    def _llama3_scaling(self, config: dict[str, Any]) -> dict[str, Any]:
        """Find the published rope scaling whose frequency factors are the ones stored in the file."""
        stored = self.file.read("rope_freqs.weight")
        for factor in _LLAMA3_FACTORS:
            scaling = {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
            trial = {**config, "rope_scaling": scaling}
            with Converter(trial, None, name=self.label) as converter:
                computed = dict(converter.extra_tensors()).get("rope_freqs.weight")
            if computed is not None and np.allclose(computed, stored, rtol=1e-5):
                return scaling
        raise RefusedError(
            "its rope frequency factors belong to no published Llama 3 scaling.",
            where=str(self.path),
            todo="Use the original checkpoint folder as the model.",
        )

    @functools.cached_property
    def placements(self) -> dict[str, Placement]:
        """Canonical name to where the tensor is in this file, for every tensor of the model that is there."""
        from tieq.source.reference import inventory

        parts = inventory(self.config)
        stored = {
            name
            for name, file_name in ((parts.lookup, LOOKUP), (parts.logits, LOGITS))
            if file_name in self.file.tensors
        }
        found: dict[str, Placement] = {}
        with Converter(self.config, self.tokenizer_folder(), name=self.label) as converter:
            for name, shape in parts.shapes.items():
                table = name in (parts.lookup, parts.logits)
                if table and name not in stored:
                    continue
                place = converter.place(name, shape, table=table)
                if place.name in self.file.tensors:
                    found[name] = place
        unknown = sorted(set(self.file.tensors) - {place.name for place in found.values()} - _EXTRAS)
        if unknown:
            raise RefusedError(
                f"{len(unknown)} tensors have no place in the model that its metadata describes, first '{unknown[0]}'.",
                where=str(self.path),
                todo="Use the original checkpoint folder as the model.",
            )
        return found

    def names(self) -> list[str]:
        """Canonical tensor names that the file holds."""
        return list(self.placements)

    def info(self, name: str) -> TensorInfo:
        """Stored name, shape, type and bytes of a canonical tensor."""
        return self.file.tensors[self.placements[name].name].info

    def read(self, name: str, rows: slice = slice(None)) -> NDArray[np.float32]:
        """Values of a canonical tensor in checkpoint layout, decoded to float32."""
        place = self.placements[name]
        if place.rows is None and not place.transposed:
            values = self.file.read(place.name, rows)
            return place.from_gguf(values)
        return np.ascontiguousarray(place.from_gguf(self.file.read(place.name))[rows])

    def role_tensors(self) -> tuple[TensorInfo | None, TensorInfo | None]:
        """The stored tensors ``token_embd.weight`` and ``output.weight``."""
        lookup, logits = (self.file.tensors.get(name) for name in (LOOKUP, LOGITS))
        return (lookup.info if lookup else None), (logits.info if logits else None)

    def read_role(self, info: TensorInfo, rows: slice = slice(None)) -> NDArray[np.float32]:
        """Rows of a stored table as float32."""
        return self.file.read(info.name, rows)

    def parameters(self) -> int:
        """Number of stored parameters, all tensors but the rope frequency factors."""
        return sum(t.info.parameters for name, t in self.file.tensors.items() if not name.startswith("rope_"))

    def tokenizer_folder(self) -> Path | None:
        """A temporary folder with the tokenizer and configuration rebuilt from the metadata."""
        if not self.file.get("tokenizer.ggml.tokens"):
            return None
        if self._folder is None:
            folder = tempfile.TemporaryDirectory(prefix="tieq-tokenizer-")
            write_tokenizer(self.file, Path(folder.name))
            (Path(folder.name) / "config.json").write_text(json.dumps(self.config, indent=2))
            self._folder = folder
        return Path(self._folder.name)

    def gguf_layout(
        self, tensors: dict[str, tuple[int, ...]], tables: set[str], pre_tokenizer: str | None
    ) -> GgufLayout:
        """The file's own metadata, placements and extra tensors."""
        metadata = dict(self.file.metadata)
        if pre_tokenizer is not None:
            metadata["tokenizer.ggml.pre"] = GgufValue(pre_tokenizer, 8)
        placements = {name: self.placements.get(name, Placement(LOOKUP)) for name in tensors}
        used = {place.name for place in self.placements.values()} | {LOOKUP, LOGITS}
        extras = {name: self.file.read(name) for name in self.file.tensors if name not in used}
        return GgufLayout(metadata, placements, extras)

    def license_id(self) -> str | None:
        """``general.license`` of the file's metadata."""
        found = self.file.get("general.license")
        return found if isinstance(found, str) and found else None

    def fingerprint(self) -> str:
        """SHA-256 of the file."""
        digest = hashlib.sha256()
        with self.path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
        return digest.hexdigest()
