"""What each ingredient of the table's solver is worth: KL by role, seconds and peak memory, one row a variant.

    python -m benchmarks.ablation smollm2-135m --calibration valid.txt --text test.txt --out results.json

Only the table is quantized; the float model computes everything else. The evaluation slice is the first 200,000
characters of each text, tokenized in one go, cut into rows of 256 tokens, each with BOS where the model has one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tieq import text
from tieq.bands import encode_bands
from tieq.calibrate import Statistics
from tieq.codecs.schemes import SCHEMES, dequantize, unpack_codes
from tieq.encoding import round_trip
from tieq.metrics import summarize
from tieq.plan import decide
from tieq.prepare import Job, prepare
from tieq.probe import Case, RoleRuns
from tieq.recipe import BandWish, Precision, Recipe, Sampling
from tieq.records import Decision
from tieq.report.manifest import versions
from tieq.sampled import allowed_ids, calibrate_job, calibration_request
from tieq.source.reference import load_model
from tieq.source.role_runs import role_tables
from tieq.source.tokenizer import TextTokenizer

_CHARACTERS = 200_000
Table = NDArray[np.float32]
Make = Callable[[], tuple[Table, float]]


def main() -> None:
    arguments = _arguments()
    recipe = Recipe(effort="best", calibration=Sampling(sequences=arguments.calibration_sequences, length=256))
    job = prepare(arguments.model, recipe, ("onnx",))
    corpus = _calibration(arguments.calibration)
    wanted = calibration_request(job, corpus)
    assert wanted is not None
    reference = load_model(job.source, tied=job.graph.tied, table=job.table)
    begun = time.perf_counter()
    statistics = calibrate_job(job, wanted, lambda: reference, full=True).statistics
    calibration_seconds = time.perf_counter() - begun
    table, _ = role_tables(reference)
    allowed = allowed_ids(job.tokenizer, job.graph.rows)
    assert job.tokenizer is not None
    evaluations = {
        name: RoleRuns(reference, peer_slice(content, job.tokenizer, arguments.sequences), allowed)
        for name, content in _evaluation(arguments.text).items()
    }
    rows: list[dict[str, object]] = []
    document = {
        "model": {"label": job.source.label, "origin": job.source.origin, "fingerprint": job.source.fingerprint()},
        "calibration": {"text": corpus.description, "sequences": arguments.calibration_sequences,
                        "seconds": calibration_seconds},
        "slice": f"first {_CHARACTERS} characters, {arguments.sequences} x 256 tokens",
        "versions": versions("numba"),
        "rows": rows,
    }  # fmt: skip
    for name, make in _variants(job, table, statistics, recipe).items():
        if arguments.only and not any(re.search(part, name) for part in arguments.only):
            continue
        _reset_peak()
        before = _peak()
        begun = time.perf_counter()
        made, bits = make()
        seconds = time.perf_counter() - begun
        row = {"variant": name, "bits": bits, "seconds": seconds, "peak_over_table": (_peak() - before) / table.nbytes}
        for domain, runs in evaluations.items():
            looked_up = runs.look_up(made)
            cases = {"lookup": Case(looked_up), "logits": Case(None, made), "both": Case(looked_up, made)}
            row[domain] = {role: dataclasses.asdict(summarize(s)) for role, s in runs.score(cases).items()}
        rows.append(row)
        print(_line(row), flush=True)
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.ablation", description=__doc__)
    parser.add_argument("model")
    parser.add_argument(
        "--calibration",
        action="append",
        default=[],
        help="text file or default:code; default: all of the default mixture",
    )
    parser.add_argument(
        "--text", action="append", default=[], help="text file or default:code; default: the default text"
    )
    parser.add_argument("--calibration-sequences", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--only", action="append", default=[], help="variants whose name matches this expression")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def _calibration(names: list[str]) -> text.Corpus:
    if not names:
        return text.default_corpus(text.CALIBRATION)
    domains = _named(names, text.CALIBRATION)
    return text.Corpus(domains, f"{', '.join(domains)} (calibration parts)")


def _evaluation(names: list[str]) -> dict[str, str]:
    return _named(names, text.EVALUATION) if names else text.default_corpus(text.EVALUATION).domains


def _named(names: list[str], part: str) -> dict[str, str]:
    """Texts by name: files, and ``default:code`` for a domain of the default text's part."""
    default = text.default_corpus(part).domains
    return {
        Path(name).name: default[name.removeprefix("default:")]
        if name.startswith("default:")
        else Path(name).read_text(encoding="utf-8")
        for name in names
    }


def peer_slice(content: str, tokenizer: TextTokenizer, sequences: int, length: int = 256) -> text.Sequences:
    """Rows of consecutive tokens, as the peers' figures were measured."""
    bos = [] if tokenizer.bos is None else [tokenizer.bos]
    step = length - len(bos)
    ids = tokenizer.encode(content[:_CHARACTERS])[: sequences * step]
    rows = [bos + list(ids[start : start + step]) for start in range(0, sequences * step, step)]
    return text.Sequences(np.array(rows, dtype=np.int64), ("text",) * sequences, bool(bos))


def _variants(job: Job, table: Table, statistics: Statistics, recipe: Recipe) -> dict[str, Make]:
    base = job.plan.tables[0]
    known = statistics.table
    assert known is not None
    both, logits = known.of("table"), known.of("logits")
    diagonal = statistics.second_moments[job.parts.logits]
    joint_diagonal = np.ascontiguousarray(both.diagonal())

    def one(scheme: str, solver: str, cost: NDArray[np.float32] | None) -> Make:
        def make() -> tuple[Table, float]:
            decision = decide(base, Precision(scheme=scheme), recipe, ("gguf",))  # type: ignore[arg-type]
            chosen = dataclasses.replace(decision, solver=solver if scheme in SCHEMES else decision.solver)
            if scheme not in SCHEMES and solver != "hessian":
                chosen = dataclasses.replace(chosen, solver="ggml")
            return round_trip(chosen, table, cost), decision.bits_per_weight

        return make

    def banded(scheme: str, *bands: tuple[float, str]) -> Make:
        def make() -> tuple[Table, float]:
            wishes = tuple(BandWish(share=share, scheme=residual) for share, residual in bands)  # type: ignore[arg-type]
            decision = decide(base, Precision(scheme=scheme, bands=wishes), recipe, ("onnx",))  # type: ignore[arg-type]
            return _refined(decision, table, statistics, both), decision.total_bits_per_weight

        return make

    return {
        "nearest (llama.cpp Q4_0)": one("q4_0", "nearest", None),
        "scale search, equal weights": one("q4_0", "scale-search", None),
        "scale search, second moments": one("q4_0", "scale-search", diagonal),
        "scale search, joint diagonal": one("q4_0", "scale-search", joint_diagonal),
        "llama.cpp IQ4_NL, second moments": one("iq4_nl", "ggml", diagonal),
        "scale search, second moments, Q5_0": one("q5_0", "scale-search", diagonal),
        "full cost, logits role only": one("q4_0", "hessian", logits),
        "full cost, lookup role only": one("q4_0", "hessian", known.of("lookup")),
        "full cost, both roles": one("q4_0", "hessian", both),
        "full cost, both roles, Q2_0": one("q2_0", "hessian", both),
        "full cost, both roles, IQ4_NL": one("iq4_nl", "hessian", both),
        "full cost, both roles, Q4_1": one("q4_1", "hessian", both),
        "full cost, both roles, Q5_0": one("q5_0", "hessian", both),
        "full cost, both roles, Q5_1": one("q5_1", "hessian", both),
        "full cost, both roles, Q8_0": one("q8_0", "hessian", both),
        "bands 4.6 bits: 2.2 % q4_0": banded("q4_0", (0.022, "q4_0")),
        "bands 4.6 bits: 4.4 % q2_0": banded("q4_0", (0.044, "q2_0")),
        "bands 4.6 bits: 1 % q4_0, 2.4 % q2_0": banded("q4_0", (0.01, "q4_0"), (0.024, "q2_0")),
        "bands 4.7 bits: 4.4 % q4_0": banded("q4_0", (0.044, "q4_0")),
        "bands 4.7 bits: 8.8 % q2_0": banded("q4_0", (0.088, "q2_0")),
        "bands 4.7 bits: 2.2 % q4_0, 4.3 % q2_0": banded("q4_0", (0.022, "q4_0"), (0.043, "q2_0")),
        "bands 4.7 bits: 3 % q4_0, 2.7 % q2_0": banded("q4_0", (0.03, "q4_0"), (0.027, "q2_0")),
        "bands 4.7 bits: 1.5 % q4_0, 5.8 % q2_0": banded("q4_0", (0.015, "q4_0"), (0.058, "q2_0")),
    }


def _refined(decision: Decision, table: Table, statistics: Statistics, cost: NDArray[np.float32]) -> Table:
    base = round_trip(decision, table, cost)
    tensors = encode_bands(decision, table, base, statistics, cost)
    for number, band in enumerate(decision.bands):
        scheme = SCHEMES[band.scheme]
        prefix = f"{decision.name}.band{number}"
        codes = unpack_codes(tensors[f"{prefix}.codes"], scheme.bits)
        base[tensors[f"{prefix}.rows"]] += dequantize(codes, tensors[f"{prefix}.scales"], scheme)
    return base


def _reset_peak() -> None:
    """Forget the process's peak memory (Linux, proc(5): clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak() -> int:
    """Peak resident bytes since the last reset."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def _line(row: dict[str, object]) -> str:
    shown = [f"{row['variant']:42} {row['bits']:5.2f} bits {row['seconds']:6.1f} s {row['peak_over_table']:5.2f} x"]
    for domain, found in row.items():
        if isinstance(found, dict):
            kls = " / ".join(f"{found[role]['kl']['value']:.4f}" for role in ("lookup", "logits", "both"))
            shown.append(f"{domain}: {kls}, top-1 {found['both']['top1']['value']:.3f}")
    return "  ".join(shown)


if __name__ == "__main__":
    main()
