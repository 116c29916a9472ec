"""``genai_config.json``: what onnxruntime-genai wants to know beside an ONNX decoder.

Source: onnxruntime-genai, "Config reference".
"""

from __future__ import annotations

from typing import Any

from tieq.source.decoder import Decoder

FILE = "genai_config.json"


def genai_config(decoder: Decoder, config: dict[str, Any], generation: dict[str, Any], filename: str) -> dict[str, Any]:
    """The document.

    Args:
        decoder: the model.
        config: its Hugging Face configuration.
        generation: its ``generation_config.json``.
        filename: of the ONNX model, beside the document.
    """

    def token(name: str) -> Any:
        found = generation.get(name)
        return config.get(name) if found is None else found

    ends = token("eos_token_id")
    first_end = ends[0] if isinstance(ends, list) and ends else ends
    padding = token("pad_token_id")
    length = context_length(config)
    return {
        "model": {
            "type": str(config["model_type"]),
            "vocab_size": int(config["vocab_size"]),
            "context_length": length,
            "bos_token_id": _or(token("bos_token_id"), first_end, 0),
            "eos_token_id": _or(ends, 0),
            "pad_token_id": _or(padding, first_end, 0),
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": filename,
                "head_size": decoder.head_size,
                "hidden_size": decoder.hidden,
                "num_attention_heads": decoder.heads,
                "num_hidden_layers": len(decoder.layers),
                "num_key_value_heads": decoder.kv_heads,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {
            "do_sample": bool(generation.get("do_sample") or False),
            "early_stopping": True,
            "max_length": length,
            "min_length": 0,
            "num_beams": 1,
            "num_return_sequences": 1,
            "past_present_share_buffer": True,
            "repetition_penalty": float(_or(generation.get("repetition_penalty"), 1.0)),
            "temperature": float(_or(generation.get("temperature"), 1.0)),
            "top_k": int(_or(generation.get("top_k"), 50)),
            "top_p": float(_or(generation.get("top_p"), 1.0)),
        },
    }


def context_length(config: dict[str, Any]) -> int:
    """Positions that a model was made for."""
    return int(config.get("max_position_embeddings") or 2048)


def _or(*values: Any) -> Any:
    """The first that is not None."""
    return next((value for value in values if value is not None), None)
