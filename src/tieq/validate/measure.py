"""Run container files in their runtimes on the same tokens as the reference, and score them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tieq.errors import TieqError
from tieq.metrics import Estimate, Scores, SequenceScore, exp, mean, score_sequence, summarize
from tieq.progress import counter, stage
from tieq.runtimes import ALL, check_ready, runtime, runtimes
from tieq.runtimes.base import Decoder, Runtime, Session
from tieq.runtimes.process import RemoteSession
from tieq.runtimes.watchdog import watched
from tieq.text import Sequences

Reference = Callable[[NDArray[np.int64]], NDArray[np.float32]]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Scores of one runtime in one mode on one file; without a reference only its own perplexity.

    ``kl_to_first`` is KL(``first`` || this) in nats per token: the same quantized weights in another runtime or
    mode, so it holds no quantization error, only what the runtime or a wrong graph adds. A file with row bands has
    other weights than one without, so each kind has its own first. ``against_input`` compares with the file that this
    one was made from, in the same runtime and mode. ``tokens`` counts what a slow runtime ran, the heads of the
    sequences; None where it ran all. ``bound_to_first`` is the runtime's own bound on ``kl_to_first``, None for that of
    the gates.
    ``decode_rate`` is in tokens a second, over rounds, None where it was not measured.
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
    platform: str = ""
    tokens: int | None = None
    bound_to_first: float | None = None
    decode_rate: Estimate | None = None

    @property
    def subject(self) -> str:
        """Name of the runtime and mode."""
        return _subject(self.runtime, self.mode)


# Seconds for a sequence, for each of its tokens, and for loading; large models on old machines take a tenth of that.
_LIMIT, _LIMIT_PER_TOKEN, _LIMIT_OF_LOADING = 120.0, 2.0, 900.0
# Decode rate: tokens of the prompt, steps of a round, rounds.
_PROMPT, _STEPS, _ROUNDS = 64, 32, 5


@dataclasses.dataclass
class _Run:
    """A file in a runtime in a mode, not yet opened, and what it has scored; ``weights`` names its quantization."""

    path: Path
    adapter: Runtime
    version: str
    mode: str
    opened: AbstractContextManager[Session]
    weights: str
    scores: list[tuple[str, SequenceScore]] = dataclasses.field(default_factory=list)
    against_input: list[SequenceScore] = dataclasses.field(default_factory=list)
    decode_rate: Estimate | None = None

    @property
    def subject(self) -> str:
        return _subject(self.adapter.name, self.mode)


@dataclasses.dataclass
class _Heads:
    """Logits of the beginning of each sequence: the reference's, and by weights those of the first runtime."""

    expected: list[NDArray[np.float32] | None] = dataclasses.field(default_factory=list)
    first: dict[str, list[NDArray[np.float32]]] = dataclasses.field(default_factory=dict)


def measure(
    files: list[Path],
    sequences: Sequences,
    allowed: NDArray[np.bool_],
    reference: Reference | None,
    wanted: list[str] | None = None,
    input_file: Path | None = None,
    weights: dict[Path, str] | None = None,
    *,
    decode: bool = False,
) -> tuple[list[Measurement], list[Measurement]]:
    """Run every file in every runtime that takes it: the fast ones side by side, then the slow ones one by one.

    Args:
        files: container files.
        sequences: tokens to run.
        allowed: ``[vocab]``, ids that the tokenizer can emit.
        reference: logits of the float model for a sequence, or None.
        wanted: runtime names; None for every default runtime that takes one of the files.
        input_file: a file of the same container that they were made from; it is run beside them.
        weights: a name for the quantized values of each file, by which runtimes are compared; one for all if None.
        decode: whether the decode rate is measured too, in the fast runtimes.

    Returns:
        What was measured on the files, and on the input file.

    Raises:
        MissingRuntimeError: if a wanted or needed runtime is not installed.
        TieqError: if a wanted runtime takes none of the files.
    """
    names = weights or {}
    runs = find_runs(files, wanted, names)
    fast = [run for run in runs if run.adapter.tokens is None]
    slow = [run for run in runs if run.adapter.tokens is not None]
    used = [run.adapter.name for run in fast]
    inputs = [] if input_file is None or not used else find_runs([input_file], sorted(set(used)), names)
    head = max((_head(run, sequences) for run in slow), default=0)
    heads = _run_together(fast, inputs, sequences, allowed, reference, head, decode=decode)
    for run in slow:
        _run_alone(run, sequences, allowed, heads)
    first: dict[str, _Run] = {}
    for run in [*fast, *slow]:
        first.setdefault(run.weights, run)
    measured = [_finish(run, first[run.weights], reference is not None) for run in runs]
    return measured, [_finish(run, run, reference is not None) for run in inputs]


def find_runs(files: list[Path], wanted: list[str] | None, weights: dict[Path, str]) -> list[_Run]:
    """Every file in every wanted runtime that takes it, in each of its modes; nothing is opened.

    Raises:
        MissingRuntimeError: if a wanted or needed runtime is not installed.
        TieqError: if a wanted runtime takes none of the files.
    """
    chosen = [name for name, each in runtimes().items() if each.default] if wanted is None else wanted
    everything = ALL in chosen
    names = list(runtimes()) if everything else list(dict.fromkeys([*_beside(files, chosen), *chosen]))
    runs = []
    for name in names:
        adapter = runtime(name)
        mine = [path for path in files if path.suffix in adapter.suffixes]
        if not mine and (wanted is None or everything):
            continue
        if not mine:
            raise TieqError(
                f"runs {' and '.join(adapter.suffixes)} files, and there is none.",
                where=f"--runtime {name}",
                todo="Leave it out.",
            )
        check_ready([name])
        state = adapter.availability()
        for path in mine:
            for mode, opened in adapter.modes(path):
                runs.append(_Run(path, adapter, state.version, mode, opened, weights.get(path, "")))
    return runs


def _beside(files: list[Path], chosen: list[str]) -> list[str]:
    """Default runtimes of the files that slow ones were asked for: what those are compared with."""
    slow = [suffix for name in chosen if (each := runtime(name)).tokens is not None for suffix in each.suffixes]
    wanted = {path.suffix for path in files} & set(slow)
    return [name for name, each in runtimes().items() if each.default and wanted & set(each.suffixes)]


def _head(run: _Run, sequences: Sequences) -> int:
    """Tokens of each sequence that a slow runtime runs."""
    assert run.adapter.tokens is not None
    return max(2, min(run.adapter.tokens // len(sequences.ids), max(map(len, sequences.ids))))


def _run_together(
    runs: list[_Run],
    inputs: list[_Run],
    sequences: Sequences,
    allowed: NDArray[np.bool_],
    reference: Reference | None,
    head: int,
    *,
    decode: bool,
) -> _Heads:
    heads = _Heads()
    groups = [[run for run in runs if run.weights == key] for key in dict.fromkeys(run.weights for run in runs)]
    everything = [*runs, *inputs]
    title = f"validate: {', '.join(sorted({run.adapter.name for run in runs}) or ['reference model'])}"
    with contextlib.ExitStack() as stack:
        sessions = {}
        for run in everything:
            with watched(f"{run.subject}, loading", _LIMIT_OF_LOADING):
                sessions[id(run)] = stack.enter_context(run.opened)
        advance = stack.enter_context(counter(title, max(len(everything), 1) * len(sequences.ids), "sequences"))
        for ids, domain in zip(sequences.ids, sequences.domains, strict=True):
            expected = None if reference is None else reference(ids)
            heads.expected.append(None if expected is None or not head else expected[:head].copy())
            found = {}
            for run in everything:
                found[id(run)] = _logits(run, sessions[id(run)], ids)
                advance(1)
            if not everything:
                advance(1)
            for group in [*groups, *([run] for run in inputs)]:
                candidates = [found[id(run)] for run in group]
                for run, score in zip(group, score_sequence(ids, expected, candidates, allowed), strict=True):
                    run.scores.append((domain, score))
            for group in groups if head else []:
                heads.first.setdefault(group[0].weights, []).append(found[id(group[0])][:head].copy())
            for original in inputs:
                ours = [run for run in runs if run.subject == original.subject]
                scored = score_sequence(ids, found[id(original)], [found[id(run)] for run in ours], allowed)
                for run, score in zip(ours, scored, strict=True):
                    run.against_input.append(score)
        for run in runs if decode else []:
            run.decode_rate = _decode_rate(run, sessions[id(run)], sequences.ids[0])
    return heads


def _decode_rate(run: _Run, session: Session, ids: NDArray[np.int64]) -> Estimate | None:
    """Tokens a second of single-token steps after a prompt, None where the adapter cannot step."""
    if not isinstance(session, Decoder):
        return None
    prompt = ids[:_PROMPT]
    with stage(f"decode rate: {run.subject}"), _limit(run, session, (len(prompt) + _STEPS) * (_ROUNDS + 1)):
        session.decode(prompt, 2)  # the first steps allocate
        return mean([_STEPS / session.decode(prompt, _STEPS) for _ in range(_ROUNDS)])


def _run_alone(run: _Run, sequences: Sequences, allowed: NDArray[np.bool_], heads: _Heads) -> None:
    """Run the heads of the sequences; the first run of its weights becomes what later ones are compared with."""
    head = _head(run, sequences)
    is_first = run.weights not in heads.first
    with (
        stage(f"validate: start {run.subject}"),
        contextlib.ExitStack() as opening,
    ):
        session = opening.enter_context(run.opened)
        keep = opening.pop_all()
    with keep, counter(f"validate: {run.subject}", len(sequences.ids), "sequences") as advance:
        for at, (ids, domain) in enumerate(zip(sequences.ids, sequences.domains, strict=True)):
            begin = ids[:head]
            found = _logits(run, session, begin)
            if is_first:
                heads.first.setdefault(run.weights, []).append(found)
            expected = heads.expected[at]
            cut = None if expected is None else expected[: len(begin)]
            candidates = [heads.first[run.weights][at][: len(begin)], found]
            run.scores.append((domain, score_sequence(begin, cut, candidates, allowed)[1]))
            advance(1)


def _logits(run: _Run, session: Session, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    with _limit(run, session, len(ids)):
        found = session.logits(ids)
    if not np.isfinite(found).all():
        raise TieqError("the runtime returned logits that are NaN or infinite.", where=run.adapter.name)
    return found


def _limit(run: _Run, session: Session, tokens: int) -> contextlib.AbstractContextManager[None]:
    """A time limit for sessions in this process; those in others have their own."""
    if isinstance(session, RemoteSession):
        return contextlib.nullcontext()
    return watched(run.subject, _LIMIT + _LIMIT_PER_TOKEN * tokens)


def _finish(run: _Run, first: _Run, referenced: bool) -> Measurement:
    scores = [score for _, score in run.scores]
    domains = list(dict.fromkeys(domain for domain, _ in run.scores)) if referenced else []
    predictions = sum(score.predictions for score in scores)
    return Measurement(
        container=run.path.suffix[1:],
        runtime=run.adapter.name,
        version=run.version,
        mode=run.mode,
        perplexity=exp(sum(score.nll for score in scores) / predictions),
        scores=summarize(scores) if referenced else None,
        by_domain={name: summarize([s for domain, s in run.scores if domain == name]) for name in domains},
        first=None if run is first else first.subject,
        kl_to_first=None if run is first else mean([score.kl_to_first / score.positions for score in scores]),
        against_input=summarize(run.against_input) if run.against_input else None,
        platform=run.adapter.platform,
        tokens=None if run.adapter.tokens is None else sum(score.positions for score in scores),
        bound_to_first=run.adapter.bound(run.mode, first.subject),
        decode_rate=run.decode_rate,
    )


def _subject(runtime_name: str, mode: str) -> str:
    return f"{runtime_name}, {mode}" if mode else runtime_name
