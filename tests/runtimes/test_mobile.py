"""Every runtime of phones, for real: it runs what is exported, and the gates see a doubled table and a wrong scale.

Slow: each is set up in the user's cache (about 700 MB in all, once), and ARM64 is emulated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import damage
import pytest

from tieq.recipe import Gates, Sampling
from tieq.revalidate import validate_path
from tieq.runtimes import runtimes
from tieq.runtimes.install import set_up
from tieq.runtimes.parts import settable

pytestmark = pytest.mark.slow
RUNTIMES = {
    "onnxruntime": "onnx",
    "llama.cpp": "gguf",
    "onnxruntime-web": "onnx",
    "onnxruntime-web-chromium": "onnx",
    "onnxruntime-arm64": "onnx",
    "llama.cpp-arm64": "gguf",
    "llama.cpp-wasm": "gguf",
}
DAMAGES = {
    ("onnx", "doubled"): lambda folder, out: damage.doubled_onnx(folder / "onnx" / "model.onnx", out),
    ("onnx", "misscaled"): lambda folder, out: damage.misscaled_onnx(folder / "onnx" / "model.onnx", out),
    ("gguf", "doubled"): lambda folder, out: damage.doubled_gguf(folder / "gguf" / "model.gguf", out),
    ("gguf", "misscaled"): lambda folder, out: damage.misscaled_gguf(folder / "gguf" / "model.gguf", out),
}  # fmt: skip
SAMPLING = Sampling(sequences=2, length=24)


@pytest.fixture(params=RUNTIMES)
def name(request) -> str:
    """A runtime, set up."""
    chosen: str = request.param
    if chosen in settable():
        set_up(chosen)
    return chosen


def checked(path: Path, name: str, reference: Path, max_kl: float) -> tuple[dict[str, Any], dict[str, bool]]:
    gates = Gates(max_kl=max_kl, undecided="value")
    found = validate_path(path, runtimes=[name], reference=str(reference), sampling=SAMPLING, gates=gates)
    verdicts: dict[str, bool] = {}
    for check in found["checks"]:
        verdicts[check["name"]] = verdicts.get(check["name"], True) and check["passed"]
    return found, verdicts


def test_what_is_exported_passes_and_what_is_damaged_does_not(name, tiny_export, tiny_checkpoint, tmp_path):
    folder, reference = tiny_export().folder, tiny_checkpoint()
    container = RUNTIMES[name]
    good = folder / container / f"model.{container}"
    found, verdicts = checked(good, name, reference, 10.0)
    assert found["passed"], [check for check in found["checks"] if not check["passed"]]
    worst = max(item["scores"]["kl"]["value"] for item in found["runtimes"])
    bound = 3 * worst
    assert checked(good, name, reference, bound)[1]["KL"]

    doubled = DAMAGES[container, "doubled"](folder, tmp_path / f"doubled.{container}")
    found, verdicts = checked(doubled, name, reference, bound)
    assert not verdicts["table copies"]
    assert verdicts["KL"]  # it computes the same

    misscaled = DAMAGES[container, "misscaled"](folder, tmp_path / f"misscaled.{container}")
    found, verdicts = checked(misscaled, name, reference, bound)
    assert verdicts["table copies"]
    assert not verdicts["KL"]
    assert all(item["scores"]["kl"]["value"] > bound for item in found["runtimes"])


def test_every_runtime_has_such_a_test():
    elsewhere = {"litert", "litert-arm64"}
    assert set(runtimes()) == set(RUNTIMES) | elsewhere


def test_arm64_is_another_architecture():
    """What runs there is an AArch64 library."""
    from tieq.runtimes.parts import part

    set_up("onnxruntime-arm64")
    library = next((part("onnxruntime-arm64").folder / "onnxruntime" / "capi").glob("onnxruntime_pybind11_state*.so"))
    assert int.from_bytes(library.read_bytes()[18:20], "little") == 183  # EM_AARCH64, ELF header e_machine
