"""Run container files in their runtimes on the same tokens as the reference, and score them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tieq.errors import MissingRuntimeError, TieqError
from tieq.metrics import Estimate, Scores, SequenceScore, exp, mean, score_sequence, summarize
from tieq.progress import counter
from tieq.runtimes import runtime, runtimes
from tieq.runtimes.base import Session
from tieq.text import Sequences

Reference = Callable[[NDArray[np.int64]], NDArray[np.float32]]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Scores of one runtime in one mode on one file; without a reference only its own perplexity.

    ``kl_to_first`` is KL(``first`` || this) in nats per token: the same quantized weights in another runtime or
    mode, so it holds no quantization error, only what the runtime or a wrong graph adds. A file with row bands has
    other weights than one without, so each kind has its own first. ``against_input`` compares with the file that this
    one was made from, in the same runtime and mode.
    """

    container: str
    runtime: str
    version: str
    mode: str
    perplexity: float
    scores: Scores | None
    by_domain: dict[str, Scores]
    first: str | None
    kl_to_first: Estimate | None
    against_input: Scores | None = None

    @property
    def subject(self) -> str:
        """Name of the runtime and mode."""
        return _subject(self.runtime, self.mode)


@dataclasses.dataclass
class _Running:
    """A session and what it has scored so far; ``banded`` tells whether its table has row bands."""

    container: str
    runtime: str
    version: str
    mode: str
    session: Session
    banded: bool
    scores: list[tuple[str, SequenceScore]] = dataclasses.field(default_factory=list)
    against_input: list[SequenceScore] = dataclasses.field(default_factory=list)


def measure(
    files: list[Path],
    sequences: Sequences,
    allowed: NDArray[np.bool_],
    reference: Reference | None,
    wanted: list[str] | None = None,
    input_file: Path | None = None,
    banded: frozenset[Path] = frozenset(),
) -> tuple[list[Measurement], list[Measurement]]:
    """Run every file in every runtime that takes it.

    Args:
        files: container files.
        sequences: tokens to run.
        allowed: ``[vocab]``, ids that the tokenizer can emit.
        reference: logits of the float model for a sequence, or None.
        wanted: runtime names; None for every runtime that takes one of the files.
        input_file: a file of the same container that they were made from; it is run beside them.
        banded: files whose table has row bands.

    Returns:
        What was measured on the files, and on the input file.

    Raises:
        MissingRuntimeError: if a wanted or needed runtime is not installed.
        TieqError: if a wanted runtime takes none of the files.
    """
    with contextlib.ExitStack() as stack:
        running = _open_all(stack, files, wanted, banded)
        used = sorted({item.runtime for item in running})
        inputs = [] if input_file is None else _open_all(stack, [input_file], used, banded)
        everything = [*running, *inputs]
        groups = [group for key in (False, True) if (group := [item for item in running if item.banded is key])]
        groups += [[item] for item in inputs]
        with counter(f"validate: {', '.join(used)}", len(everything) * len(sequences.ids), "sequences") as advance:
            for ids, domain in zip(sequences.ids, sequences.domains, strict=True):
                expected = None if reference is None else reference(ids)
                found = {}
                for item in everything:
                    found[id(item)] = _logits(item, ids)
                    advance(1)
                for group in groups:
                    candidates = [found[id(item)] for item in group]
                    for item, score in zip(group, score_sequence(ids, expected, candidates, allowed), strict=True):
                        item.scores.append((domain, score))
                for original in inputs:
                    ours = [i for i in running if (i.runtime, i.mode) == (original.runtime, original.mode)]
                    scored = score_sequence(ids, found[id(original)], [found[id(item)] for item in ours], allowed)
                    for item, score in zip(ours, scored, strict=True):
                        item.against_input.append(score)
        first = {group[0].banded: group[0] for group in groups[: len(groups) - len(inputs)]}
        measured = [_finish(item, first[item.banded], reference is not None) for item in running]
        return measured, [_finish(item, item, reference is not None) for item in inputs]


def _open_all(
    stack: contextlib.ExitStack, files: list[Path], wanted: list[str] | None, banded: frozenset[Path]
) -> list[_Running]:
    running = []
    names = list(runtimes()) if wanted is None else list(dict.fromkeys(wanted))
    for name in names:
        adapter = runtime(name)
        mine = [path for path in files if path.suffix in adapter.suffixes]
        if not mine and wanted is None:
            continue
        if not mine:
            raise TieqError(
                f"runs {' and '.join(adapter.suffixes)} files, and there is none.",
                where=f"--runtime {name}",
                todo="Leave it out.",
            )
        state = adapter.availability()
        if not state.ready:
            raise MissingRuntimeError("is not installed.", where=f"runtime {name}", todo=f"Get it: {state.how}.")
        for path in mine:
            for mode, opened in adapter.modes(path):
                session = stack.enter_context(opened)
                running.append(_Running(path.suffix[1:], name, state.version, mode, session, path in banded))
    return running


def _logits(item: _Running, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    found = item.session.logits(ids)
    if not np.isfinite(found).all():
        raise TieqError("the runtime returned logits that are NaN or infinite.", where=item.runtime)
    return found


def _finish(item: _Running, first: _Running, referenced: bool) -> Measurement:
    scores = [score for _, score in item.scores]
    domains = list(dict.fromkeys(domain for domain, _ in item.scores)) if referenced else []
    predictions = sum(score.predictions for score in scores)
    return Measurement(
        container=item.container,
        runtime=item.runtime,
        version=item.version,
        mode=item.mode,
        perplexity=exp(sum(score.nll for score in scores) / predictions),
        scores=summarize(scores) if referenced else None,
        by_domain={name: summarize([s for domain, s in item.scores if domain == name]) for name in domains},
        first=None if item is first else _subject(first.runtime, first.mode),
        kl_to_first=None if item is first else mean([score.kl_to_first / score.positions for score in scores]),
        against_input=summarize(item.against_input) if item.against_input else None,
    )


def _subject(runtime_name: str, mode: str) -> str:
    return f"{runtime_name}, {mode}" if mode else runtime_name
