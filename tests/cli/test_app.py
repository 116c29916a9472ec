"""The commands as a user types them: output, exit codes, messages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file
from test_faults import copy, duplicate_table

import tieq
from tieq.cli import main
from tieq.cli.options import default_out
from tieq.recipe import Gates, Recipe, dump_recipe, shipped_recipes


class Outcome(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str


@pytest.fixture
def tieq_command(monkeypatch, capsys):
    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["tieq", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return Outcome(caught.value.code or 0, captured.out, captured.err)

    return run


@pytest.fixture
def recipe_file(tmp_path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(tiny.recipe()))
    return path


def test_help_and_version_import_nothing_heavy():
    code = (
        "import sys, tieq.cli.app as a\n"
        "try:\n    a.app(['--help'], standalone_mode=False)\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'onnx', 'onnxruntime', 'llama_cpp', 'numpy', 'optimum'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([sys.executable, "-m", "tieq", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == tieq.__version__


def test_inspect_of_well_known_shapes_needs_no_weights(tieq_command):
    gpt2 = tieq_command("inspect", "gpt2")
    assert "124,439,808" in gpt2.out
    assert "163,037,184" in gpt2.out
    assert "23.7% saved by tying" in gpt2.out
    llama = tieq_command("inspect", "llama-3-8b")
    assert "8,030,261,248" in llama.out
    assert "7,504,924,672" in llama.out
    assert "6.5% less if tied" in llama.out
    by_hub_id = tieq_command("inspect", "openai-community/gpt2", "--json")
    assert json.loads(by_hub_id.out)["arithmetic"]["tied_total"] == 124_439_808


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi"])
def test_inspect_of_a_checkpoint_counts_what_transformers_counts(family, tieq_command, tiny_checkpoint):
    from transformers import AutoModelForCausalLM

    folder = tiny_checkpoint(family)
    found = json.loads(tieq_command("inspect", folder, "--json").out)
    model = AutoModelForCausalLM.from_pretrained(folder)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert found["arithmetic"]["tied_total" if found["tied"] else "untied_total"] == counted
    if family == "gemma2":
        assert found["lookup"]["multiplier"] == 8.0
        assert found["logits"]["softcap"] == 5.0
        assert "softcap 5.0" in tieq_command("inspect", folder).out
    if family == "phi":
        assert found["logits"]["bias"] is True


def test_inspect_of_containers_shows_where_the_table_is(tieq_command, tiny_export):
    folder = tiny_export().folder
    for path in (folder, folder / "onnx" / "model.onnx", folder / "gguf" / "model.gguf"):
        done = tieq_command("inspect", path)
        assert done.code == 0
        assert "lookup" in done.out
    document = json.loads(tieq_command("inspect", folder, "--json").out)
    assert [container["shared"] for container in document["containers"]] == [True, True]


def test_export_then_validate_agree_and_json_is_alone_on_stdout(tieq_command, tiny_checkpoint, recipe_file, tmp_path):
    out = tmp_path / "artifact"
    done = tieq_command(
        "export", "--model", tiny_checkpoint(), "--recipe", recipe_file, "--out", out, "--format", "gguf", "--json"
    )
    assert done.code == 0
    exported = json.loads(done.out)
    assert exported["manifest"]["formats"] == ["gguf"]
    again = tieq_command("validate", out, "--json")
    assert again.code == 0
    assert json.loads(again.out)["runtimes"] == exported["checks"]["runtimes"]
    assert "all gates hold" in tieq_command("validate", out, "--runtime", "llama.cpp").out


def test_a_kept_body_means_gguf_alone_in_a_folder_of_its_own(tieq_command, tiny_export, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tiny_export("llama", 8).folder / "gguf" / "model.gguf"
    done = tieq_command("export", "--model", path, "--keep-body", "--bits", 2, "--effort", "quick")
    assert done.code == 0, done.err
    assert "kept tensors" in done.out
    assert "against the input file" in done.out
    manifest = json.loads((tmp_path / "artifacts" / "model-2-bit-table" / "manifest.json").read_text())
    assert manifest["formats"] == ["gguf"]
    assert manifest["recipe"]["description"] == "q2_0 for the table, the body kept"
    done = tieq_command("export", "--model", path, "--keep-body", "--format", "onnx")
    assert done.code == 2
    assert "--keep-body writes GGUF alone, not onnx" in done.err


def test_a_gate_that_fails_is_exit_code_1_and_keeps_the_artifact(tieq_command, tiny_checkpoint, recipe_file, tmp_path):
    out = tmp_path / "artifact"
    recipe_file.write_text(dump_recipe(tiny.recipe(gates=Gates(max_kl=1e-6))))
    done = tieq_command(
        "export", "--model", tiny_checkpoint(), "--recipe", recipe_file, "--out", out, "--format", "gguf"
    )
    assert done.code == 1
    assert "a gate failed" in done.out
    assert (out / "gguf" / "model.gguf").exists()
    assert "FAILED" in (out / "report.md").read_text()
    assert tieq_command("validate", out, "--max-kl", "10").code == 0
    assert tieq_command("validate", out, "--min-top1", "1.0").code == 1


def test_validate_names_the_second_copy_of_a_duplicated_table(tieq_command, tiny_export, tmp_path):
    folder = copy(tiny_export().folder, tmp_path / "artifact")
    duplicate_table(folder / "onnx" / "model.onnx")
    done = tieq_command("validate", folder / "onnx" / "model.onnx")
    assert done.code == 1
    assert "FAILED table copies (onnx)" in done.out
    assert "further copy" in done.out
    assert "second.data at byte 0" in done.out
    assert tieq_command("validate", folder).code == 1


@pytest.mark.parametrize("kind", [2, 15])
def test_validate_takes_what_llama_cpps_own_quantizer_wrote(kind, tieq_command, tiny_export, tiny_checkpoint, tmp_path):
    import llama_cpp

    source, target = tiny_export("llama", 8).folder / "gguf" / "model.gguf", tmp_path / "own.gguf"
    options = llama_cpp.llama_model_quantize_default_params()
    options.allow_requantize = True
    options.ftype = kind
    assert llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), options) == 0
    done = tieq_command("validate", target, "--reference", tiny_checkpoint(), "--length", 64, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["containers"][0]["shared"]
    assert found["containers"][0]["payloads"][0]["scheme"] in ("q8_0", "q6_k")
    assert 0 < found["runtimes"][0]["scores"]["kl"]["value"] < 0.2
    alone = tieq_command("validate", target, "--length", 64)
    assert alone.code == 0
    assert "no reference" in alone.out
    assert tieq_command("validate", target, "--length", 64, "--max-kl", 1).code == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inspect", "smolm2-135m"], ["Did you mean", "smollm2-135m"]),
        (["inspect", "no/such/path.gguf"], ["is no folder"]),
        (["export", "--model", "gpt2", "--bits", "7"], ["--bits 7 has no scheme", "2, 3, 4, 5, 6, 8"]),
        (["export", "--model", "gpt2", "--bits", "4", "--recipe", "x.yaml"], ["exclude each other"]),
        (["export", "--model", "gpt2", "--recipe", "none.yaml"], ["none.yaml", "cannot be read"]),
        (["export", "--model", "gpt2", "--effort", "heroic"], ["--effort", "'quick', 'standard' or 'best'"]),
        (["export", "--model", "gpt2", "--format", "tflite"], ["--format 'tflite'", "onnx, ort, gguf"]),
        (["validate", "missing"], ["does not exist"]),
        (["probe", "gpt2", "--bits", "two"], ["--bits 'two'", "2,4,8"]),
        (["probe", "gpt2", "--bits", "4,7"], ["--bits 7 has no scheme"]),
        (["probe", "gpt2", "--scheme", "q9_9"], ["'q9_9' is no scheme", "q4_0"]),
        (["probe", "gpt2", "--effort", "heroic"], ["--effort 'heroic'", "quick, standard, best"]),
        (["probe", "gpt2", "--text", "none.txt"], ["none.txt", "cannot be read"]),
        (["compare", "gpt2", "--bits", "1"], ["--bits 1 has no scheme"]),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(arguments, words, tieq_command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = tieq_command(*arguments)
    assert done.code == 2
    assert done.out == ""
    (line,) = [line for line in done.err.splitlines() if line.startswith("tieq: ")]
    for word in words:
        assert word in line
    assert list(tmp_path.iterdir()) == []


def test_bits_that_onnx_lacks_are_refused_before_any_work(tieq_command, tiny_checkpoint, tmp_path):
    done = tieq_command("export", "--model", tiny_checkpoint(), "--bits", 5, "--out", tmp_path / "out")
    assert done.code == 2
    assert "ONNX operators cannot hold q5_0" in done.err
    assert not (tmp_path / "out").exists()


def test_an_unknown_runtime_is_bad_usage_and_a_missing_one_is_exit_code_3(tieq_command, tiny_export, monkeypatch):
    folder = tiny_export().folder
    assert tieq_command("validate", folder, "--runtime", "tflite").code == 2
    from tieq.runtimes.base import Availability
    from tieq.runtimes.llama_cpp import LlamaCpp

    monkeypatch.setattr(LlamaCpp, "availability", lambda self: Availability(False, "", "pip install it"))
    done = tieq_command("validate", folder, "--runtime", "llama.cpp")
    assert done.code == 3
    assert "Get llama.cpp: pip install it" in done.err
    assert "reference model" not in done.err
    assert "can be set up" in tieq_command("runtimes").out


def test_a_foreign_folder_is_never_replaced(tieq_command, tiny_checkpoint, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("precious")
    done = tieq_command("export", "--model", tiny_checkpoint(), "--out", tmp_path / "thesis")
    assert done.code == 2
    assert "not replaced" in done.err
    assert (tmp_path / "thesis" / "chapter1.tex").read_text() == "precious"


def test_an_artifact_is_refused_by_weights_it_was_not_made_from(tieq_command, tiny_export, tmp_path):
    other = tiny.save(tmp_path / "other", seed=5)
    done = tieq_command("validate", tiny_export().folder, "--reference", other)
    assert done.code == 2
    assert "other weights than the artifact was made from" in done.err


def test_recipes_are_listed_and_their_schema_printed(tieq_command):
    shown = tieq_command("recipes")
    assert shown.code == 0
    assert "near-lossless" in shown.out
    listed = {row["name"] for row in json.loads(tieq_command("recipes", "--json").out)["recipes"]}
    assert listed == set(shipped_recipes())
    schema = json.loads(tieq_command("recipes", "--schema").out)
    assert schema["additionalProperties"] is False
    assert "table" in schema["properties"]


def test_a_shipped_recipe_is_named_without_a_path(tieq_command, tmp_path):
    wrong = tieq_command("export", "--model", "gpt2", "--recipe", "neer-lossless", "--out", tmp_path / "out")
    assert wrong.code == 2
    assert "Did you mean near-lossless?" in wrong.err


def test_inspect_lists_rows_that_export_would_refuse(tieq_command, tiny_checkpoint, tmp_path):
    folder = copy(tiny_checkpoint(), tmp_path / "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][[3, 40], 0] = np.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shown = tieq_command("inspect", folder)
    assert shown.code == 0
    said = "2 rows of 'model.embed_tokens.weight' hold NaN or infinity: 3, 40; export refuses them."
    assert f"note: {said}" in shown.out


@pytest.mark.parametrize(
    ("model", "recipe", "folder"),
    [("smollm2-135m", "4-bit", "smollm2-135m-4-bit"), ("smollm2-135m", "smollm2-135m-4bit", "smollm2-135m-4bit"),
     ("org/Model X", "balanced", "model-x-balanced"), ("somewhere/m.Q8_0.gguf", "a b", "m.q8_0-a-b")],
)  # fmt: skip
def test_the_default_folder_names_model_and_recipe_once(model, recipe, folder):
    assert default_out(model, Recipe(name=recipe), keep_body=False) == Path("artifacts") / folder


def test_probe_and_compare_print_what_their_files_hold(tieq_command, tiny_checkpoint, tmp_path):
    text = tmp_path / "own.txt"
    text.write_text("the dog sleeps in the warm sun and the fox walks by. " * 300)
    texts = ("--calibration", text, "--text", text)
    done = tieq_command(
        "probe", tiny_checkpoint(), "--bits", "3,4", "--scheme", "q8_0", *texts, "--out", tmp_path / "p", "--json"
    )
    assert done.code == 0, done.err
    assert json.loads(done.out) == json.loads((tmp_path / "p" / "probe.json").read_text())
    shown = tieq_command("probe", tiny_checkpoint(), "--scheme", "iq4_nl", *texts, "--out", tmp_path / "p")
    assert shown.code == 0, shown.err
    for words in ("iq4_nl", "KL, lookup", "predicted", "top 0.1 %", "after block 2", "The final norm's gain"):
        assert words in shown.out
    assert "q4_0" not in shown.out
    done = tieq_command("compare", tiny_checkpoint("phi"), "--bits", "4", *texts, "--out", tmp_path / "c", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out) == json.loads((tmp_path / "c" / "compare.json").read_text())
    shown = tieq_command("compare", tiny_checkpoint(), "--bits", "4", *texts, "--out", tmp_path / "c")
    assert shown.code == 0, shown.err
    for words in ("one shared table", "two tables in its bytes (q2_0 + q2_0)", "plain rounding", "sharing the table"):
        assert words in shown.out


def test_a_study_is_no_artifact_with_containers(tieq_command, tiny_checkpoint, tmp_path):
    text = tmp_path / "own.txt"
    text.write_text("the dog sleeps in the warm sun and the fox walks by. " * 300)
    tieq_command(
        "probe", tiny_checkpoint(), "--bits", "8", "--calibration", text, "--text", text, "--out", tmp_path / "p"
    )
    done = tieq_command("inspect", tmp_path / "p")
    assert done.code == 2
    assert "no container at all" in done.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--target-size", "80MB", "--max-kl", "0.05"), "--target-size and --max-kl exclude each other"),
        (("--target-size", "80MB", "--bits", "4"), "--target-size and --bits exclude each other"),
        (("--target-size", "80XB"), "is no size"),
        (("--target-size", "0"), "is no size"),
        (("--target-size", "80"), "'80' has no unit. Write it as 80MB or 80MiB"),
        (("--max-kl", "nan"), "is no bound"),
        (("--max-kl=-1",), "is no bound"),
    ],
)
@pytest.mark.parametrize("command", [("plan",), ("export", "--model")])
def test_a_budget_that_is_none_is_refused_before_any_work(command, options, said, tieq_command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = tieq_command(*command, "gpt2", *options)
    assert done.code == 2
    assert said in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_plan_excludes_bits_and_a_kept_body(tieq_command):
    done = tieq_command("export", "--model", "gpt2", "--plan", "p.json", "--bits", "4")
    assert (done.code, "--plan and --bits exclude each other" in done.err) == (2, True)
    done = tieq_command("export", "--model", "gpt2", "--target-size", "1MB", "--keep-body")
    assert (done.code, "nothing to plan" in done.err) == (2, True)


def test_a_plan_is_printed_saved_and_followed_by_the_command(tieq_command, tiny_checkpoint, tmp_path):
    text = tmp_path / "own.txt"
    text.write_text("the dog sleeps in the warm sun and the fox walks by. " * 300)
    texts = ("--calibration", text, "--text", text, "--format", "onnx")
    shown = tieq_command("plan", tiny_checkpoint(), "--target-size", "0.2MB", *texts, "--out", tmp_path / "p")
    assert shown.code == 0, shown.err
    for words in ("chosen", "predicted:", "measured before the correction", "two tables instead of one"):
        assert words in shown.out
    done = tieq_command(
        "export", "--model", tiny_checkpoint(), "--plan", tmp_path / "p" / "plan.json", *texts, "--out", tmp_path / "e"
    )
    assert done.code == 0, done.err
    assert "at most 200,000 bytes" in done.out  # the plan's budget is the export's gate
    refused = tieq_command("validate", tmp_path / "p")
    assert (refused.code, "a probe, a comparison or a plan" in refused.err) == (2, True)
