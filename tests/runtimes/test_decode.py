"""The decode rate: steps with a cache give the tokens that the whole sequence gives."""

from __future__ import annotations

import numpy as np
import pytest

from tieq.runtimes import runtime
from tieq.runtimes.base import Decoder

FILES = {"onnxruntime": "onnx/model.onnx", "llama.cpp": "gguf/model.gguf"}


@pytest.mark.parametrize("name", FILES)
def test_steps_are_timed_and_leave_the_session_as_it_was(name, tiny_export):
    path = tiny_export().folder / FILES[name]
    _, opened = next(iter(runtime(name).modes(path)))
    ids = np.arange(5, 25)
    with opened as session:
        assert isinstance(session, Decoder)
        before = session.logits(ids)
        assert session.decode(ids, 6) > 0
        assert np.array_equal(session.logits(ids), before)


def test_the_cache_of_a_step_is_that_of_the_sequence(tiny_export):
    """Fed back step by step, the graph gives the logits of the whole sequence."""
    _, opened = next(iter(runtime("onnxruntime").modes(tiny_export().folder / "onnx" / "model.onnx")))
    ids = np.arange(5, 25)
    with opened as session:
        seen = []
        inner = session._session

        class Spy:
            def __getattr__(self, name):
                return getattr(inner, name)

            def run(self, names, feed):
                found = inner.run(names, feed)
                seen.append((int(feed["input_ids"][0, -1]), found[names.index("logits")][0, -1]))
                return found

        session._session = Spy()
        session.decode(ids, 6)
        session._session = inner
        tokens = [token for token, _ in seen[1:]]
        whole = session.logits(np.concatenate([ids, tokens]))
        stepped = np.array([logits for _, logits in seen])
        assert np.allclose(stepped, whole[len(ids) - 1 :], atol=1e-4)
        assert tokens == [int(row.argmax()) for row in whole[len(ids) - 1 : -1]]
