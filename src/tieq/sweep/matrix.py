"""The models file, the recipes, and the cells that they span, each with a key that says what it follows from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from tieq import __version__, text
from tieq.errors import TieqError
from tieq.recipe import Effort, Recipe, find_recipe
from tieq.source.locate import is_remote, open_source
from tieq.source.package import file_sha256
from tieq.source.tokenizer import TOKENIZER_FILES

Wanted = TypeVar("Wanted")
Found = TypeVar("Found")


class ModelEntry(BaseModel):
    """One model of the models file: what ``--model`` takes, and the name that its cells get."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1, strict=True)
    name: str | None = Field(None, pattern=r"^[\w][\w.-]*$", strict=True)

    @property
    def label(self) -> str:
        """The given name, else the last part of the model's."""
        last = Path(self.model).name
        stem = Path(last).stem if last.endswith(".gguf") else last
        return self.name or _label(stem)


@dataclasses.dataclass(frozen=True)
class Wishes:
    """What all cells of a sweep have in common; paths are absolute, since a cell may run in another folder."""

    formats: tuple[str, ...] | None = None
    runtimes: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    calibration: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Cell:
    """One model with one recipe. ``key`` is a SHA-256 of all that the result follows from."""

    name: str
    model: str
    label: str
    recipe_name: str
    recipe: Recipe
    wishes: Wishes
    key: str

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary, from which :meth:`from_json` makes an equal cell on another machine."""
        found = dataclasses.asdict(self)
        return {**found, "recipe": self.recipe.model_dump(mode="json")}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Cell:
        """The cell of :meth:`to_json`."""
        wished = content["wishes"]
        wishes = Wishes(
            None if wished["formats"] is None else tuple(wished["formats"]),
            **{name: tuple(wished[name]) for name in ("runtimes", "texts", "calibration")},
        )
        fields = {field.name: content[field.name] for field in dataclasses.fields(cls)}
        return cls(**{**fields, "recipe": Recipe.model_validate(content["recipe"]), "wishes": wishes})


def load_models(path: Path) -> list[ModelEntry]:
    """Read a models file, a YAML list of names or of mappings; every problem is reported at once.

    Raises:
        TieqError: if the file is no YAML list, is empty, or has unknown keys.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        content = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, YAMLError) as error:
        raise TieqError(f"cannot be read as YAML ({error}).", where=str(path)) from error
    if not isinstance(content, list) or not content:
        raise TieqError(
            "is no list of models.", where=str(path), todo="Write one model a line, each after '- ', by name or path."
        )
    entries = [{"model": item} if isinstance(item, str) else item for item in content]
    try:
        return TypeAdapter(list[ModelEntry]).validate_python(entries)
    except ValidationError as error:
        problems = "; ".join(
            f"entry {int(item['loc'][0]) + 1}{''.join(f', {part}' for part in item['loc'][1:])}: {item['msg']}"
            for item in error.errors()
        )
        raise TieqError(f"{problems}.", where=str(path), todo="Correct these entries.") from error


def make_cells(models: Path, recipes: Iterable[str | Path], wishes: Wishes, effort: Effort | None = None) -> list[Cell]:
    """Every model with every recipe, models outermost.

    Args:
        models: models file; its relative paths are those of its own folder.
        recipes: recipe files or names of shipped recipes.
        wishes: what all cells have in common.
        effort: effort over that of every recipe.

    Raises:
        TieqError: naming every model that is not there, every recipe that cannot be read and every name used twice.
    """
    problems: list[str] = []

    def named(wanted: str | Path) -> tuple[str, Recipe]:
        recipe = find_recipe(wanted)
        changed = recipe if effort is None else recipe.model_copy(update={"effort": effort})
        return _label(Path(wanted).stem if Path(wanted).is_file() else str(wanted)), changed

    def identified(entry: ModelEntry) -> tuple[ModelEntry, str, str]:
        return (entry, *_identify(entry.model, models.resolve().parent))

    opened = _each(identified, load_models(models), problems)
    chosen = _each(named, recipes, problems)
    common = _common(wishes)
    cells = [
        Cell(f"{entry.label}-{name}", model, entry.label, name, recipe, wishes, _key(identity, recipe, common))
        for entry, model, identity in opened
        for name, recipe in chosen
    ]
    names = [cell.name.lower() for cell in cells]
    problems += [
        f"Two cells would be called '{name}'; give a model another 'name' in {models}, or a recipe another file name."
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    if problems:
        raise TieqError(" ".join(problems))
    return cells


def _each(find: Callable[[Wanted], Found], wanted: Iterable[Wanted], problems: list[str]) -> list[Found]:
    """What is found of all that is wanted; the sentences of what is not go to the problems."""

    def found(item: Wanted) -> list[Found]:
        try:
            return [find(item)]
        except TieqError as error:
            problems.append(error.sentence())
            return []

    return [result for item in wanted for result in found(item)]


def _identify(model: str, beside: Path) -> tuple[str, str]:
    """The model as a cell opens it, and what identifies it: the files' content, or the name of one to be fetched."""
    path = beside / Path(model).expanduser()
    if path.exists():
        source = open_source(str(path))
        folder = source.tokenizer_folder()
        # A fingerprint is that of the weights; another tokenizer makes other tokens of the same text.
        files = [] if folder is None else [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
        return str(path), " ".join([source.fingerprint(), *(f"{file.name} {file_sha256(file)}" for file in files)])
    if is_remote(model):
        return model, model.lower()
    raise TieqError(
        f"is no path in {beside}, no alias and no hub id.",
        where=f"model '{model}'",
        todo="Give paths as they are from the models file's folder.",
    )


def _common(wishes: Wishes) -> dict[str, Any]:
    """What a key holds of the wishes: texts by content."""
    texts = [text.file_corpus([Path(path)]).sha256 for path in wishes.texts]
    calibration = [
        path if path == text.SAMPLES else text.file_corpus([Path(path)]).sha256 for path in wishes.calibration
    ]
    # The default text is that of the standard library.
    default = {} if texts and calibration else {"python": platform.python_version()}
    formats = None if wishes.formats is None else list(wishes.formats)
    return {
        "tieq": __version__,
        "formats": formats,
        "runtimes": sorted(set(wishes.runtimes)),
        "texts": texts,
        "calibration": calibration,
        **default,
    }


def _key(identity: str, recipe: Recipe, common: dict[str, Any]) -> str:
    content = {"model": identity, "recipe": recipe.model_dump(mode="json"), **common}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _label(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text).lower().lstrip(".-") or "model"
