"""The figures of ``tieq probe`` and ``tieq compare`` as SVG; the same document gives the same bytes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_KL = "KL (nats per token)"
_COLOURS = {"lookup": "tab:blue", "logits": "tab:red", "both": "black"}
# Element ids are drawn from this, and not at random.
_SALT = "tieq"


def draw_probe(document: dict[str, Any], folder: Path) -> None:
    """Draw ``cost_by_role.svg``, ``residual_error.svg`` and ``frequency_bands.svg`` of a probe's document."""
    label, schemes = document["model"]["label"], document["schemes"]
    with _figure(folder / "cost_by_role.svg", f"{label}: cost of quantizing the table, by role") as (axes,):
        bits = [entry["bits_per_weight"] for entry in schemes]
        for role, colour in _COLOURS.items():
            measured = [entry["measured"][role]["kl"] for entry in schemes]
            values = [_drawable(found["value"]) for found in measured]
            errors = [found["standard_error"] or 0.0 for found in measured]
            axes.errorbar(bits, values, yerr=errors, color=colour, marker="o", capsize=3, label=f"{role}, measured")
            predicted = [_drawable(entry["predicted"][role]) for entry in schemes]
            axes.plot(bits, predicted, color=colour, linestyle="--", label=f"{role}, predicted")
        axes.set(xlabel="bits per weight", ylabel=_KL, yscale="log")
        axes.legend()
    with _figure(folder / "residual_error.svg", f"{label}: how a lookup error travels") as (axes,):
        for entry in schemes:
            errors = entry["residual_error"]
            axes.plot(range(len(errors)), [_drawable(value) for value in errors], marker=".", label=_name(entry))
        axes.locator_params(axis="x", integer=True)
        axes.set(xlabel="decoder blocks passed", ylabel="relative error of the residual stream", yscale="log")
        axes.legend()
    with _figure(folder / "frequency_bands.svg", f"{label}: predicted cost by token frequency", 2) as panels:
        labels = [f"{band['label']}\n{band['token_share']:.1%} of tokens" for band in document["bands"]]
        for axes, role in zip(panels, ("lookup", "logits"), strict=True):
            for entry in schemes:
                costs = [_drawable(value) for value in entry["bands"][role]]
                axes.plot(range(len(costs)), costs, marker="o", label=_name(entry))
            axes.set(title=role, ylabel=_KL, yscale="log")
            axes.set_xticks(range(len(labels)), labels, fontsize="x-small")
        panels[0].legend()


def draw_compare(document: dict[str, Any], folder: Path) -> None:
    """Draw ``compare.svg``: KL against the bytes of the table or tables."""
    kinds = {
        "shared": ("one shared table", "o"),
        "untied": ("two tables, each solved for its role", "s"),
        "untied_same_bytes": ("two tables in the shared table's bytes", "^"),
        "naive": ("plain rounding", "x"),
    }
    with _figure(folder / "compare.svg", f"{document['model']['label']}: tied and untied") as (axes,):
        for kind, (said, marker) in kinds.items():
            found = [entry[kind] for entry in document["schemes"] if entry[kind] is not None]
            if not found:
                continue
            sizes = [item["bytes"] / 1e6 for item in found]
            values = [_drawable(item["kl"]["value"]) for item in found]
            errors = [item["kl"]["standard_error"] or 0.0 for item in found]
            axes.errorbar(sizes, values, yerr=errors, marker=marker, capsize=3, label=said)
        axes.set(xlabel="table bytes (MB)", ylabel=_KL, yscale="log")
        axes.legend()


def draw_plan(document: dict[str, Any], folder: Path) -> None:
    """Draw ``front.svg``: predicted KL against the size of the file, and the plan on it."""
    with _figure(folder / "front.svg", f"{document['model']['label']}: what a size can buy") as (axes,):
        points, chosen = document["front"], document["predicted"]
        sizes = [point["file_bytes"] / 1e6 for point in points]
        axes.plot(sizes, [_drawable(point["kl"]) for point in points], marker=".", label="predicted")
        axes.plot([chosen["file_bytes"] / 1e6], [_drawable(chosen["kl"])], marker="o", linestyle="", label="the plan")
        axes.set(xlabel="file (MB)", ylabel=_KL, yscale="log")
        axes.legend()


def _name(entry: dict[str, Any]) -> str:
    return f"{entry['scheme']}, {entry['bits_per_weight']:.4g} bits/weight"


def _drawable(value: float) -> float:
    """A value that a logarithmic axis can hold, else a gap in the line."""
    return value if math.isfinite(value) and value > 0 else math.nan


@contextlib.contextmanager
def _figure(path: Path, title: str, panels: int = 1) -> Iterator[list[Any]]:
    """Yield the axes of a figure that is written at the end."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context():
        mpl.rcdefaults()  # a user's own style would change the bytes
        mpl.rcParams["svg.hashsalt"] = _SALT
        figure = Figure(figsize=(7.0 * panels, 4.5), layout="constrained")
        figure.suptitle(title)
        yield list(figure.subplots(1, panels, squeeze=False)[0])
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
