from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch

from tieq.errors import RefusedError
from tieq.source.reference import ReferenceModel
from tieq.source.residual import residual_stream
from tieq.source.role_runs import blocks_of, hidden_states, role_tables

IDS = np.random.default_rng(0).integers(0, tiny.ROWS, 16)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text", "smollm3", "gpt2", "phi", "phi3"])
def test_the_stream_is_what_transformers_calls_its_hidden_states(family: str) -> None:
    model = ReferenceModel(tiny.model(family))
    hidden, stream = residual_stream(model, IDS)
    with torch.no_grad():
        theirs = model.module(torch.from_numpy(IDS)[None], output_hidden_states=True).hidden_states
    # Theirs are the stream before each block, and behind the last one the state after the final norm.
    assert len(stream) == len(theirs) == len(blocks_of(model)) + 1
    for ours, expected in zip(stream[:-1], theirs[:-1], strict=True):
        assert np.array_equal(ours, expected[0].numpy())
    assert np.array_equal(hidden, hidden_states(model, IDS))
    # The final norm is the one thing between the last of the stream and the hidden state.
    assert stream.dtype == hidden.dtype == np.float32
    assert not np.allclose(stream[-1], hidden)


def test_no_hook_stays_behind_even_after_an_error() -> None:
    model = ReferenceModel(tiny.model("llama"))
    residual_stream(model, IDS)
    with pytest.raises(IndexError):
        residual_stream(model, np.array([tiny.ROWS]))
    for module in model.module.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_a_model_without_blocks_is_refused() -> None:
    module = tiny.model("llama")
    module.model.layers = torch.nn.Sequential(*module.model.layers)
    with pytest.raises(RefusedError, match="no list of decoder blocks"):
        blocks_of(ReferenceModel(module))


def test_role_tables_are_one_array_where_the_model_is_tied() -> None:
    lookup, logits = role_tables(ReferenceModel(tiny.model("llama")))
    assert lookup is logits
    assert lookup.shape == (tiny.ROWS, 64)
    lookup, logits = role_tables(ReferenceModel(tiny.model("phi")))
    assert lookup is not logits
    assert not np.array_equal(lookup, logits)
