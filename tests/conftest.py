"""Shared fixtures: tiny checkpoints and their exports, made once a session."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

# Tests neither take measurements from the user's cache nor leave any there; those of the cache name a folder of theirs.
os.environ["TIEQ_NO_CACHE"] = "1"

Exporter = Callable[..., "object"]


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make (once) the tiny checkpoint of a family and return its folder; it must not be changed."""
    import tiny

    made: dict[str, Path] = {}

    def make(family: str = "llama") -> Path:
        if family not in made:
            made[family] = tiny.save(tmp_path_factory.mktemp("checkpoints") / family, family)
        return made[family]

    return make


@pytest.fixture(scope="session")
def tiny_export(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]) -> Exporter:
    """Export (once) the tiny model of a family to both containers; the artifact must not be changed."""
    import tiny

    from tieq.pipeline import export

    made: dict[tuple[str, int], object] = {}

    def make(family: str = "llama", bits: int = 4) -> object:
        key = (family, bits)
        if key not in made:
            out = tmp_path_factory.mktemp("artifacts") / f"{family}-{bits}"
            made[key] = export(str(tiny_checkpoint(family)), tiny.recipe(bits), out)
        return made[key]

    return make


@pytest.fixture(scope="session")
def banded_export(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]) -> Exporter:
    """Export (once) the tiny model of a family with row bands to all containers; the artifact must not be changed."""
    import tiny

    from tieq.pipeline import export

    made: dict[str, object] = {}

    def make(family: str = "llama") -> object:
        if family not in made:
            out = tmp_path_factory.mktemp("artifacts") / f"{family}-banded"
            formats = ("onnx", "ort", "gguf")
            made[family] = export(str(tiny_checkpoint(family)), tiny.banded_recipe(), out, formats)
        return made[family]

    return make
