"""What tieq imports is declared in pyproject.toml, and what is declared is pinned in requirements.lock."""

from __future__ import annotations

import ast
import itertools
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "tieq"
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]


def third_party_imports() -> dict[str, str]:
    """Top-level package -> the first place that imports it."""
    found: dict[str, str] = {}
    # Workers are programs for other Pythons, whose packages `tieq runtimes setup` pins.
    for path in sorted(set(SOURCE.rglob("*.py")) - set(SOURCE.rglob("runtimes/workers/*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            else:
                continue
            for name in names:
                top = name.split(".", 1)[0]
                if top != "tieq" and top not in sys.stdlib_module_names:
                    found.setdefault(top, f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def package_owners() -> dict[str, set[str]]:
    """Top-level package -> the installed distributions that bring it.

    Like importlib.metadata.packages_distributions, which on Python 3.10 misses a wheel without top_level.txt.
    """
    owners: dict[str, set[str]] = {}
    for distribution in distributions():
        listed = distribution.read_text("top_level.txt")
        tops = listed.split() if listed else [path.parts[0] for path in distribution.files or ()]
        for top in tops:
            owners.setdefault(top.removesuffix(".py"), set()).add(canonicalize_name(distribution.name))
    return owners


def read_project() -> dict[str, Any]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert isinstance(project, dict)
    return project


def declared(python: str | None = None) -> list[Requirement]:
    """The requirements of tieq and of all its extras; with a Python given, those that apply to it."""
    project = read_project()
    texts = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    return [item for item in map(Requirement, texts) if python is None or applies(item, python)]


def applies(requirement: Requirement, python: str) -> bool:
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    return requirement.marker is None or requirement.marker.evaluate(environment)


def lock_lines() -> list[str]:
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def locked(python: str) -> dict[str, Version]:
    """Distribution -> version that the lock gives one Python."""
    pins: dict[str, Version] = {}
    for requirement in map(Requirement, lock_lines()):
        if applies(requirement, python):
            name = canonicalize_name(requirement.name)
            assert name not in pins, f"requirements.lock pins {name} twice for Python {python}"
            (specifier,) = requirement.specifier
            pins[name] = Version(specifier.version)
    return pins


def test_every_import_is_declared() -> None:
    runtime = {canonicalize_name(Requirement(text).name) for text in read_project()["dependencies"]}
    extras = {canonicalize_name(item.name) for item in declared()} - runtime
    owners = package_owners()
    undeclared = []
    for package, place in third_party_imports().items():
        # A package that is not installed can only be one of an extra, under its own name.
        bringers = owners.get(package, {canonicalize_name(package)})
        if not bringers & (runtime | extras):
            undeclared.append(f"{place} imports {package} (of {', '.join(sorted(bringers))})")
    assert not undeclared, "not among the dependencies in pyproject.toml:\n  " + "\n  ".join(undeclared)


@pytest.mark.parametrize("python", PYTHONS)
def test_every_dependency_is_pinned_within_its_range(python: str) -> None:
    pins = locked(python)
    faults = []
    for requirement in declared(python):
        pin = pins.get(canonicalize_name(requirement.name))
        if pin is None:
            faults.append(f"{requirement.name} is missing")
        elif pin not in requirement.specifier:
            faults.append(f"{requirement.name}=={pin} is outside {requirement.specifier}")
    assert not faults, f"requirements.lock, Python {python}:\n  " + "\n  ".join(faults)


def test_lock_holds_exact_versions_only() -> None:
    for line in lock_lines():
        operators = [specifier.operator for specifier in Requirement(line).specifier]
        assert operators == ["=="], line
        assert "*" not in line, line


def test_lock_brings_no_accelerator_packages() -> None:
    prefixes = ("nvidia-", "cuda-", "triton", "pytorch-triton")
    assert not [line for line in lock_lines() if line.lower().startswith(prefixes)]


def test_converter_is_the_only_source_of_gguf() -> None:
    # PyPI's gguf and the converter's own copy would overwrite each other in site-packages.
    assert "gguf" not in {canonicalize_name(item.name) for item in declared()}
    assert not [line for line in lock_lines() if line.startswith("gguf==")]


def test_supported_pythons_match_the_tests() -> None:
    assert read_project()["requires-python"] == ">=3.10,<3.14"
