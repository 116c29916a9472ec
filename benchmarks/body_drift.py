"""What correcting the drift of the body's inputs is worth: KL of the whole model for several shares of it.

    python -m benchmarks.body_drift smollm2-135m --calibration valid.txt --text test.txt --share 0 --share 0.5

Everything is Q4_0 with `--effort best`; the float model's code runs the decoded weights on the slice of
`benchmarks.ablation`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import tieq.sequential
from benchmarks.ablation.__main__ import peer_slice
from tieq import text
from tieq.pipeline import BODY_TOKENS
from tieq.prepare import prepare
from tieq.probe import whole_costs
from tieq.quantize import BodyRun, QuantizedCheckpoint, quantize
from tieq.recipe import Recipe
from tieq.sampled import allowed_ids, calibrate_job, calibration_request
from tieq.source.reference import load_model


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.body_drift", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--calibration", action="append", default=[])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--share", type=float, action="append", required=True)
    parser.add_argument("--tokens", type=int, default=BODY_TOKENS)
    arguments = parser.parse_args()
    job = prepare(arguments.model, Recipe(effort="best"), ("onnx",))
    assert job.tokenizer is not None
    wanted = calibration_request(job, text.calibration_corpus(arguments.calibration))
    assert wanted is not None
    reference = load_model(job.source, tied=job.graph.tied, table=job.table)
    found = calibrate_job(job, wanted, lambda: reference)
    sequences = peer_slice(arguments.text.read_text(encoding="utf-8"), job.tokenizer, 8)
    allowed = allowed_ids(job.tokenizer, job.graph.rows)
    for share in arguments.share:
        tieq.sequential._CORRECTED = share
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "quantized.safetensors"
            begun = time.perf_counter()
            body = BodyRun(reference, found.sequences.spread(arguments.tokens))
            quantize(job.source, job.plan, job.floats, path, found.statistics, job.parts.logits, body)
            seconds = time.perf_counter() - begun
            checkpoint = QuantizedCheckpoint(path)
            tables = [checkpoint.decode(decision.name) for decision in job.plan.tables]
            decoded = (
                (d.name, d.transposed, checkpoint.decode(d.name)) for d in job.plan.decisions if d.role == "body"
            )
            costs = whole_costs(reference, tables[0], tables[-1], decoded, sequences, allowed)
        print(f"a = {share}: table {costs['table']:.4f}, whole {costs['whole']:.4f}, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
