"""The TFLite graph of a decoder-only model, built from its record: one sequence from its beginning, without a cache.

Token ids ``[1, length]`` become logits ``[1, length, vocabulary]``; inside, the stream is ``[length, columns]``, and no
shape depends on a value, so that a runtime knows all of them once it knows the length. TFLite has no operators for
norms, rotations or attention, so they are spelled out (``litert_attention.py``).
Source: TensorFlow Lite ``schema.fbs``.
"""

from __future__ import annotations

import numpy as np

from tieq.export.litert_attention import Attention
from tieq.export.litert_math import Math
from tieq.export.litert_nodes import Nodes, Value
from tieq.export.litert_products import Products
from tieq.quantize import QuantizedCheckpoint
from tieq.source.decoder import Decoder, Layer

INPUT, OUTPUT, SIGNATURE = "input_ids", "logits", "serving_default"


class DecoderGraph:
    """Fills a graph. Use :meth:`build` once.

    Args:
        decoder: the model.
        nodes: where operators and constants go.
        checkpoint: quantized matrices, norms and biases.
        lookup: name of the lookup table; ``logits`` of the matrix of the logits role.
        tied: whether the lookup table plays the logits role too; a bias stays under the logits' name.
        integer: see :class:`tieq.export.litert_products.Products`.
    """

    def __init__(
        self,
        decoder: Decoder,
        nodes: Nodes,
        checkpoint: QuantizedCheckpoint,
        *,
        lookup: str,
        logits: str,
        tied: bool,
        integer: bool = False,
    ) -> None:
        self.decoder, self.nodes, self.checkpoint = decoder, nodes, checkpoint
        self.products, self.math = Products(nodes, checkpoint, integer=integer), Math(nodes)
        self._lookup, self._logits = lookup, logits
        self._head_matrix = lookup if tied else logits
        self._floats = set(checkpoint.floats)

    def build(self) -> None:
        """Add the whole model."""
        add, math, decoder = self.nodes, self.math, self.decoder
        given = add.input(INPUT, (1, -1), "INT32")
        ids = add.reshape(given, (-1,), INPUT)
        self._attention = Attention(decoder, add, math, ids)
        stream = self.products.lookup(self._lookup, ids)
        stream = math.scaled(stream, decoder.lookup.multiplier, "embed_tokens/scale")
        for layer in decoder.layers:
            normed = self._norm(stream, layer, "attention_norm")
            attended = self._attended(layer, normed)
            if decoder.parallel:
                both = math.binary("ADD", attended, self._mlp(layer, normed), f"{layer.prefix}both")
                stream = math.binary("ADD", stream, both, f"{layer.prefix}stream")
                continue
            stream = self._added(layer, stream, self._out_norm(attended, layer, "attention_out_norm"))
            computed = self._mlp(layer, self._norm(stream, layer, "mlp_norm"))
            stream = self._added(layer, stream, self._out_norm(computed, layer, "mlp_out_norm"))
        logits = self._head(self._normed(stream, decoder.final_norm))
        logits = add.reshape(logits, (1, -1, logits.shape[-1]), OUTPUT)
        add.output(logits, OUTPUT)
        add.signature(SIGNATURE, {INPUT: given}, {OUTPUT: logits})

    def _added(self, layer: Layer, stream: Value, found: Value) -> Value:
        found = self.math.scaled(found, self.decoder.residual_scale, f"{layer.prefix}scale")
        return self.math.binary("ADD", stream, found, f"{layer.prefix}stream")

    def _attended(self, layer: Layer, normed: Value) -> Value:
        """What attention adds to the stream."""
        names, decoder = self.decoder.names, self.decoder
        if "qkv" in names:
            sizes = [decoder.head_size * count for count in (decoder.heads, decoder.kv_heads, decoder.kv_heads)]
            whole = self._multiply(layer, "qkv", normed)
            parts = self.math.split(whole, sizes, f"{layer.prefix}self_attn/parts")
        else:
            parts = [self._multiply(layer, key, normed) for key in ("query", "key", "value")]
        gains = [
            self._gain(f"{layer.prefix}{names[key]}") if key in names else None for key in ("query_norm", "key_norm")
        ]
        return self._multiply(layer, "output", self._attention.attend(layer, parts, gains))

    def _mlp(self, layer: Layer, hidden: Value) -> Value:
        math, names, prefix = self.math, self.decoder.names, f"{layer.prefix}mlp"
        kind = self.decoder.activation
        if "gate" not in names and "gate_up" not in names:
            up = self._multiply(layer, "up", hidden)
            return self._multiply(layer, "down", math.activated(up, kind, prefix))
        if "gate_up" in names:
            both = self._multiply(layer, "gate_up", hidden)
            gate, up = math.split(both, [both.shape[-1] // 2] * 2, prefix)
        else:
            gate, up = (self._multiply(layer, key, hidden) for key in ("gate", "up"))
        gated = math.binary("MUL", math.activated(gate, kind, prefix), up, f"{prefix}/gated")
        return self._multiply(layer, "down", gated)

    def _multiply(self, layer: Layer, key: str, hidden: Value) -> Value:
        return self._product(f"{layer.prefix}{self.decoder.names[key]}", hidden)

    def _product(self, name: str, hidden: Value) -> Value:
        bias = f"{name}.bias"
        added = self.nodes.constant(bias, self._float(bias)) if bias in self._floats else None
        return self.products.multiply(f"{name}.weight", hidden, added)

    def _head(self, hidden: Value) -> Value:
        math, use = self.math, self.decoder.logits
        name = f"{self._logits.removesuffix('.weight')}.bias"
        bias = self.nodes.constant(name, self._float(name)) if use.bias and name in self._floats else None
        value = self.products.multiply(self._head_matrix, hidden, bias)
        return math.capped(math.scaled(value, use.multiplier, "lm_head/scale"), use.softcap or 0.0, "lm_head/softcap")

    def _float(self, name: str) -> np.ndarray:
        return np.asarray(self.checkpoint.tensor(name), np.float32)

    def _gain(self, name: str) -> Value:
        return self.nodes.constant(f"{name}.gain", self._float(f"{name}.weight") + np.float32(self.decoder.norm_offset))

    def _norm(self, value: Value, layer: Layer, key: str) -> Value:
        return self._normed(value, f"{layer.prefix}{self.decoder.names[key]}")

    def _out_norm(self, value: Value, layer: Layer, key: str) -> Value:
        return self._norm(value, layer, key) if key in self.decoder.names else value

    def _normed(self, value: Value, name: str) -> Value:
        math, epsilon = self.math, self.decoder.epsilon
        if self.decoder.rms:
            return math.rms_norm(value, self._gain(name), epsilon, name)
        shift = self.nodes.constant(f"{name}.shift", self._float(f"{name}.bias"))
        return math.layer_norm(value, self._gain(name), shift, epsilon, name)
