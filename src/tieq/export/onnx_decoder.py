"""The fused float graph of a decoder-only model, built from its record and not traced.

Attention with its key-value cache and rotary embedding is one operator (GroupQueryAttention), a sum and the norm after
it another (SkipSimplifiedLayerNormalization); products come from :class:`tieq.export.onnx_products.Products`.
Source: ONNX Runtime ``docs/ContribOperators.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tieq.export.onnx_attention import FLOAT, INT64, LAST, generation_inputs, shared_inputs
from tieq.export.onnx_nodes import Nodes
from tieq.export.onnx_products import CONTRIB, Products
from tieq.quantize import QuantizedCheckpoint
from tieq.source.decoder import Decoder, Layer

if TYPE_CHECKING:
    import onnx_ir as ir

KEEP = "num_logits_to_keep"


class DecoderGraph:
    """Fills a graph. Use :meth:`build` once.

    Args:
        decoder: the model.
        nodes: where nodes and small initializers go.
        products: makes lookups and products.
        checkpoint: quantized matrices, norms and biases.
        lookup: name of the lookup table; ``logits`` of the matrix of the logits role.
        tied: whether the lookup table plays the logits role too; a bias stays under the logits' name.
        generate: the graph for generation.
    """

    def __init__(
        self,
        decoder: Decoder,
        nodes: Nodes,
        products: Products,
        checkpoint: QuantizedCheckpoint,
        *,
        lookup: str,
        logits: str,
        tied: bool,
        generate: bool = False,
    ) -> None:
        self.decoder, self.nodes, self.products, self.checkpoint = decoder, nodes, products, checkpoint
        self._lookup, self._logits, self._generate = lookup, logits, generate
        self._head_matrix = lookup if tied else logits
        self._floats = set(checkpoint.floats)

    def build(self, rows: int, context: int) -> None:
        """Add the whole model, with a vocabulary of ``rows`` and at most ``context`` positions in generation."""
        add = self.nodes
        ids = add.input("input_ids", INT64, ["batch_size", "sequence_length"])
        mask = add.input("attention_mask", INT64, ["batch_size", "total_sequence_length"])
        if self._generate:
            self._shared, kept = generation_inputs(add, self.decoder, ids, mask, context)
        else:
            positions = add.input("position_ids", INT64, ["batch_size", "sequence_length"])
            self._shared, kept = shared_inputs(add, self.decoder, ids, mask, positions), self._kept()
        look_up = self.products.lookup_rows_first if self._generate else self.products.lookup
        stream = add.last(look_up(self._lookup, ids), "embed_tokens")
        stream = self._scaled(stream, self.decoder.lookup.multiplier, "embed_tokens/scale")
        normed, last = None, len(self.decoder.layers) - 1
        for number, layer in enumerate(self.decoder.layers):
            start = kept if number == last else None
            stream, normed = (self._parallel if self.decoder.parallel else self._sequential)(
                number, layer, stream, normed, start
            )
        assert normed is not None
        self._head(normed, rows)

    def _kept(self) -> ir.Value:
        """Where the positions begin that get logits, counted from the end, ``[1]`` int64; 0 is the beginning."""
        add = self.nodes
        number = add.constant(KEEP, np.array(0, np.int64))
        # An input with an initializer need not be given.
        add.graph.inputs.append(number)
        return add("Reshape", [add("Neg", [number], "logits/from_end"), add.shape(1)], "logits/start")

    def _sequential(
        self, number: int, layer: Layer, stream: ir.Value, normed: ir.Value | None, start: ir.Value | None
    ) -> tuple[ir.Value, ir.Value]:
        """Attention, then the MLP, each added to the stream; the last sum comes with the next layer's norm."""
        if normed is None:
            normed = self._norm(stream, layer, "attention_norm")
        found, stream = self._attention(number, layer, normed, stream, start)
        found = self._scaled(
            self._out_norm(found, layer, "attention_out_norm"), self.decoder.residual_scale, found.name
        )
        normed, stream = self._add_and_norm(stream, found, f"{layer.prefix}{self.decoder.names['mlp_norm']}")
        found = self._mlp(layer, normed)
        found = self._scaled(self._out_norm(found, layer, "mlp_out_norm"), self.decoder.residual_scale, found.name)
        normed, stream = self._add_and_norm(stream, found, self._next_norm(number))
        return stream, normed

    def _parallel(
        self, number: int, layer: Layer, stream: ir.Value, normed: ir.Value | None, start: ir.Value | None
    ) -> tuple[ir.Value, ir.Value]:
        """Attention and MLP of one norm, added to the stream together."""
        if normed is None:
            normed = self._norm(stream, layer, "attention_norm")
        attended, stream = self._attention(number, layer, normed, stream, start)
        computed = self._mlp(layer, self._from(normed, start, f"{layer.prefix}normed"))
        both = self.nodes("Add", [attended, computed], f"{layer.prefix}both")
        normed, stream = self._add_and_norm(stream, both, self._next_norm(number))
        return stream, normed

    def _next_norm(self, number: int) -> str:
        if number + 1 == len(self.decoder.layers):
            return self.decoder.final_norm
        return f"{self.decoder.layers[number + 1].prefix}{self.decoder.names['attention_norm']}"

    def _attention(
        self, number: int, layer: Layer, normed: ir.Value, stream: ir.Value, start: ir.Value | None
    ) -> tuple[ir.Value, ir.Value]:
        """What attention adds to the stream, and the stream; both from ``start`` on."""
        add, decoder, names = self.nodes, self.decoder, self.decoder.names
        three = [names["qkv"]] if "qkv" in names else [names["query"], names["key"], names["value"]]
        parts = self._multiply(layer, three, normed)
        if "query_norm" in names:
            parts = self._normed_heads(layer, parts)
        past = [
            add.input(
                f"past_key_values.{number}.{kind}",
                FLOAT,
                ("batch_size", decoder.kv_heads, "past_sequence_length", decoder.head_size),
            )
            for kind in ("key", "value")
        ]
        rotates = layer.rotary is not None
        cosines, sines = self._shared.tables[layer.rotary] if layer.rotary is not None else (None, None)
        inputs = [*parts, *[None] * (3 - len(parts)), *past, self._shared.last_keys, self._shared.total]
        inputs += [cosines, sines, self._shared.rows if rotates else None, self._shared.bias]
        attributes: dict[str, Any] = {
            "num_heads": decoder.heads,
            "kv_num_heads": decoder.kv_heads,
            "do_rotary": int(rotates),
            "scale": decoder.attention_scale,
        }
        if layer.window is not None:
            attributes["local_window_size"] = layer.window
        if decoder.attention_softcap:
            attributes["softcap"] = decoder.attention_softcap
        name = f"{layer.prefix}self_attn"
        found, key, value = add.several("GroupQueryAttention", inputs, name, 3, attributes, CONTRIB)
        for present, kind in ((key, "key"), (value, "value")):
            extent = ("batch_size", decoder.kv_heads, "total_sequence_length", decoder.head_size)
            add.output(present, f"present.{number}.{kind}", FLOAT, extent)
        found, stream = self._from(found, start, f"{name}/kept"), self._from(stream, start, f"{layer.prefix}stream")
        return self._multiply(layer, [names["output"]], found)[0], stream

    def _normed_heads(self, layer: Layer, parts: Sequence[ir.Value]) -> list[ir.Value]:
        """Queries, keys and values with the first two normed head by head (the CPU operator does not do it itself)."""
        add, decoder, name = self.nodes, self.decoder, f"{layer.prefix}self_attn"
        heads = (decoder.heads, decoder.kv_heads, decoder.kv_heads)
        if len(parts) == 1:
            sizes = add.shape(*(decoder.head_size * count for count in heads))
            parts = add.several("Split", [parts[0], sizes], f"{name}/split", 3, {"axis": -1})
        found = []
        for value, count, key in zip(parts, heads, ("query_norm", "key_norm"), strict=False):
            each = add("Reshape", [value, add.shape(0, 0, count, decoder.head_size)], f"{name}/{key}/heads")
            each = self._norm(each, layer, key)
            found.append(add("Reshape", [each, add.shape(0, 0, count * decoder.head_size)], f"{name}/{key}/joined"))
        return [*found, parts[2]]

    def _mlp(self, layer: Layer, hidden: ir.Value) -> ir.Value:
        add, names = self.nodes, self.decoder.names
        if "gate" not in names and "gate_up" not in names:
            (up,) = self._multiply(layer, [names["up"]], hidden)
            return self._multiply(layer, [names["down"]], self._activated(up, f"{layer.prefix}mlp/activated"))[0]
        together = [names["gate_up"]] if "gate_up" in names else [names["gate"], names["up"]]
        # One product and taking it apart is faster than a product each, after which threads have to meet.
        parts = list(self._multiply(layer, together, hidden))
        if len(parts) == 1:
            parts = list(add.several("Split", parts, f"{layer.prefix}mlp/split", 2, {"axis": -1, "num_outputs": 2}))
        gate, up = parts
        gated = add("Mul", [self._activated(gate, f"{layer.prefix}mlp/activated"), up], f"{layer.prefix}mlp/gated")
        return self._multiply(layer, [names["down"]], gated)[0]

    def _activated(self, value: ir.Value, name: str) -> ir.Value:
        if self.decoder.activation == "silu":
            return self.nodes("QuickGelu", [value], name, {"alpha": 1.0}, CONTRIB)
        if self.decoder.activation == "gelu_tanh":
            return self.nodes("FastGelu", [value], name, domain=CONTRIB)
        return self.nodes("Gelu", [value], name, domain=CONTRIB)

    def _multiply(self, layer: Layer, names: Sequence[str], hidden: ir.Value) -> Sequence[ir.Value]:
        """Products of one input: one value where the matrices can be one product, else a value each."""
        matrices = [f"{layer.prefix}{name}" for name in names]
        biases = [f"{name}.bias" for name in matrices if f"{name}.bias" in self._floats]
        alike = len(biases) in (0, len(matrices)) and self.products.together([f"{name}.weight" for name in matrices])
        if len(names) > 1 and not alike:
            return [self._multiply(layer, [name], hidden)[0] for name in names]
        bias = None
        if biases:
            values = np.concatenate([self.checkpoint.tensor(name) for name in biases])
            bias = self.nodes.constant(f"{layer.prefix}{'+'.join(names)}.bias", values)
        made = self.products.multiply([f"{name}.weight" for name in matrices], hidden, bias)
        return [self.nodes.last(made, f"{layer.prefix}{'+'.join(names)}")]

    def _head(self, hidden: ir.Value, rows: int) -> None:
        add, use = self.nodes, self.decoder.logits
        name = f"{self._logits.removesuffix('.weight')}.bias"
        bias = None
        if use.bias and name in self._floats:
            bias = add.constant(name, self.checkpoint.tensor(name))
        # Where all positions are kept, side by side would copy as much as the logits are.
        multiply = self.products.multiply_in_pieces if self._generate else self.products.multiply
        value = add.last(multiply(self._head_matrix, hidden), "lm_head")
        if bias is not None:
            value = add("Add", [value, bias], "lm_head/bias")
        value = self._scaled(value, use.multiplier, "lm_head/scale")
        if use.softcap is not None:
            cap = add.constant("lm_head.softcap", np.array(use.softcap, np.float32))
            value = add("Tanh", [add("Div", [value, cap], "lm_head/softcap/Div")], "lm_head/softcap/Tanh")
            value = add("Mul", [value, cap], "lm_head/softcap/Mul")
        kept: int | str = 1 if self._generate else "num_logits"
        add.output(value, "logits", FLOAT, ["batch_size", kept, rows])

    def _from(self, value: ir.Value, start: ir.Value | None, name: str) -> ir.Value:
        """The kept positions of ``[batch, length, columns]``; all where there is no start."""
        if start is None:
            return value
        if self._generate:
            return self.nodes("GatherND", [value, start], name, {"batch_dims": 1})
        return self.nodes("Slice", [value, start, self.nodes.shape(LAST), self.nodes.shape(1)], name)

    def _scaled(self, value: ir.Value, factor: float, name: str | None) -> ir.Value:
        if factor == 1.0:
            return value
        constant = self.nodes.constant(f"{name}.factor", np.array(factor, np.float32))
        return self.nodes("Mul", [value, constant], f"{name}/scaled")

    def _gain(self, name: str) -> ir.Value:
        values: NDArray[np.float32] = self.checkpoint.tensor(f"{name}.weight").astype(np.float32)
        return self.nodes.constant(f"{name}.gain", values + np.float32(self.decoder.norm_offset))

    def _norm(self, value: ir.Value, layer: Layer, key: str) -> ir.Value:
        name = f"{layer.prefix}{self.decoder.names[key]}"
        attributes: dict[str, Any] = {"axis": -1, "epsilon": self.decoder.epsilon}
        if self.decoder.rms:
            return self.nodes("SimplifiedLayerNormalization", [value, self._gain(name)], name, attributes)
        return self.nodes("LayerNormalization", [value, self._gain(name), self._shift(name)], name, attributes)

    def _out_norm(self, value: ir.Value, layer: Layer, key: str) -> ir.Value:
        return self._norm(value, layer, key) if key in self.decoder.names else value

    def _shift(self, name: str) -> ir.Value:
        return self.nodes.constant(f"{name}.shift", self.checkpoint.tensor(f"{name}.bias"))

    def _add_and_norm(self, stream: ir.Value, added: ir.Value, name: str) -> tuple[ir.Value, ir.Value]:
        """The norm of the sum, and the sum."""
        attributes = {"epsilon": self.decoder.epsilon}
        inputs = [stream, added, self._gain(name)]
        kind = "SkipSimplifiedLayerNormalization"
        if not self.decoder.rms:
            kind, inputs = "SkipLayerNormalization", [*inputs, self._shift(name)]
        normed, *unused, total = self.nodes.several(kind, inputs, name, 4, attributes, CONTRIB)
        for value in unused:
            value.name = ""  # an output with a name would be computed
        return normed, total
