"""Every runtime, for real: it runs what is exported, and the gates see a doubled table and a wrong scale.

Slow: those of phones are set up in the user's cache (about 700 MB in all, once), and ARM64 is emulated.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import damage
import pytest

from tieq.recipe import Gates, Sampling
from tieq.revalidate import validate_path
from tieq.runtimes import runtimes
from tieq.runtimes.install import set_up
from tieq.runtimes.parts import part, settable

pytestmark = pytest.mark.slow
RUNS = [
    ("onnxruntime", "onnx"),
    ("onnxruntime", "ort"),
    ("llama.cpp", "gguf"),
    ("onnxruntime-web", "onnx"),
    ("onnxruntime-web-chromium", "onnx"),
    ("onnxruntime-arm64", "onnx"),
    ("llama.cpp-arm64", "gguf"),
    ("llama.cpp-wasm", "gguf"),
    ("litert", "tflite"),
    ("litert-arm64", "tflite"),
]
FOLDERS = {"tflite": "litert"}
SAMPLING = Sampling(sequences=2, length=24)


@pytest.fixture(scope="module")
def exported(tmp_path_factory, tiny_checkpoint) -> Path:
    """The tiny llama in every container."""
    import tiny

    from tieq.pipeline import export

    out = tmp_path_factory.mktemp("mobile") / "out"
    return export(str(tiny_checkpoint()), tiny.recipe(4), out, ("onnx", "ort", "gguf", "litert")).folder


def checked(path: Path, name: str, reference: Path, max_kl: float) -> tuple[dict[str, Any], dict[str, bool]]:
    gates = Gates(max_kl=max_kl, undecided="value")
    found = validate_path(path, runtimes=[name], reference=str(reference), sampling=SAMPLING, gates=gates)
    verdicts: dict[str, bool] = {}
    for check in found["checks"]:
        verdicts[check["name"]] = verdicts.get(check["name"], True) and check["passed"]
    return found, verdicts


@pytest.mark.parametrize(("name", "container"), RUNS)
def test_what_is_exported_passes_and_what_is_damaged_does_not(name, container, exported, tiny_checkpoint, tmp_path):
    if name in settable():
        set_up(name)
    reference = tiny_checkpoint()
    good = exported / FOLDERS.get(container, container) / f"model.{container}"
    found, _ = checked(good, name, reference, 10.0)
    assert found["passed"], [check for check in found["checks"] if not check["passed"]]
    bound = 3 * max(item["scores"]["kl"]["value"] for item in found["runtimes"])

    for kind, wrong in (("doubled", "table copies"), ("misscaled", "KL")):
        target = tmp_path / f"{kind}.{container}"
        path = getattr(damage, f"{kind}_{container}")(good, target)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            if container != "gguf" and not (path.parent / file).exists():
                shutil.copy(good.parent / file, path.parent / file)
        found, verdicts = checked(path, name, reference, bound)
        assert not verdicts[wrong]
        # Nothing else is wrong: a doubled table computes the same, a wrong scale is in the file once.
        assert verdicts["KL" if wrong == "table copies" else "table copies"]
    assert all(item["scores"]["kl"]["value"] > bound for item in found["runtimes"])


def test_every_runtime_is_among_them():
    assert {name for name, _ in RUNS} == set(runtimes())


def test_arm64_is_another_architecture():
    """What runs there is an AArch64 library."""
    set_up("onnxruntime-arm64")
    library = next((part("onnxruntime-arm64").folder / "onnxruntime" / "capi").glob("onnxruntime_pybind11_state*.so"))
    assert int.from_bytes(library.read_bytes()[18:20], "little") == 183  # EM_AARCH64 at e_machine of the ELF header
