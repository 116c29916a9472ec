"""What is particular to a model family, as data: names of the role tensors, scaling around the roles, GGUF keys.

A new family is an entry in ``families.json``. A model type that has none is handled by the common names, and its
defaults are asked of transformers.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from importlib import resources
from typing import Any

from tieq.errors import TieqError
from tieq.records import Role, RoleUse

# GGUF metadata keys (without the architecture prefix) that mean the same in most decoder families.
_COMMON_GGUF_CONFIG = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}


@dataclasses.dataclass(frozen=True)
class Family:
    """One entry of ``families.json``; see the field names there."""

    model_type: str
    architecture: str | None = None
    gguf: str | None = None
    tie_default: bool | None = None
    prefix: str = "model."
    lookup: str = "embed_tokens.weight"
    logits: str = "lm_head.weight"
    logits_bias: bool = False
    lookup_multiplier: str | None = None
    logits_multiplier: str | None = None
    logits_divisor: str | None = None
    softcap: str | None = None
    defaults: dict[str, float] = dataclasses.field(default_factory=dict)
    decoder: dict[str, Any] | None = None  # what its layers do beside the usual; see tieq.source.decoder
    gguf_can_share: bool = True  # False where llama.cpp's loader insists on an output.weight of its own
    gguf_partial_rotary: bool = False  # rope.dimension_count is a share of the head
    gguf_config: dict[str, str | list[str]] = dataclasses.field(default_factory=dict)
    gguf_defaults: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def lookup_name(self) -> str:
        """Canonical name of the lookup table."""
        return self.prefix + self.lookup

    @property
    def logits_name(self) -> str:
        """Canonical name of the logits matrix."""
        return self.logits

    def gguf_keys(self) -> dict[str, list[str]]:
        """GGUF metadata key (without the architecture) to the config keys that take its value."""
        common = {} if self.model_type == "gpt2" else _COMMON_GGUF_CONFIG
        both = {**common, **self.gguf_config}
        return {key: [names] if isinstance(names, str) else names for key, names in both.items()}

    def use(self, role: Role, tensor: str | None, config: dict[str, Any]) -> RoleUse:
        """Describe one role: the tensor that plays it and the scaling around it, taken from the config."""
        config = {**self.defaults, **config}
        if role is Role.LOOKUP:
            return RoleUse(role, tensor, self._lookup_scale(config))
        multiplier = float(config.get(self.logits_multiplier or "", 1.0))
        divisor = float(config.get(self.logits_divisor or "", 1.0))
        softcap = config.get(self.softcap or "")
        return RoleUse(role, tensor, multiplier / divisor, softcap, self.logits_bias)

    def _lookup_scale(self, config: dict[str, Any]) -> float:
        if self.lookup_multiplier is None:
            return 1.0
        if self.lookup_multiplier == "sqrt_hidden_size":
            return math.sqrt(config["hidden_size"])
        return float(config.get(self.lookup_multiplier, 1.0))


@functools.lru_cache(maxsize=1)
def _table() -> dict[str, Family]:
    text = resources.files("tieq.source").joinpath("families.json").read_text(encoding="utf-8")
    return {name: Family(model_type=name, **entry) for name, entry in json.loads(text).items()}


def family(model_type: str) -> Family:
    """The family of a Hugging Face ``model_type``; common names where there is no entry."""
    return _table().get(model_type, Family(model_type))


def family_of_gguf(architecture: str) -> Family:
    """The family whose GGUF architecture this is.

    Raises:
        TieqError: if there is none; the message lists those that there are.
    """
    for entry in _table().values():
        if entry.gguf == architecture:
            return entry
    known = ", ".join(sorted(entry.gguf for entry in _table().values() if entry.gguf))
    raise TieqError(
        f"the GGUF architecture '{architecture}' cannot be mapped back to a checkpoint (known: {known}).",
        todo="Use the original checkpoint folder as the model.",
    )
