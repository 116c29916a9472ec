"""Where an ONNX tensor's bytes are, in the model file or outside, and their values."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.errors import TieqError


@dataclasses.dataclass(frozen=True)
class Place:
    """A run of bytes: in an external file, or inside the model file under the tensor's name (offset -1)."""

    file: Path
    offset: int
    length: int
    inline_name: str = ""

    def __str__(self) -> str:
        where = f"inside as '{self.inline_name}'" if self.inline_name else f"at byte {self.offset}"
        return f"{self.file.name} {where}, {self.length} bytes"


def place_of(tensor: Any, model_path: Path) -> Place:
    """Find a tensor's bytes.

    Raises:
        TieqError: if the external location leaves the model's folder, is missing or too short.
    """
    from onnx import TensorProto, helper

    count = int(np.prod(list(tensor.dims))) if tensor.dims else 1
    itemsize = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    if tensor.data_location != TensorProto.EXTERNAL:
        return Place(model_path, -1, count * itemsize, tensor.name)
    entries = {entry.key: entry.value for entry in tensor.external_data}
    folder = model_path.resolve().parent
    file = folder / entries.get("location", "")
    if Path(entries.get("location", "")).is_absolute() or folder not in file.resolve().parents:
        raise TieqError(
            f"tensor '{tensor.name}' points outside the model's folder ({entries.get('location')}).",
            where=str(model_path),
        )
    offset = int(entries.get("offset", 0))
    length = int(entries.get("length", count * itemsize))
    if not file.is_file() or offset < 0 or length < 0 or offset + length > file.stat().st_size:
        raise TieqError(
            f"tensor '{tensor.name}' needs bytes {offset} to {offset + length} of {file.name}, which has "
            f"{file.stat().st_size if file.is_file() else 'gone missing'}.",
            where=str(model_path),
            todo="Keep the model and its data file together and whole.",
        )
    return Place(file, offset, length)


def read_array(tensor: Any, model_path: Path) -> NDArray[Any]:
    """The tensor's values; external ones through a memory map."""
    from onnx import helper, numpy_helper

    place = place_of(tensor, model_path)
    if place.offset < 0:
        return numpy_helper.to_array(tensor)
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return np.memmap(place.file, dtype, "r", place.offset, tuple(tensor.dims))


def joined(tensors: Sequence[Any], model_path: Path) -> Any:
    """One tensor of the rows of several: over their own bytes if these lie one after the other, else over a copy."""
    from onnx import TensorProto, numpy_helper

    name = " + ".join(tensor.name for tensor in tensors)
    places = [place_of(tensor, model_path) for tensor in tensors]
    follow = all(
        one.offset >= 0 and one.file == next_.file and one.offset + one.length == next_.offset
        for one, next_ in itertools.pairwise(places)
    )
    if not follow:
        return numpy_helper.from_array(np.concatenate([read_array(tensor, model_path) for tensor in tensors]), name)
    whole = TensorProto(name=name, data_type=tensors[0].data_type, data_location=TensorProto.EXTERNAL)
    whole.dims.extend([sum(tensor.dims[0] for tensor in tensors), *tensors[0].dims[1:]])
    location = next(entry.value for entry in tensors[0].external_data if entry.key == "location")
    length = sum(place.length for place in places)
    for key, value in (("location", location), ("offset", str(places[0].offset)), ("length", str(length))):
        whole.external_data.add(key=key, value=value)
    return whole
