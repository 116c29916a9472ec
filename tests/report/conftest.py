"""The documents of a tiny export, loaded from its folder as the report does."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from tieq.artifact import read_json
from tieq.report.documents import Documents


@pytest.fixture
def documents(tiny_export) -> Callable[[], Documents]:
    """Documents that a test may change."""

    def load(family: str = "llama") -> Documents:
        folder = tiny_export(family).folder
        names = ("manifest.json", "checks.json", "tie_graph.json", "plan.json")
        return Documents(*(copy.deepcopy(read_json(folder / name)) for name in names))

    return load


@pytest.fixture
def probe() -> Callable[[str], dict]:
    """A document of the form of ``tieq probe``'s, of a model with the fingerprint."""

    def make(fingerprint: str) -> dict:
        def cost(value: float) -> dict:
            return {"kl": {"value": value, "standard_error": value / 10}}

        schemes = [
            {
                "scheme": scheme,
                "bits_per_weight": bits,
                "measured": {"lookup": cost(kl), "logits": cost(2 * kl), "both": cost(3 * kl)},
                "predicted": {"lookup": kl, "logits": 2 * kl, "both": 3 * kl},
            }
            for scheme, bits, kl in (("q2_0", 2.25, 0.3), ("q4_0", 4.5, 0.01), ("q8_0", 8.5, 0.0))
        ]
        text = {"description": "a text", "sha256": "0" * 64, "sequences": 2, "length": 64}
        model = {"label": "tiny", "fingerprint": fingerprint}
        return {"kind": "probe", "model": model, "evaluation": text, "schemes": schemes}

    return make
