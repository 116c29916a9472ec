"""A safetensors file written a tensor at a time, read back by the safetensors library."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors import safe_open

from tieq.tensor_file import TensorFile


def test_the_library_reads_what_was_written(tmp_path):
    random = np.random.default_rng(0)
    tensors = {
        "codes": random.integers(0, 256, (3, 2, 5), dtype=np.uint8),
        "scales": random.random((3, 2)).astype(np.float16),
        "norm": random.random(7).astype(np.float32),
        "rows": np.arange(4, dtype=np.int32),
        "none": np.empty((0, 4), np.float32),
    }
    path = tmp_path / "x.safetensors"
    with TensorFile(path, 2000) as file:
        for name, values in tensors.items():
            file.add(name, values)
        file.close({"about": "a test"})
    with safe_open(str(path), framework="numpy") as opened:
        assert opened.metadata() == {"about": "a test"}
        assert set(opened.keys()) == set(tensors)
        for name, values in tensors.items():
            found = opened.get_tensor(name)
            assert found.dtype == values.dtype
            assert np.array_equal(found, values)


def test_a_file_that_was_not_closed_is_removed(tmp_path):
    path = tmp_path / "x.safetensors"

    def interrupted() -> None:
        with TensorFile(path, 100) as file:
            file.add("x", np.zeros(3, np.float32))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not path.exists()


def test_a_header_that_does_not_fit_is_said(tmp_path):
    with TensorFile(tmp_path / "x", 16) as file:
        file.add("x", np.zeros(3, np.float32))
        with pytest.raises(ValueError, match="in room for 16"):
            file.close({})
    assert not (tmp_path / "x").exists()
