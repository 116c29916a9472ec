"""`report.html`: one well-formed file that needs no network, says the worst first, and escapes what it is given."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser

import pytest
import tiny

from tieq.errors import TieqError
from tieq.pipeline import export
from tieq.report.folder import rewrite_report, write_report
from tieq.report.markdown import report_markdown
from tieq.report.page import report_html

VOID = {"meta", "link", "br", "img", "hr", "input", "source", "col", "wbr", "area", "base", "embed", "track"}
SECTIONS = ["verdict", "files", "tie", "costs", "sizes", "runtimes", "gates", "used"]


class Page(HTMLParser):
    """Elements with their attributes and text, and whether every one of them is closed in order."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.faults: list[str] = []
        self.feed(source)
        self.close()
        self.faults += [f"{tag} is not closed" for tag in self.open]

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data):
        if not (self.open and self.open[-1] == "style"):
            self.text.append(data)

    @property
    def said(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.text))


def check_page(source: str) -> Page:
    page = Page(source)
    assert page.faults == []
    tags = [tag for tag, _ in page.elements]
    assert "script" not in tags
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert [name for name in ids if name in SECTIONS] == SECTIONS
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "srcset", "action", "data", "xlink:href"):
                assert value in ("data:,", *(f"#{section}" for section in SECTIONS)), (tag, value)
        if tag == "svg":
            assert attributes["role"] == "img"
            assert attributes["aria-label"]
        if tag == "table":
            assert tags.count("caption") == tags.count("table")
    style = re.search(r"<style>(.*?)</style>", source, re.DOTALL)
    assert style is not None
    assert not re.search(r"url\(|@import|@font-face", style[1])
    assert source.startswith("<!doctype html>\n<html lang=")
    return page


def test_an_export_writes_a_page_of_everything_in_the_documents(tiny_export, documents):
    folder = tiny_export().folder
    source = (folder / "report.html").read_text(encoding="utf-8")
    page = check_page(source)
    found = documents()
    manifest, checks = found.manifest, found.checks
    assert f"All {len(checks['checks'])} gates hold" in page.said
    for said in (manifest["source"]["fingerprint"], manifest["evaluation"]["sha256"], manifest["recipe"]["name"]):
        assert said in page.said
    assert all(item["sha256"] in page.said for item in manifest["files"])
    assert all(item["version"] in page.said for item in checks["runtimes"])
    assert all(check["name"] in page.said for check in checks["checks"])
    # Each container is drawn twice: for phones and for the rest.
    ties = [a["aria-label"] for tag, a in page.elements if tag == "svg" and "one table" in (a["aria-label"] or "")]
    assert len(ties) == 2 * len(checks["containers"])
    assert "tieq probe" in page.said
    assert "No peer's file of this model was measured on this text, so this export stands alone." in page.said


def test_the_page_is_no_file_of_the_manifest_and_validation_and_a_new_export_bear_it(tiny_export):
    from tieq.artifact import check_target

    folder = tiny_export().folder
    manifest = json.loads((folder / "manifest.json").read_text())
    assert "report.html" not in [item["path"] for item in manifest["files"]]
    check_target(folder)


def test_the_same_documents_give_the_same_bytes(tiny_export, documents, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(tiny_export().folder, folder)
    before = {name: (folder / name).read_bytes() for name in ("report.html", "report.md")}
    for name in before:
        (folder / name).unlink()
    assert write_report(folder)["passed"]
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert report_html(documents()) == before["report.html"].decode()


def test_gates_that_failed_are_on_top(documents):
    found = documents()
    failing = {"name": "KL", "subject": "llama.cpp", "value": 2.5, "bound": "at most 1.0", "passed": False,
               "detail": "too much of it"}  # fmt: skip
    found.checks["checks"].append(failing)
    found.checks["passed"] = False
    source = report_html(found)
    page = check_page(source)
    assert f"1 of {len(found.checks['checks'])} gates failed" in page.said
    assert source.index("too much of it") < source.index('id="files"')
    assert "measured 2.5, wanted at most 1.0" in page.said
    assert "fails: KL" in page.said


def test_a_gate_that_noise_leaves_open_says_so(documents):
    found = documents()
    found.checks["checks"][-1].update(undecided=True, detail="cannot be told from the bound")
    page = check_page(report_html(found))
    assert f"Noise leaves 1 of the {len(found.checks['checks'])} gates undecided." in page.said
    assert "yes, undecided" in page.said
    assert "cannot be told from the bound" in page.said


def test_a_doubled_table_is_drawn_as_two(documents):
    found = documents()
    container = next(item for item in found.checks["containers"] if item["container"] == "onnx")
    (table,) = container["payloads"]
    container["payloads"] = [{**table, "readers": ["lookup"]}, {**table, "readers": ["logits"]}]
    check = next(c for c in found.checks["checks"] if (c["name"], c["subject"]) == ("table copies", "onnx"))
    check.update(value=2, passed=False)
    found.checks["passed"] = False
    page = check_page(report_html(found))
    assert "copy 1 of 2" in page.said
    assert "copy 2 of 2" in page.said
    assert "The vocabulary table is not stored once in every file." in page.said


@pytest.mark.parametrize("hostile", ['"><script>alert(1)</script>', "{{ 7*7 }}{% raw %}", "<!--", "</style>'&amp;\x0b"])
def test_hostile_names_are_escaped_wherever_they_stand(documents, hostile):
    found = documents()
    plain = check_page(report_html(found))

    def spoil(content, kept, key=""):
        if key in kept:
            return content
        if isinstance(content, dict):
            return {name: spoil(value, kept, name) for name, value in content.items()}
        if isinstance(content, list):
            return [spoil(value, kept, key) for value in content]
        return content + hostile if isinstance(content, str) else content

    # What the report matches on stays: names of gates and containers, roles, folders.
    kept = {"container", "readers", "path"}
    checks = spoil(found.checks, {*kept, "name", "subject"})
    spoiled = type(found)(spoil(found.manifest, kept), checks, spoil(found.graph, kept), spoil(found.plan, kept))
    source = report_html(spoiled)
    page = check_page(source)
    assert "<script" not in source
    assert found.manifest["source"]["label"] + re.sub(r"[\x0b\s]+", " ", hostile) in page.said
    # Nothing of it became an element.
    assert [tag for tag, _ in page.elements].count("svg") == [tag for tag, _ in plain.elements].count("svg")
    assert report_markdown(spoiled.manifest, spoiled.checks, spoiled.graph)


def test_keys_that_runtimes_may_add_are_shown(documents):
    found = documents()
    first, *_, last = found.checks["runtimes"]
    first.update(tokens=512, platform="linux arm64 (emulated)", decode_rate={"value": 12.34, "standard_error": 0.5})
    last.update(table_copies=3, decode_rate=None)
    page = check_page(report_html(found))
    for said in ("platform", "linux arm64 (emulated)", "512", "12.3 ± 0.5", "decode, tokens/s"):
        assert said in page.said
    assert "decode, tokens/s" not in check_page(report_html(documents())).said


def test_numbers_that_are_not_finite_or_missing_are_words(documents):
    found = documents()
    item = found.checks["runtimes"][0]
    item["perplexity"] = item["scores"]["kl"]["value"] = item["scores"]["perplexity_ratio"]["value"] = None
    next(check for check in found.checks["checks"] if check["name"] == "KL")["value"] = None
    assert "not finite" in check_page(report_html(found)).said
    assert "not finite" in report_markdown(found.manifest, found.checks, found.graph)
    for item in found.checks["runtimes"]:
        item["scores"] = None
    assert "no reference" in check_page(report_html(found)).said
    assert "No KL was measured" in check_page(report_html(found)).said


def test_kinds_of_exports_are_all_shown(banded_export, tiny_checkpoint, tmp_path):
    for result in (
        banded_export(),
        export(str(tiny_checkpoint("phi3")), tiny.recipe(), tmp_path / "onnx", ("onnx",)),
        export(str(tiny_checkpoint()), tiny.recipe(evaluation=None), tmp_path / "proved", ("gguf",)),
    ):
        source = (result.folder / "report.html").read_text(encoding="utf-8")
        check_page(source)
        if not result.checks["runtimes"]:
            assert "Nothing was run" in source
    assert "row band, 16 rows" in (banded_export().folder / "report.html").read_text(encoding="utf-8")


def test_a_probe_of_the_same_model_is_drawn(tiny_export, probe, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(tiny_export().folder, folder)
    fingerprint = tiny_export().manifest["source"]["fingerprint"]
    (tmp_path / "probe.json").write_text(json.dumps(probe(fingerprint)))
    write_report(folder, [tmp_path / "probe.json"])
    page = check_page((folder / "report.html").read_text(encoding="utf-8"))
    assert "This is not the text of the runtimes below." in page.said
    assert "tieq probe" not in page.said
    shutil.copyfile(tmp_path / "probe.json", folder / "probe.json")
    write_report(folder)
    assert "KL, lookup" in (folder / "report.html").read_text(encoding="utf-8")
    (folder / "probe.json").write_text(json.dumps(probe("another")))
    with pytest.raises(TieqError, match="other weights"):
        write_report(folder)
    (folder / "probe.json").write_text("{}")
    with pytest.raises(TieqError, match="no document of `tieq probe`"):
        write_report(folder)


def test_documents_that_do_not_belong_together_are_refused(tiny_export, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(tiny_export().folder, folder)
    checks = (folder / "checks.json").read_text(encoding="utf-8")
    (folder / "checks.json").write_text(checks.replace("true", "false", 1), encoding="utf-8")
    with pytest.raises(TieqError, match=r"another document than manifest\.json lists"):
        write_report(folder)
    with pytest.raises(TieqError, match=r"holds no manifest\.json"):
        write_report(tmp_path)
    (folder / "checks.json").write_text(checks, encoding="utf-8")
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    (folder / "manifest.json").write_text(json.dumps({**manifest, "formats": []}))
    with pytest.raises(TieqError, match="no container"):
        write_report(folder)
    del manifest["recipe"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(TieqError, match="lack what this version"):
        rewrite_report(folder)
