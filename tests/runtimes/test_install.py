"""Setting runtimes up: pinned, checked, whole or not at all, and taken back."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tieq.errors import MissingRuntimeError, TieqError
from tieq.runtimes import install, parts, runtimes
from tieq.runtimes.fetch import fetch_npm, fetch_wheels, run


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TIEQ_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "runtimes"


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    """A wheel in a folder that pip looks into instead of an index."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    path = folder / "sample-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("sample.py", "VALUE = 1\n")
        archive.writestr("sample-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: sample\nVersion: 1.0\n")
        archive.writestr("sample-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("sample-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return path


def pack(path: Path, members: dict[str, bytes]) -> str:
    """An npm archive; its integrity."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return "sha512-" + base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()


@pytest.fixture
def npm(tmp_path):
    """Something that is called as npm is and packs what it was told to."""

    def make(members: dict[str, bytes]) -> tuple[list[str], str]:
        archive = tmp_path / "package.tgz"
        integrity = pack(archive, members)
        script = f"import shutil; shutil.copy({str(archive)!r}, 'found.tgz')"
        return [sys.executable, "-c", script], integrity

    return make


def test_a_wheel_is_unpacked_and_recorded(wheel, tmp_path):
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    found = fetch_wheels([["sample==1.0", "any", digest]], tmp_path / "part", tmp_path)
    assert (tmp_path / "part" / "sample.py").read_text() == "VALUE = 1\n"
    assert found == [{"file": wheel.name, "sha256": digest}]


def test_a_wheel_with_another_digest_is_not_used(wheel, tmp_path):
    with pytest.raises(TieqError, match=r"has digest .* expected 00; it is not used"):
        fetch_wheels([["sample==1.0", "any", "00"]], tmp_path / "part", tmp_path)
    assert not (tmp_path / "part").exists()


def test_an_npm_package_is_unpacked_without_its_folder(npm, tmp_path):
    command, integrity = npm({"package/dist/a.mjs": b"1", "package/package.json": b"{}"})
    fetch_npm([["@some/thing", "1.0", integrity]], tmp_path / "part", tmp_path, command)
    assert (tmp_path / "part" / "node_modules" / "@some" / "thing" / "dist" / "a.mjs").read_bytes() == b"1"


def test_an_npm_package_with_another_digest_is_not_used(npm, tmp_path):
    command, integrity = npm({"package/a": b"1"})
    with pytest.raises(TieqError, match="it is not used"):
        fetch_npm([["a", "1.0", integrity.swapcase()]], tmp_path / "part", tmp_path, command)
    assert not (tmp_path / "part").exists()


def test_a_package_cannot_write_outside_its_folder(npm, tmp_path):
    command, integrity = npm({"package/../../../escaped": b"1"})
    with pytest.raises(TieqError, match="leads outside"):
        fetch_npm([["a", "1.0", integrity]], tmp_path / "part", tmp_path, command)
    assert not list(tmp_path.rglob("escaped"))


def test_a_failing_downloader_is_quoted_and_a_missing_one_is_exit_code_3():
    script = "import sys; print('first', file=sys.stderr); sys.exit('no route')"
    with pytest.raises(TieqError, match=r"thing: .* failed \(no route\)"):
        run([sys.executable, "-c", script], "thing")
    with pytest.raises(MissingRuntimeError, match="no-such-program: is needed for thing"):
        run(["no-such-program"], "thing")


@pytest.fixture
def fetched(monkeypatch) -> list[str]:
    """The names of the parts that were built; nothing is fetched."""
    names: list[str] = []

    def fetch(pins, folder, scratch):
        (folder / "content").write_text("1")
        names.append(json.dumps(pins))
        return [{"file": "content"}]

    monkeypatch.setattr(install, "_fetch", fetch)
    monkeypatch.setattr(install, "_finish", lambda wanted, folder: None)
    monkeypatch.setattr(parts.Part, "possible", property(lambda self: True))
    return names


def test_setup_builds_each_part_once_and_remove_keeps_what_others_use(fetched, cache):
    assert parts.availability("onnxruntime-web").state == "can be set up"
    install.set_up("onnxruntime-web")
    assert parts.availability("onnxruntime-web").ready
    install.set_up("onnxruntime-web")
    assert len(fetched) == 2
    install.set_up("llama.cpp-wasm")
    assert len(fetched) == 4  # Node.js was there
    gone = install.remove("llama.cpp-wasm")
    assert sorted(path.name.rpartition("-")[0] for path in gone) == ["chromium", "wllama"]
    assert parts.availability("onnxruntime-web").ready
    install.remove("onnxruntime-web")
    assert list(cache.iterdir()) == []


def test_a_setup_that_fails_leaves_nothing(fetched, cache, monkeypatch):
    def fail(pins, folder, scratch):
        (folder / "half").write_text("1")
        raise TieqError("the network is gone.")

    monkeypatch.setattr(install, "_fetch", fail)
    with pytest.raises(TieqError, match="the network is gone"):
        install.set_up("onnxruntime-web")
    assert list(cache.iterdir()) == []
    assert parts.availability("onnxruntime-web").state == "can be set up"


def test_other_pins_are_another_setup(fetched):
    part = parts.part("node")
    changed = parts.Part(part.name, part.about, part.megabytes, {**part.pins, "wheels": {}})
    assert part.folder != changed.folder


def test_what_this_platform_cannot_have_says_so(monkeypatch):
    monkeypatch.setattr(parts, "this_platform", lambda: "plan9 mips")
    state = parts.availability("onnxruntime-arm64")
    assert state.state == "not on this platform"
    with pytest.raises(
        MissingRuntimeError, match="runtime onnxruntime-arm64: cannot be set up here: not for plan9 mips"
    ):
        install.set_up("onnxruntime-arm64")


def test_every_runtime_that_is_made_of_parts_can_be_set_up():
    made = {name for name, each in runtimes().items() if not each.default and name != "litert"}
    assert made == set(parts.settable())


def test_a_runtime_that_was_asked_for_and_is_not_there_is_exit_code_3(tiny_export):
    from typer.testing import CliRunner

    from tieq.cli.app import app
    from tieq.errors import TieqError as Error

    folder = str(tiny_export().folder)
    for name in ("onnxruntime-web", "all"):
        found = CliRunner().invoke(app, ["validate", folder, "--runtime", name])
        assert isinstance(found.exception, Error)
        assert found.exception.exit_code == 3
        assert "tieq runtimes setup onnxruntime-web (" in found.exception.sentence()
