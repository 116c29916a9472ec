"""docs/ci.md: the commands of its two jobs, run from the page itself on a tiny model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import tiny
from ruamel.yaml import YAML

from tieq.recipe import dump_recipe

PAGE = Path(__file__).parents[1] / "docs" / "ci.md"


def scripts() -> dict[str, list[str]]:
    """The tieq commands of each job."""
    blocks = [YAML(typ="safe").load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)]
    github, gitlab = blocks[0]["jobs"]["model"], blocks[1]["edge model"]
    lines = {"github": [step["run"] for step in github["steps"] if "run" in step], "gitlab": gitlab["script"]}
    return {name: [line for line in found if line.startswith("tieq ")] for name, found in lines.items()}


@pytest.mark.parametrize("job", ["github", "gitlab"])
def test_the_jobs_of_the_page_pass_and_leave_what_they_promise(job, tiny_checkpoint, tiny_export, tmp_path):
    (tmp_path / "recipe.yaml").write_text(dump_recipe(tiny.recipe()))
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "MODEL": str(tiny_checkpoint("llama")),
        "RECIPE": "recipe.yaml",
        "BASELINE": str(tiny_export("llama").folder / "manifest.json"),
        "GITHUB_STEP_SUMMARY": "summary.md",
    }
    commands = scripts()[job]
    assert [command.split()[1] for command in commands] == ["export", "validate"]
    for command in commands:
        subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path, env=environment, timeout=300)
    suite = ET.parse(tmp_path / "tieq.xml").getroot()
    assert suite.get("failures") == "0"
    assert {"table copies", "KL, baseline"} <= {case.get("name") for case in suite}
    if job == "github":
        assert "all gates hold" in (tmp_path / "summary.md").read_text()
