"""Lookups in quantized matrices and products with them, from TFLite's builtin operators, over one constant a matrix.

The codes are those of the quantized checkpoint, moved from unsigned around a zero point to two's complement.

- A lookup reads 4-bit schemes and ``q2_0`` as one INT4 or INT2 tensor with block-wise scales in fp16.
- A product looks rows up as the lookup does, some at a time, and multiplies by what it gets. Only those are in memory
  as floats, and activations stay floats too.
- With ``integer``, FULLY_CONNECTED reads the INT4 tensor of a 4-bit matrix itself and rounds activations to int8. No
  kernel does that for the other schemes, and XNNPACK refuses negative scales (``Scheme.positive``).
- ``q8_0``: EMBEDDING_LOOKUP takes no block-wise INT8, so codes and scales are two tensors, looked up and multiplied.

Sources: TensorFlow Lite ``schema.fbs`` (BlockwiseQuantization), its kernels ``embedding_lookup`` and
``fully_connected``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tieq.codecs.schemes import SCHEMES
from tieq.export.litert_nodes import Nodes, Options, Value
from tieq.quantize import QuantizedCheckpoint

_SUM: Options = ("FullyConnectedOptions", {})
# Activations become int8 with a zero point of their own for each token.
_INTEGER_SUM: Options = ("FullyConnectedOptions", {"asymmetricQuantizeInputs": True})
# Weights that are floats at a time where a product has to widen them: 16 MB.
_WIDENED = 1 << 22
# Turns codes around a zero point in the middle into two's complement, all codes of a byte at once.
_FLIP = {2: np.uint8(0xAA), 4: np.uint8(0x88), 8: np.uint8(0x80)}
_SMALLEST = np.float16(2.0**-24)
_KIND = {2: "INT2", 4: "INT4", 8: "INT8"}


class Products:
    """Makes the operators that look a matrix up or multiply by it.

    Args:
        nodes: where they go.
        checkpoint: quantized matrices.
        integer: whether products read block-wise codes themselves where a kernel can.
    """

    def __init__(self, nodes: Nodes, checkpoint: QuantizedCheckpoint, *, integer: bool = False) -> None:
        self._nodes, self._checkpoint, self._integer = nodes, checkpoint, integer
        self._zeros: dict[int, Value] = {}

    def lookup(self, name: str, ids: Value) -> Value:
        """Rows ``[ids, columns]`` float32 of a matrix at ``ids`` ``[ids]`` int32."""
        add, scheme, count = self._nodes, self._checkpoint.scheme(name), ids.shape[0]
        _, columns = self._checkpoint.extent(name)
        label = f"{name}/rows"
        if scheme == "f16":
            return self._widened(ids, self._floats(name), columns, label)
        codes = self._codes(name)
        found = add("EMBEDDING_LOOKUP", [ids, codes], (count, columns), label)
        if codes.kind != "INT8":
            return found
        block = SCHEMES[scheme].block
        blocks = columns // block
        scales = self._widened(ids, self._scales(name), blocks, f"{name}/scales")
        by_block = add.reshape(found, (count, blocks, block), label)
        factors = add.reshape(scales, (count, blocks, 1), f"{name}/scales")
        scaled = add("MUL", [by_block, factors], (count, blocks, block), label, ("MulOptions", {}))
        return add.reshape(scaled, (count, columns), label)

    def multiply(self, name: str, hidden: Value, bias: Value | None = None) -> Value:
        """``hidden @ W.T + bias`` of ``[length, columns]`` with the matrix ``[rows, columns]``."""
        add = self._nodes
        rows, columns = self._checkpoint.extent(name)
        scheme = self._checkpoint.scheme(name)
        int4 = scheme in SCHEMES and SCHEMES[scheme].int4
        if self._integer and int4 and (self._checkpoint.scales(name) >= 0).all():
            return add("FULLY_CONNECTED", [hidden, self._codes(name), bias], (-1, rows), name, _INTEGER_SUM)
        step = max(1, _WIDENED // columns)
        parts: list[Value] = []
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            numbers = add.constant(f"rows.{start}.{stop}", np.arange(start, stop, dtype=np.int32))
            ready = self._zero_after(parts[-1] if parts else hidden, name)
            numbers = add("ADD", [numbers, ready], numbers.shape, f"{name}/numbers", ("AddOptions", {}), "INT32")
            weights = self.lookup(name, numbers)
            parts.append(add("FULLY_CONNECTED", [hidden, weights, None], (-1, stop - start), name, _SUM))
        product = parts[0]
        if len(parts) > 1:
            product = add("CONCATENATION", parts, (-1, rows), name, ("ConcatenationOptions", {"axis": 1}))
        return product if bias is None else add("ADD", [product, bias], (-1, rows), name, ("AddOptions", {}))

    def _zero_after(self, value: Value, name: str) -> Value:
        """``[1]`` int32, 0, that exists no sooner than a value does.

        Lookups by constants alone depend on nothing: a runtime that gives parts of the graph to a faster kernel runs
        them all before its first part, and the whole model is in memory as floats.
        """
        if value.index not in self._zeros:
            add, label = self._nodes, f"{name}/ready"
            begin, size = add.ints(0, 0), add.ints(1, 1)
            first = add("SLICE", [value, begin, size], (1, 1), label, ("SliceOptions", {}))
            types = add.schema.TensorType
            options = ("CastOptions", {"inDataType": types.FLOAT32, "outDataType": types.INT32})
            whole = add.reshape(add("CAST", [first], (1, 1), label, options, "INT32"), (1,), label)
            self._zeros[value.index] = add("SUB", [whole, whole], (1,), label, ("SubOptions", {}), "INT32")
        return self._zeros[value.index]

    def _codes(self, name: str) -> Value:
        known = self._nodes.known(name)
        if known is not None:
            return known
        rows, columns = self._checkpoint.extent(name)
        geometry = SCHEMES[self._checkpoint.scheme(name)]
        packed, scales = self._checkpoint.packed(name)
        quantization = self._by_one() if geometry.bits == 8 else self._blockwise(self._scales(name), geometry.block)
        content = packed ^ _FLIP[geometry.bits]
        content[scales == 0] = 0  # their scale becomes another, see `_scales`
        return self._nodes.packed(name, content, (rows, columns), _KIND[geometry.bits], quantization)

    def _scales(self, name: str) -> Value:
        label = f"{name}.scales"
        known = self._nodes.known(label)
        if known is not None:
            return known
        scales = self._checkpoint.scales(name)
        # XNNPACK refuses zero, and any scale leaves a block of zeros as it is.
        return self._nodes.constant(label, np.where(scales == 0, _SMALLEST, scales))

    def _floats(self, name: str) -> Value:
        return self._nodes.known(name) or self._nodes.constant(name, self._checkpoint.tensor(name))

    def _widened(self, ids: Value, table: Value, columns: int, label: str) -> Value:
        """Rows of an fp16 table as float32."""
        shape = (ids.shape[0], columns)
        found = self._nodes("EMBEDDING_LOOKUP", [ids, table], shape, label, type_="FLOAT16")
        return self._nodes("DEQUANTIZE", [found], shape, label)

    def _blockwise(self, scales: Value, block: int) -> Any:
        schema = self._nodes.schema
        made = schema.QuantizationParametersT()
        made.detailsType = schema.QuantizationDetails.BlockwiseQuantization
        made.details = schema.BlockwiseQuantizationT()
        made.details.scales, made.details.zeroPoints, made.details.blockSize = scales.index, -1, block
        return made

    def _by_one(self) -> Any:
        """One scale for the tensor, which is 1: the lookup then gives the codes as floats."""
        made = self._nodes.schema.QuantizationParametersT()
        made.scale, made.zeroPoint = np.ones(1, np.float32), np.zeros(1, np.int64)
        return made
