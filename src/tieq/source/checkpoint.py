"""A checkpoint folder: ``config.json`` and safetensors, sharded or not. Nothing is ever unpickled."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.artifact import read_json
from tieq.errors import RefusedError
from tieq.records import TensorInfo
from tieq.source.base import GgufLayout, ModelSource, license_of_card, text_config
from tieq.source.converter import Converter

INDEX = "model.safetensors.index.json"
# Weights that are read at a time.
_PIECE_WEIGHTS = 1 << 22
# The bits of infinity by stored type; what is greater, the sign left out, is NaN.
_INFINITY: dict[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
    "F32": (np.uint32, 0x7F800000),
}
# Stored types by their names in safetensors, little-endian.
_TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "bfloat16", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U8": "u1", "BOOL": "?",
}  # fmt: skip
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}


class CheckpointSource(ModelSource):
    """A Hugging Face checkpoint folder.

    Raises:
        RefusedError: on missing or damaged shards, pickled or quantized weights, empty tensors.
    """

    def __init__(self, path: Path, *, label: str | None = None, origin: str | None = None) -> None:
        self.path = path
        self.label = label or path.resolve().name
        self.origin = origin or f"checkpoint folder {path}"
        self.full_config = read_json(path / "config.json")
        self.config = text_config(self.full_config, str(path / "config.json"))
        self._refuse_quantized()
        self._opened: list[Path] = []
        self._offsets: dict[str, int] = {}
        self._stored: dict[str, tuple[Path, TensorInfo]] = {}
        for shard in self._shards():
            self._open(shard)
        self._check_index()
        self._by_canonical: dict[str, str] = {}
        for name in self._stored:
            first = self._by_canonical.setdefault(self._canonical(name), name)
            if first != name:
                raise RefusedError(f"'{first}' and '{name}' are both stored for one tensor.", where=str(path))

    def _refuse_quantized(self) -> None:
        found = self.full_config.get("quantization_config") or self.config.get("quantization_config")
        if found:
            method = found.get("quant_method", "unknown") if isinstance(found, dict) else found
            raise RefusedError(
                f"the checkpoint is already quantized (method '{method}').",
                where=str(self.path / "config.json"),
                todo="Use the original float checkpoint.",
            )

    def _shards(self) -> list[Path]:
        single, index = self.path / "model.safetensors", self.path / INDEX
        if index.exists():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise RefusedError("has no 'weight_map'.", where=str(index))
            for name in weight_map.values():
                if not isinstance(name, str) or Path(name).name != name or name in ("..", "."):
                    raise RefusedError(f"names the shard {name!r} outside its folder.", where=str(index))
            names = sorted(set(weight_map.values()))
            missing = [name for name in names if not (self.path / name).is_file()]
            if missing:
                raise RefusedError(
                    f"shards are missing: {', '.join(missing)}.",
                    where=str(self.path),
                    todo="Download the checkpoint again.",
                )
            return [self.path / name for name in names]
        if single.exists():
            return [single]
        others = sorted(self.path.glob("*.safetensors"))
        if len(others) == 1:
            return others
        pickled = sorted(p.name for p in self.path.glob("*.bin")) + sorted(p.name for p in self.path.glob("*.pt*"))
        if pickled:
            raise RefusedError(
                f"the weights are pickled ({pickled[0]}), and unpickling can run code.",
                where=str(self.path),
                todo="Save the model with safetensors first.",
            )
        raise RefusedError(
            "no model.safetensors and no index were found.",
            where=str(self.path),
            todo="Point at a folder that holds config.json and safetensors files.",
        )

    def _open(self, shard: Path) -> None:
        import ml_dtypes  # noqa: F401  registers bfloat16 with numpy, which safetensors then uses
        from safetensors import SafetensorError, safe_open

        try:
            handle = safe_open(str(shard), framework="numpy")
        except (SafetensorError, OSError) as error:
            raise RefusedError(
                f"cannot be read as safetensors ({error}).",
                where=str(shard),
                todo="The file is truncated or damaged; download it again.",
            ) from error
        self._opened.append(shard)
        with shard.open("rb") as file:
            room = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(room))
        for name in handle.keys():  # noqa: SIM118  safe_open is no mapping
            view = handle.get_slice(name)
            shape, dtype = tuple(view.get_shape()), view.get_dtype()
            info = TensorInfo(name, shape, dtype, 0)
            if info.parameters == 0:
                raise RefusedError(f"tensor '{name}' is empty (shape {list(shape)}).", where=str(shard))
            nbytes = info.parameters * _ITEM_BYTES.get(dtype, 1)
            if name in self._stored:
                first = self._stored[name][0].name
                raise RefusedError(f"tensor '{name}' is stored twice, in {first} too.", where=str(shard))
            self._stored[name] = (shard, TensorInfo(name, shape, dtype, nbytes))
            self._offsets[name] = 8 + room + int(header[name]["data_offsets"][0])

    def _check_index(self) -> None:
        index = self.path / INDEX
        if not index.exists():
            return
        weight_map = read_json(index)["weight_map"]
        wrong = sorted(
            name
            for name in set(weight_map) | set(self._stored)
            if name not in weight_map or name not in self._stored or self._stored[name][0].name != weight_map[name]
        )
        if wrong:
            raise RefusedError(
                f"the index and the shards disagree about {len(wrong)} tensors, first '{wrong[0]}'.",
                where=str(index),
                todo="Download the checkpoint again.",
            )

    def _canonical(self, name: str) -> str:
        """Name in the family's causal language model: no multimodal part, the base model's prefix present."""
        prefix, logits = self.family.prefix, self.family.logits_name
        name = re.sub(r"^(model\.)?language_model\.(model\.)?(?!lm_head)", prefix, name)
        name = name.removeprefix("language_model.")
        head_names = {logits, logits.replace(".weight", ".bias")}
        for candidate in (logits, logits.replace(".weight", ".bias")):
            if name == f"model.{candidate}":
                return candidate
        if name in head_names or name.startswith(prefix):
            return name
        return prefix + name

    def names(self) -> list[str]:
        """Canonical tensor names in stored order."""
        return list(self._by_canonical)

    def info(self, name: str) -> TensorInfo:
        """Stored name, shape, type and bytes of a canonical tensor."""
        return self._stored[self._by_canonical[name]][1]

    def read(self, name: str, rows: slice = slice(None)) -> NDArray[np.float32]:
        """Values of a canonical tensor, or of a slice of its rows, as float32."""
        return self.read_role(self.info(name), rows)

    def role_tensors(self) -> tuple[TensorInfo | None, TensorInfo | None]:
        """Stored tensors under the family's lookup and logits names."""
        names = (self.family.lookup_name, self.family.logits_name)
        lookup, logits = (self.info(n) if n in self._by_canonical else None for n in names)
        return lookup, logits

    def read_role(self, info: TensorInfo, rows: slice = slice(None)) -> NDArray[np.float32]:
        """Rows of a stored tensor as float32."""
        start, stop, _ = rows.indices(info.shape[0])
        found = np.empty((max(stop - start, 0), *info.shape[1:]), np.float32)
        for first, piece in self._pieces(info, start, stop):
            found[first - start : first - start + len(piece)] = piece
        return found

    def bad_rows(self, info: TensorInfo, chunk: int = 8192) -> list[int]:
        """Rows of a stored tensor that hold NaN or infinity, found by their bits where all numbers are that short."""
        if info.dtype not in _INFINITY:
            return super().bad_rows(info, chunk)
        ends = np.linspace(0, info.shape[0], (os.cpu_count() or 1) + 1).astype(int)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            found = pool.map(lambda start, stop: self._bad_rows(info, start, stop), ends[:-1], ends[1:])
            return [row for rows in found for row in rows]

    def _bad_rows(self, info: TensorInfo, start: int, stop: int) -> list[int]:
        kind, infinity = _INFINITY[info.dtype]
        sign = np.iinfo(kind).max // 2 + 1
        bad: list[int] = []
        for first, piece in self._pieces(info, start, stop):
            bits = piece.view(kind)
            # The largest of all is the largest magnitude of a negative number, if there is one; so is, taken as signed
            # numbers, that of the positive ones.
            if bits.max() >= sign + infinity or bits.view(f"i{bits.itemsize}").max() >= infinity:
                found = np.flatnonzero(((bits & (sign - 1)) >= infinity).reshape(len(bits), -1).any(axis=1))
                bad.extend(int(row) + first for row in found)
        return bad

    def _pieces(self, info: TensorInfo, start: int, stop: int) -> Iterator[tuple[int, NDArray[Any]]]:
        """Rows of a stored tensor in its own type, some at a time (valid until the next), with the first's number."""
        # Not through a mapping: pages that were touched would stay resident as long as it is open.
        import ml_dtypes  # noqa: F401  registers bfloat16 with numpy

        if info.dtype not in _TYPES:
            raise RefusedError(
                f"is stored as {info.dtype}, which is not read.", where=info.name, todo="Use the float checkpoint."
            )
        kind = np.dtype(_TYPES[info.dtype])
        shard, width = self._stored[info.name][0], info.nbytes // info.shape[0]
        step = max(1, _PIECE_WEIGHTS // max(info.parameters // info.shape[0], 1))
        buffer = np.empty(min(step, max(stop - start, 0)) * width, np.uint8)
        with shard.open("rb") as file:
            file.seek(self._offsets[info.name] + start * width)
            for first in range(start, stop, step):
                count = min(step, stop - first)
                content = buffer[: count * width]
                if file.readinto(content.data) != len(content):
                    raise RefusedError("ended while it was read.", where=str(shard), todo="Download it again.")
                yield first, content.view(kind).reshape(count, *info.shape[1:])

    def parameters(self) -> int:
        """Number of stored parameters, all tensors."""
        return sum(info.parameters for _, info in self._stored.values())

    def tokenizer_folder(self) -> Path | None:
        """The checkpoint folder, if it holds a tokenizer."""
        markers = ("tokenizer.json", "tokenizer.model", "vocab.json")
        return self.path if any((self.path / marker).exists() for marker in markers) else None

    def gguf_layout(
        self, tensors: dict[str, tuple[int, ...]], tables: set[str], pre_tokenizer: str | None
    ) -> GgufLayout:
        """Ask llama.cpp's converter."""
        if self.tokenizer_folder() is None:
            raise RefusedError(
                "no tokenizer was found, and a GGUF file needs one.",
                where=str(self.path),
                todo="Put the tokenizer's files beside the weights, or export with `--format onnx` only.",
            )
        config = {**self.config, "architectures": [self._architecture()]}
        config["vocab_size"] = next(tensors[name][0] for name in sorted(tables))
        with Converter(config, self.tokenizer_folder(), name=self.label, pre_tokenizer=pre_tokenizer) as converter:
            metadata = converter.metadata()
            placements = {name: converter.place(name, shape, table=name in tables) for name, shape in tensors.items()}
            return GgufLayout(metadata, placements, dict(converter.extra_tensors()))

    def _architecture(self) -> str:
        """The causal language model's class: the family's where the checkpoint names a multimodal one."""
        named = (self.config.get("architectures") or self.full_config.get("architectures") or [""])[0]
        return self.family.architecture or str(named)

    def license_id(self) -> str | None:
        """``license`` in the front matter of the folder's ``README.md``."""
        return license_of_card(self.path / "README.md")

    def fingerprint(self) -> str:
        """SHA-256 over ``config.json`` and every shard, in order of name."""
        digest = hashlib.sha256()
        for path in [self.path / "config.json", *sorted(self._opened)]:
            with contextlib.ExitStack() as stack:
                file = stack.enter_context(path.open("rb"))
                while block := file.read(1 << 22):
                    digest.update(block)
        return digest.hexdigest()
