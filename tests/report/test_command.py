"""`tieq report` as a user types it."""

from __future__ import annotations

import json
import shutil
import sys

import pytest

from tieq.cli import main


@pytest.fixture
def run(monkeypatch, capsys):
    def command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tieq", "report", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return caught.value.code or 0, captured.out, captured.err

    return command


def test_report_writes_both_files_again_with_points_beside(run, tiny_export, tmp_path):
    folder, other = tmp_path / "export", tiny_export(bits=8).folder / "manifest.json"
    shutil.copytree(tiny_export().folder, folder)
    (folder / "report.html").unlink()
    (folder / "report.md").unlink()
    assert run(folder)[0] == 0
    alone = (folder / "report.html").read_text(encoding="utf-8")
    code, out, err = run(folder, "--beside", other, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["points_beside"] == 2
    assert "put beside" not in alone
    assert "put beside" in (folder / "report.html").read_text(encoding="utf-8")
    assert (folder / "report.md").exists()


def test_bad_input_is_a_sentence(run, tiny_export, tmp_path):
    for arguments in ((tmp_path,), (tiny_export().folder, "--beside", tmp_path / "missing.json")):
        code, out, err = run(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("tieq: ")
        assert err.count("\n") == 1
    assert "--beside" in err
    assert err.endswith("Name a manifest.json, a probe.json, or a file with what `tieq validate --json` printed.\n")


def test_a_validation_is_kept_and_shown_when_asked(run, monkeypatch, tiny_export, tmp_path):
    folder = tmp_path / "export"
    shutil.copytree(tiny_export().folder, folder)
    before = (folder / "manifest.json").read_bytes()

    def validate(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["tieq", "validate", str(folder), *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        return caught.value.code or 0

    assert validate("--runtime", "llama.cpp", "--sequences", 2) == 0
    assert not (folder / "validation.json").exists()
    assert validate("--runtime", "llama.cpp", "--sequences", 2, "--report") == 0
    found = json.loads((folder / "validation.json").read_text(encoding="utf-8"))
    assert [(item["runtime"], item["table_copies"]) for item in found["runtimes"]] == [("llama.cpp", 1)]
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "accuracy level" not in page
    assert "2 sequences of" in page
    # Another document changes nothing that the manifest vouches for.
    assert (folder / "manifest.json").read_bytes() == before
    assert validate("--runtime", "llama.cpp", "--sequences", 2) == 0
    assert run(folder)[0] == 0
    assert "accuracy level" not in (folder / "report.html").read_text(encoding="utf-8")
