"""What a decoder-only model computes between its two roles, as a record that a graph can be built from.

Read off the configuration, the names of the tensors and the family's entry in ``families.json``. A model that does
something the record cannot say has none, with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.errors import RefusedError
from tieq.records import Role, RoleUse
from tieq.source.families import Family, family
from tieq.source.reference import make_config, rotary_frequencies

# Activations by their names in transformers, as the graph's.
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu"}
# Settings under which the layers compute something that the record does not say.
_UNKNOWN = ("use_bidirectional_attention", "qk_layernorm", "use_qk_norm", "num_local_experts", "num_experts")


@dataclasses.dataclass(frozen=True)
class Rotary:
    """A rotary position embedding: angle ``position * frequency``, cosine and sine times ``scale``.

    ``frequencies`` is ``[rotary columns / 2]`` float32.
    """

    frequencies: NDArray[np.float32]
    scale: float


@dataclasses.dataclass(frozen=True)
class Layer:
    """One decoder layer: the prefix of its tensors, its rotary embedding (an index, None for none), its window."""

    prefix: str
    rotary: int | None
    window: int | None


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder-only model.

    Attributes:
        heads: query heads; ``kv_heads`` key and value heads; ``head_size`` columns of each.
        rms: norms are root mean square, else layer norms with a bias.
        norm_offset: added to the stored gains (Gemma stores ``gain - 1``).
        parallel: attention and MLP read the same norm and are added together (Phi).
        attention_scale: of the products of queries and keys; ``attention_softcap`` caps them, 0 for none.
        residual_scale: of what a layer adds to the stream.
        names: tensor names within a layer, without ``.weight``, by what they do; empty where the family has none.
        final_norm: tensor name of the final norm, without ``.weight``.
        lookup: scaling after the lookup; ``logits`` what happens to the product.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    rms: bool
    norm_offset: float
    epsilon: float
    activation: str
    parallel: bool
    attention_scale: float
    attention_softcap: float
    residual_scale: float
    rotaries: tuple[Rotary, ...]
    layers: tuple[Layer, ...]
    names: dict[str, str]
    final_norm: str
    lookup: RoleUse
    logits: RoleUse


def decoder(config: dict[str, Any], tensors: Collection[str]) -> Decoder:
    """The record of a model.

    Args:
        config: the text model's Hugging Face configuration.
        tensors: canonical names of its tensors.

    Raises:
        RefusedError: with what the record cannot say.
    """
    model_type = str(config.get("model_type"))
    known = family(model_type)
    if known.decoder is None:
        raise _cannot(f"no layer description for the model type '{model_type}'")
    made = make_config(config).get_text_config()
    for key in _UNKNOWN:
        if getattr(made, key, None):
            raise _cannot(f"'{key}' is set")
    own = known.decoder
    activation = str(getattr(made, "hidden_activation", None) or getattr(made, "hidden_act", ""))
    if activation not in _ACTIVATIONS:
        raise _cannot(f"activation '{activation}'")
    head_size = int(getattr(made, "head_dim", None) or made.hidden_size // made.num_attention_heads)
    if head_size % 8:
        raise _cannot(f"heads of {head_size} columns, not a multiple of 8")
    rotaries, layers = _layers(made, known, head_size)
    epsilon = getattr(made, "rms_norm_eps", None)
    scale = getattr(made, own.get("attention_scale", ""), None)
    return Decoder(
        hidden=int(made.hidden_size),
        heads=int(made.num_attention_heads),
        kv_heads=int(getattr(made, "num_key_value_heads", None) or made.num_attention_heads),
        head_size=head_size,
        rms=own.get("norm", "rms") == "rms",
        norm_offset=float(own.get("norm_offset", 0.0)),
        epsilon=float(epsilon if epsilon is not None else made.layer_norm_eps),
        activation=_ACTIVATIONS[activation],
        parallel=bool(own.get("parallel", False)),
        attention_scale=_attention_scale(own, scale, head_size),
        attention_softcap=float(getattr(made, "attn_logit_softcapping", None) or 0.0),
        residual_scale=float(getattr(made, own.get("residual_scale", ""), 1.0)),
        rotaries=rotaries,
        layers=layers,
        names=_names(known, tensors, layers[0].prefix),
        final_norm=known.prefix + own.get("final_norm", "norm"),
        lookup=known.use(Role.LOOKUP, None, made.to_dict()),
        logits=known.use(Role.LOGITS, None, made.to_dict()),
    )


def _attention_scale(own: dict[str, Any], value: float | None, head_size: int) -> float:
    if value is None:
        return float(head_size**-0.5)
    return float(value**-0.5) if own.get("attention_scale") == "query_pre_attn_scalar" else float(value)


def _layers(config: Any, known: Family, head_size: int) -> tuple[tuple[Rotary, ...], tuple[Layer, ...]]:
    """Rotary embeddings, and each layer with its own: Gemma 3 has two, SmolLM3 layers without any."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    local = getattr(config, "rope_local_base_freq", None)
    rotaries = [_rotary(config, head_size)]
    if local is not None:
        rotaries.append(_rotary(config, head_size, base=float(local)))
    uses_rotary = getattr(config, "no_rope_layers", None)
    layers = []
    for number in range(config.num_hidden_layers):
        slides = window is not None and (kinds is None or kinds[number] == "sliding_attention")
        rotary = 1 if slides and local is not None else 0
        layers.append(
            Layer(
                prefix=f"{known.prefix}layers.{number}.",
                rotary=None if uses_rotary and not uses_rotary[number] else rotary,
                window=int(window) if slides and window is not None else None,
            )
        )
    return tuple(rotaries), tuple(layers)


def _rotary(config: Any, head_size: int, base: float | None = None) -> Rotary:
    kind, frequencies, scale = rotary_frequencies(config, base)
    if kind in ("dynamic", "longrope"):
        raise _cannot(f"rotary embeddings of the kind '{kind}', which depend on the length")
    if 2 * len(frequencies) > head_size or len(frequencies) % 8:
        raise _cannot(f"rotary embeddings of {2 * len(frequencies)} columns in heads of {head_size}")
    return Rotary(frequencies, scale)


def _names(known: Family, tensors: Collection[str], prefix: str) -> dict[str, str]:
    """Names within a layer that the model has, by what they do."""
    assert known.decoder is not None
    usual = {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "query": "self_attn.q_proj",
        "key": "self_attn.k_proj",
        "value": "self_attn.v_proj",
        "qkv": "self_attn.qkv_proj",
        "query_norm": "self_attn.q_norm",
        "key_norm": "self_attn.k_norm",
        "output": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "gate_up": "mlp.gate_up_proj",
        "down": "mlp.down_proj",
    }
    wished = {**usual, **known.decoder.get("names", {})}
    found = {key: name for key, name in wished.items() if f"{prefix}{name}.weight" in tensors}
    matrices = {name.removeprefix(prefix) for name in tensors if name.startswith(prefix) and name.endswith(".weight")}
    left = sorted(matrices - {f"{name}.weight" for name in found.values()})
    if left:
        raise _cannot(f"'{left[0]}' is in no place of the layer description")
    return found


def _cannot(what: str) -> RefusedError:
    return RefusedError(what, where="fused graph")
