"""The architecture as a test: who may import whom inside tieq, and where each third-party library lives.

Imports are read from the syntax tree, so an import inside a function, under TYPE_CHECKING or through
`importlib.import_module("...")` counts like any other.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

PACKAGE = "tieq"
SOURCE = Path(__file__).resolve().parents[1] / "src" / PACKAGE

# A unit is a module or package directly under tieq. It may import lower floors, and others of its own floor
# as long as no cycle arises.
FLOORS: dict[str, int] = {
    "ahead": 0,
    "errors": 0,
    "records": 0,
    "progress": 0,
    "artifact": 1,
    "kept": 1,
    "tensor_file": 1,
    "codecs": 1,
    "metrics": 1,
    "source": 1,
    "calibrate": 2,
    "cost": 3,
    "sequential": 3,
    "text": 2,
    "solve": 2,
    "probe": 3,
    "recipe": 3,
    "budget": 4,
    "bands": 4,
    "plan": 4,
    "encoding": 3,
    "quantize": 5,
    "candidates": 6,
    "export": 6,
    "runtimes": 6,
    "validate": 7,
    "report": 8,
    "prepare": 8,
    "planner": 8,
    "planning": 8,
    "sampled": 8,
    "pipeline": 8,
    "study": 8,
    "probing": 8,
    "comparing": 8,
    "inspection": 8,
    "revalidate": 8,
    "sweep": 9,
    "api": 9,
    "cli": 9,
    "__init__": 9,
    "__main__": 9,
}

# Validation judges the file alone, so it must not share code with what wrote the file.
FORBIDDEN: dict[str, frozenset[str]] = {"validate": frozenset({"bands", "export", "quantize", "solve"})}

# Where a library may be imported, as patterns of paths under src/tieq. Ruff's banned-api says the same for
# the files that are home to no library; this table is exact for the others too.
_COMMAND_LINE = ("cli.py", "cli/*")
_ONNX = ("export/*", "validate/*", "runtimes/onnxruntime.py")
_LITERT = ("export/litert_nodes.py", "validate/litert_file.py", "runtimes/*")
HOMES: dict[str, tuple[str, ...]] = {
    "ai_edge_litert": _LITERT,
    "conversion": ("export/*", "source/*"),
    "flatbuffers": ("export/litert_nodes.py", "runtimes/*"),
    "gguf": ("export/*", "source/*"),
    "jinja2": ("report/page.py",),
    "llama_cpp": ("codecs/ggml.py", "runtimes/llama_cpp.py"),
    "matplotlib": ("report/pictures.py",),
    "onnx": _ONNX,
    "onnx_ir": _ONNX,
    "onnxruntime": ("runtimes/*", "export/ort.py"),
    "optimum": ("export/*",),
    "ray": ("sweep/ray_engine.py",),
    "rich": (*_COMMAND_LINE, "progress.py"),
    "safetensors": ("source/*", "quantize.py", "encoding.py", "calibrate/*"),
    "torch": ("source/*", "calibrate/*", "export/onnx_graph.py"),
    "transformers": ("source/*",),
    "typer": (*_COMMAND_LINE, "progress.py"),
}


@dataclass(frozen=True)
class Import:
    """One import: the module that imports, as path under the package, and the dotted name it asks for."""

    path: str
    line: int
    target: str

    def __str__(self) -> str:
        return f"{PACKAGE}/{self.path}:{self.line} imports {self.target}"


def find_imports(root: Path) -> list[Import]:
    """Every import in the package at root, absolute names, in file order."""
    return [
        Import(path.relative_to(root).as_posix(), line, target)
        for path in sorted(root.rglob("*.py"))
        for line, target in _imports_of(path, root)
    ]


def _imports_of(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, path, root)
            # `from tieq import plan` names a module, `from tieq.plan import Plan` something inside one.
            targets = [
                f"{base}.{alias.name}" if base == PACKAGE and _is_unit(alias.name, root) else base
                for alias in node.names
            ]
            yield from ((node.lineno, target) for target in dict.fromkeys(targets))
        elif isinstance(node, ast.Call) and node.args and _is_dynamic_import(node.func):
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield node.lineno, argument.value


def _absolute(node: ast.ImportFrom, path: Path, root: Path) -> str:
    if not node.level:
        return node.module or ""
    package = [PACKAGE, *path.relative_to(root).parent.parts]
    kept = package[: len(package) - node.level + 1]
    return ".".join([*kept, node.module] if node.module else kept)


def _is_dynamic_import(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in {"import_module", "__import__"}


def _is_unit(name: str, root: Path) -> bool:
    return (root / f"{name}.py").is_file() or (root / name).is_dir()


def unit_of_path(path: str) -> str:
    """`export/gguf.py` -> `export`, `plan.py` -> `plan`."""
    return path.split("/", 1)[0].removesuffix(".py")


def unit_of_target(target: str) -> str | None:
    """`tieq.export.gguf` -> `export`, `tieq` -> `__init__`, anything else -> None."""
    head, _, rest = target.partition(".")
    if head != PACKAGE:
        return None
    return rest.split(".", 1)[0] or "__init__"


def unplaced_units(root: Path) -> list[str]:
    """Units that have no floor."""
    units = {unit_of_path(path.relative_to(root).as_posix()) for path in root.rglob("*.py")}
    return sorted(units - FLOORS.keys())


def floor_violations(imports: list[Import]) -> list[str]:
    """Upward imports, forbidden ones, and imports of units that have no floor."""
    found = []
    for item in imports:
        importer, imported = unit_of_path(item.path), unit_of_target(item.target)
        if imported is None or imported == importer:
            continue
        if importer not in FLOORS or imported not in FLOORS:
            found.append(f"{item}: no floor is given for {imported if importer in FLOORS else importer}")
        elif FLOORS[imported] > FLOORS[importer]:
            found.append(f"{item}: from floor {FLOORS[importer]} up to floor {FLOORS[imported]}")
        elif imported in FORBIDDEN.get(importer, ()):
            found.append(f"{item}: {importer} must not depend on {imported}")
    return found


def unit_cycle(imports: list[Import]) -> list[str]:
    """The units of one import cycle, the first repeated at the end; empty where there is none."""
    graph: dict[str, set[str]] = {}
    for item in imports:
        importer, imported = unit_of_path(item.path), unit_of_target(item.target)
        if imported is not None and imported != importer:
            graph.setdefault(importer, set()).add(imported)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def homeless_imports(imports: list[Import]) -> list[str]:
    """Imports of a third-party library outside the files that are its home."""
    found = []
    for item in imports:
        library = item.target.split(".", 1)[0]
        homes = HOMES.get(library)
        if homes is not None and not any(fnmatchcase(item.path, pattern) for pattern in homes):
            found.append(f"{item}: {library} is used in {', '.join(homes)} only")
    return found


def _listed(lines: list[str]) -> str:
    return "\n  " + "\n  ".join(lines)


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return find_imports(SOURCE)


class TestTieq:
    """What holds for the package as it is."""

    def test_every_module_has_a_floor(self) -> None:
        unplaced = unplaced_units(SOURCE)
        assert not unplaced, f"give these a floor in FLOORS and in the architecture document: {unplaced}"

    def test_imports_point_downward(self, imports: list[Import]) -> None:
        violations = floor_violations(imports)
        assert not violations, _listed(violations)

    def test_no_cycle_between_units(self, imports: list[Import]) -> None:
        cycle = unit_cycle(imports)
        assert not cycle, " <- ".join(cycle)

    def test_libraries_stay_at_home(self, imports: list[Import]) -> None:
        violations = homeless_imports(imports)
        assert not violations, _listed(violations)

    def test_the_walk_sees_the_package(self, imports: list[Import]) -> None:
        # A walk that finds nothing would pass everything above.
        assert any(unit_of_target(item.target) == "errors" for item in imports)


class TestChecker:
    """The checker itself, on small planted packages."""

    @staticmethod
    def plant(folder: Path, **files: str) -> Path:
        """Write a package; a double underscore between two names stands for a folder."""
        root = folder / PACKAGE
        for name, text in {"errors": "", "records": "", **files}.items():
            path = root / (name.replace("__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return root

    @pytest.mark.parametrize(
        "text",
        [
            "import tieq.plan",
            "from tieq.plan import decide",
            "from tieq import plan",
            "from ..plan import decide",
            "from .. import plan",
            "def late():\n    from tieq.plan import decide",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tieq.plan import Plan",
            "import importlib\nplan = importlib.import_module('tieq.plan')",
        ],
    )
    def test_upward_import_is_caught(self, tmp_path: Path, text: str) -> None:
        root = self.plant(tmp_path, plan="", codecs__rows=text)
        violations = floor_violations(find_imports(root))
        assert len(violations) == 1
        assert violations[0].startswith("tieq/codecs/rows.py:")
        assert violations[0].endswith("from floor 1 up to floor 4")

    def test_downward_and_own_package_pass(self, tmp_path: Path) -> None:
        root = self.plant(
            tmp_path,
            codecs__rows="from tieq.errors import TieqError\nfrom .geometry import SIZE\nimport numpy",
            codecs__geometry="SIZE = 32",
            source__weights="from tieq import codecs, records",
        )
        imports = find_imports(root)
        assert floor_violations(imports) == []
        assert unit_cycle(imports) == []
        assert unplaced_units(root) == []

    def test_the_package_itself_is_the_top_floor(self, tmp_path: Path) -> None:
        root = self.plant(tmp_path, plan="from tieq import export_model")
        assert floor_violations(find_imports(root)) == ["tieq/plan.py:1 imports tieq: from floor 4 up to floor 9"]

    @pytest.mark.parametrize("unit", ["export", "quantize", "solve"])
    def test_validate_stays_independent(self, tmp_path: Path, unit: str) -> None:
        root = self.plant(tmp_path, validate__gates=f"from tieq.{unit} import anything", **{unit: ""})
        (violation,) = floor_violations(find_imports(root))
        assert violation.endswith(f"validate must not depend on {unit}")

    def test_every_violation_is_listed(self, tmp_path: Path) -> None:
        root = self.plant(tmp_path, errors="import tieq.plan\nimport tieq.cli", plan="", cli="")
        assert len(floor_violations(find_imports(root))) == 2

    def test_cycle_on_one_floor_is_caught(self, tmp_path: Path) -> None:
        root = self.plant(tmp_path, text="import tieq.calibrate", calibrate="from tieq.text import split")
        imports = find_imports(root)
        assert floor_violations(imports) == []
        assert set(unit_cycle(imports)) == {"text", "calibrate"}

    def test_module_without_floor_is_caught(self, tmp_path: Path) -> None:
        root = self.plant(tmp_path, helpers="", plan="import tieq.helpers")
        assert unplaced_units(root) == ["helpers"]
        (violation,) = floor_violations(find_imports(root))
        assert "no floor is given for helpers" in violation

    def test_library_away_from_home_is_caught(self, tmp_path: Path) -> None:
        root = self.plant(
            tmp_path,
            calibrate__measure="import torch",
            export__onnx_graph="import torch.nn",
            export__gguf_file="def late():\n    import torch",
            source__tokens="from transformers import AutoTokenizer",
            probe="from transformers import AutoTokenizer",
        )
        assert homeless_imports(find_imports(root)) == [
            f"tieq/export/gguf_file.py:2 imports torch: torch is used in {', '.join(HOMES['torch'])} only",
            "tieq/probe.py:1 imports transformers: transformers is used in source/* only",
        ]
