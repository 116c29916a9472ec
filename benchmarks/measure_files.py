"""Size and quality of container files in their runtimes, ours and other tools', on the peers' slice of a text.

    python -m benchmarks.measure_files smollm2-135m test.txt a.gguf b.onnx --out results.json

The slice is that of `benchmarks.ablation`; the reference is the float model.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from benchmarks.ablation.__main__ import peer_slice
from tieq.prepare import prepare
from tieq.recipe import Recipe
from tieq.report.manifest import versions
from tieq.sampled import allowed_ids
from tieq.source.reference import load_model
from tieq.validate.measure import measure
from tieq.validate.structure import prove


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.measure_files", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    job = prepare(arguments.model, Recipe(), ("onnx",))
    assert job.tokenizer is not None
    content = arguments.text.read_text(encoding="utf-8")
    sequences = peer_slice(content, job.tokenizer, arguments.sequences)
    reference = load_model(job.source, tied=job.graph.tied, table=job.table)
    rows = []
    for file in arguments.files:
        found, _ = measure([file], sequences, allowed_ids(job.tokenizer, job.graph.rows), reference.logits)
        structure = prove(file)
        for item in found:
            assert item.scores is not None
            rows.append({"file": file.name, "bytes": structure.file_bytes, "runtime": item.subject,
                         "scores": dataclasses.asdict(item.scores)})  # fmt: skip
            kl, top = item.scores.kl, item.scores.top1
            print(
                f"{file.parent.name}/{file.name:24} {structure.file_bytes / 1e6:7.2f} MB  {item.subject:34} "
                f"KL {kl.value:.4f} +- {kl.standard_error or 0:.4f}  top-1 {top.value:.3f}  "
                f"perplexity ratio {item.scores.perplexity_ratio.value:.3f}",
                flush=True,
            )
    if arguments.out is not None:
        document = {"text": arguments.text.name, "versions": versions("numba"), "rows": rows}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
