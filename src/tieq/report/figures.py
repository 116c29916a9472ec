"""The pictures of a report with their words and tables: the tie, the costs by role, sizes against KL."""

from __future__ import annotations

import shlex
from pathlib import PurePosixPath
from typing import Any

from tieq.report.charts import Point, draw_costs, draw_sizes
from tieq.report.documents import Documents, text_words
from tieq.report.drawings import draw_tie
from tieq.report.matrix import plus_minus, table_copies
from tieq.report.points import own_points, peer_points, same_text
from tieq.report.tables import megabytes

# Pixels that a drawing is made for: a phone of 360 and a desktop page's column.
NARROW, WIDE = 326.0, 760.0
_ROLES = ("lookup", "logits", "both")
_KINDS = {"ours": "this export", "peer": "peers", "beside": "put beside"}


def tie_view(documents: Documents) -> dict[str, Any]:
    """The tie in words, and a picture for each container."""
    graph, checks = documents.graph, documents.checks
    copies = table_copies(checks)
    pictures = []
    for container in checks["containers"]:
        name = container["container"]
        sizes = _sizes_beside(documents.manifest["files"], f".{name}")
        count = int(copies.get(name, len(container["payloads"])))
        pictures.append(
            {
                "container": name,
                "narrow": draw_tie(container, count, sizes, NARROW),
                "wide": draw_tie(container, count, sizes, WIDE),
                "names": [tensor for payload in container["payloads"] for tensor in payload["names"]],
            }
        )
    sums = graph["arithmetic"]
    words = (
        f"{graph['verdict']}: {graph['rows']:,} rows × {graph['columns']:,} columns, "
        f"{'one table for both roles' if graph['tied'] else 'a table for each role'}. Tying "
        f"{'saves' if graph['tied'] else 'would save'} {sums['saved_share']:.1%} of the parameters."
    )
    return {"words": words, "notes": graph["notes"], "pictures": pictures}


def _sizes_beside(files: list[dict[str, Any]], suffix: str) -> dict[str, int]:
    """Bytes by name of the files in the folder of the container with that suffix."""
    paths = [(PurePosixPath(item["path"]), int(item["bytes"])) for item in files]
    folder = next((path.parent for path, _ in paths if path.suffix == suffix), None)
    return {path.name: size for path, size in paths if path.parent == folder}


def cost_view(documents: Documents) -> dict[str, Any]:
    """The costs of a probe as picture and table, or the commands that measure them."""
    probe, model = documents.probe, shlex.quote(str(documents.manifest["source"]["model"]))
    payloads = [payload for item in documents.checks["containers"] for payload in item["payloads"]]
    bits = [payload["bits_per_weight"] for payload in payloads if payload["band_rows"] is None]
    if probe is not None and (wide := draw_costs(probe, sorted(set(bits)), WIDE)) is not None:
        text = probe["evaluation"]
        words = f"The table alone quantized, in the float model; {text_words(text)}. Bars are standard errors."
        if any(entry["measured"]["both"]["kl"]["value"] == 0 for entry in probe["schemes"]):
            words += " What costs nothing has no place on a logarithmic axis; the table has it."
        if not same_text(text, documents.manifest["evaluation"]):
            words += " This is not the text of the runtimes below."
        return {
            "wide": wide,
            "narrow": draw_costs(probe, sorted(set(bits)), NARROW),
            "words": words,
            "header": ("scheme", "bits/weight", *(f"KL, {role}" for role in _ROLES)),
            "rows": [
                (
                    entry["scheme"],
                    f"{entry['bits_per_weight']:.2f}",
                    *(plus_minus(entry["measured"][role]["kl"], 5) for role in _ROLES),
                )
                for entry in probe["schemes"]
            ],
        }
    probing = f"tieq probe {model} --effort {documents.manifest['effort']} --out PROBE"
    return {"commands": f"{probing}\ntieq report FOLDER --beside PROBE/probe.json"}


def size_view(documents: Documents) -> dict[str, Any]:
    """The picture of sizes against KL and the table of its points."""
    peers = peer_points(documents.manifest)
    points = [*own_points(documents.checks), *peers, *documents.beside]
    drawn = [Point(p.name, p.size, p.kl["value"], p.kl["standard_error"], p.kind) for p in points]
    rows = [
        (
            str(index),
            point.name,
            point.scheme,
            megabytes(point.size),
            plus_minus(point.kl, 4),
            "" if point.top1 is None else plus_minus(point.top1, 3),
            point.runtime,
        )
        for index, point in enumerate(points, 1)
    ]
    header = ("no.", "file", "scheme", "size", "KL (nats/token)", "top-1", "runtime")
    notes = []
    if points and not peers:
        alone = "" if documents.beside else ", so this export stands alone"
        notes.append(f"No peer's file of this model was measured on this text{alone}.")
    commands = list(dict.fromkeys(point.command for point in points if point.command))
    return {
        "wide": draw_sizes(drawn, WIDE),
        "narrow": draw_sizes(drawn, NARROW),
        "header": header,
        "rows": rows,
        "notes": notes,
        "commands": commands,
        "kinds": [(kind, said) for kind, said in _KINDS.items() if any(point.kind == kind for point in points)],
    }
