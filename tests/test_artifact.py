from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tieq.artifact import MANIFEST, check_target, copy_files, read_json, staged, write_json
from tieq.errors import RefusedError


def names(folder: Path) -> list[str]:
    """Everything in a folder, hidden files included."""
    return sorted(path.name for path in folder.iterdir())


def artifact(folder: Path) -> Path:
    """An earlier artifact of tieq's."""
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text('{"format": 1, "source": {}, "files": [{"path": "old"}]}')
    (folder / "old").write_text("old")
    return folder


def test_the_folder_takes_its_place_only_at_the_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with staged(out) as folder:
        (folder / "new").write_text("new")
        assert folder.parent == out.parent
        assert not out.exists()
    assert names(out) == ["new"]
    assert names(tmp_path) == ["out"]


def test_parents_are_made(tmp_path: Path) -> None:
    with staged(tmp_path / "a" / "b" / "out") as folder:
        (folder / "new").touch()
    assert names(tmp_path / "a" / "b") == ["out"]
    assert names(tmp_path / "a" / "b" / "out") == ["new"]


def test_an_earlier_artifact_is_there_until_the_end_and_then_replaced_as_a_whole(tmp_path: Path) -> None:
    out = artifact(tmp_path / "out")
    with staged(out) as folder:
        (folder / "new").touch()
        assert names(out) == sorted([MANIFEST, "old"])
    assert names(out) == ["new"]
    assert names(tmp_path) == ["out"]


def test_an_empty_folder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    check_target(tmp_path / "out")
    with staged(tmp_path / "out") as folder:
        (folder / "new").touch()
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["new"]


def fail_inside(out: Path, error: type[BaseException] = ValueError, leave: Path | None = None) -> None:
    """Write half an artifact, and perhaps a file elsewhere, and then fail."""
    with staged(out) as folder:
        (folder / "deep" / "er").mkdir(parents=True)
        (folder / "deep" / "er" / "new").write_text("half")
        if leave is not None:
            leave.touch()
        raise error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, MemoryError, GeneratorExit])
def test_an_exception_leaves_the_old_artifact_and_no_partial_folder(error: type[BaseException], tmp_path: Path) -> None:
    out = artifact(tmp_path / "out")
    with pytest.raises(error):
        fail_inside(out, error)
    assert names(tmp_path) == ["out"]
    assert names(out) == sorted([MANIFEST, "old"])
    assert (out / "old").read_text() == "old"


def test_an_exception_leaves_nothing_where_nothing_was(tmp_path: Path) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  raised here, with no message
        fail_inside(tmp_path / "a" / "out")
    assert names(tmp_path) == []


def test_parents_that_others_use_by_now_are_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  raised here, with no message
        fail_inside(tmp_path / "a" / "out", leave=tmp_path / "a" / "other")
    assert names(tmp_path / "a") == ["other"]


def test_a_swap_that_fails_leaves_the_old_artifact_in_place(tmp_path: Path) -> None:
    out = artifact(tmp_path / "out")
    with pytest.raises(OSError, match="No such file"), staged(out) as folder:
        shutil.rmtree(folder)  # so that it cannot be put in place
    assert names(tmp_path) == ["out"]


def test_the_working_folder_is_a_target_or_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        check_target(Path())
    except RefusedError:
        return
    with staged(Path()) as folder:
        (folder / "new").touch()
    assert names(tmp_path) == ["new"]


def test_two_exports_at_once_do_not_share_a_folder(tmp_path: Path) -> None:
    with staged(tmp_path / "out") as first, staged(tmp_path / "out") as second:
        assert first != second
        (first / "first").touch()
        (second / "second").touch()
    # The inner one was put in place and then replaced by the outer one.
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["first"]


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RefusedError, match="cannot be written"), staged(tmp_path / "file" / "out"):
        pytest.fail("nothing may run")


# What may be replaced


def file(path: Path) -> None:
    path.write_text("x")


def foreign_folder(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").write_text("x")


def hidden_file(path: Path) -> None:
    path.mkdir()
    (path / ".git").mkdir()


def link_to_artifact(path: Path) -> None:
    path.symlink_to(artifact(path.with_name("real")))


def broken_link(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


def link_to_file(path: Path) -> None:
    path.with_name("real").write_text("x")
    path.symlink_to(path.with_name("real"))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (file, "is a file or a link"),
        (link_to_artifact, "is a file or a link"),
        (link_to_file, "is a file or a link"),
        (broken_link, "is a file or a link"),
        (foreign_folder, "not empty and holds no tieq artifact"),
        (hidden_file, "not empty and holds no tieq artifact"),
    ],
)
def test_what_is_not_ours_is_refused_and_kept(make: Callable[[Path], None], match: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(out)
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(RefusedError, match=rf"out: .*{match}.*Choose another --out"):
        check_target(out)
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("make", [artifact, Path.mkdir, lambda path: None])
def test_an_artifact_an_empty_folder_and_a_free_name_are_targets(
    make: Callable[[Path], object], tmp_path: Path
) -> None:
    make(tmp_path / "out")
    check_target(tmp_path / "out")


@pytest.mark.parametrize("content", ['{"name": "A web page", "icons": []}', "[]", "", "not json"])
def test_a_folder_with_a_manifest_of_someone_elses_is_refused(content: str, tmp_path: Path) -> None:
    foreign_folder(tmp_path / "out")
    (tmp_path / "out" / MANIFEST).write_text(content)
    with pytest.raises(RefusedError, match="holds no tieq artifact"):
        check_target(tmp_path / "out")


# Documents


def test_json_is_written_in_one_layout_and_read_back(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": [1, 2.5, None], "a": "é"})
    assert (tmp_path / "a.json").read_bytes() == (
        '{\n  "b": [\n    1,\n    2.5,\n    null\n  ],\n  "a": "é"\n}\n'.encode()
    )
    assert read_json(tmp_path / "a.json") == {"b": [1, 2.5, None], "a": "é"}


@pytest.mark.parametrize(
    ("content", "match"),
    [(b"", "cannot be read"), (b"{", "cannot be read"), (b'{"a": "\xff"}', "cannot be read"), (b"[]", "no JSON object"),
     (b"null", "no JSON object")],
)  # fmt: skip
def test_a_damaged_document_is_refused(content: bytes, match: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(RefusedError, match=rf"a\.json: .*{match}"):
        read_json(tmp_path / "a.json")


def test_a_missing_document_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="cannot be read"):
        read_json(tmp_path / "a.json")


def test_files_are_copied_where_they_exist_and_are_not_there_yet(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    for name in ("a", "b", "unnamed"):
        (source / name).write_text("from source")
    (target / "b").write_text("already here")
    copy_files(source, target, ("a", "b", "absent"))
    assert names(target) == ["a", "b"]
    assert (target / "a").read_text() == "from source"
    assert (target / "b").read_text() == "already here"
