from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tieq.errors import RefusedError
from tieq.records import Role, TieArithmetic, TieGraph, Verdict
from tieq.source.checkpoint import CheckpointSource
from tieq.source.gguf_source import GgufSource
from tieq.source.tie import arithmetic, compare_copies, refuse_unexportable, table_name, tie_graph

Maker = Callable[..., Path]
TABLE, HEAD, BODY = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight"
ROWS, COLUMNS = 10, 4


def table(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((ROWS, COLUMNS)).astype(np.float32)


def one_row_off() -> np.ndarray:
    changed = table()
    changed[7, 2] += 0.5
    return changed


@pytest.fixture
def graph(checkpoint: Maker) -> Callable[..., TieGraph]:
    """The tie graph of a checkpoint with these role tensors and this flag."""

    def make(
        lookup: np.ndarray | None, head: np.ndarray | None, flag: bool | None, *, tie: bool | None = None, **config: Any
    ) -> TieGraph:
        stored = {name: values for name, values in ((TABLE, lookup), (HEAD, head)) if values is not None}
        settings = {"vocab_size": ROWS, "hidden_size": COLUMNS, **config}
        if flag is not None:
            settings["tie_word_embeddings"] = flag
        return tie_graph(CheckpointSource(checkpoint({**stored, BODY: np.ones((6, 4))}, **settings)), tie=tie)

    return make


# Verdict and tied for every combination of what is stored, the flag, and the architecture's default.
@pytest.mark.parametrize(
    ("lookup", "head", "flag", "model_type", "verdict", "tied"),
    [
        (table(), None, True, "llama", Verdict.SHARED, True),
        (table(), None, True, "gemma3_text", Verdict.SHARED, True),
        (table(), None, None, "gemma3_text", Verdict.SHARED, True),
        (table(), None, None, "llama", Verdict.HEAD_MISSING, False),
        (table(), None, False, "llama", Verdict.HEAD_MISSING, False),
        (table(), None, False, "gemma3_text", Verdict.HEAD_MISSING, False),
        (None, table(), True, "llama", Verdict.SHARED, True),
        (None, table(), None, "gemma3_text", Verdict.SHARED, True),
        (None, table(), None, "llama", Verdict.LOOKUP_MISSING, False),
        (None, table(), False, "gemma3_text", Verdict.LOOKUP_MISSING, False),
        (table(), table(), True, "llama", Verdict.EQUAL_COPIES, True),
        (table(), table(), None, "gemma3_text", Verdict.EQUAL_COPIES, True),
        (table(), table(), None, "llama", Verdict.EQUAL_COPIES, False),
        (table(), table(), False, "llama", Verdict.EQUAL_COPIES, False),
        (table(), table(), False, "gemma3_text", Verdict.EQUAL_COPIES, False),
        (table(), one_row_off(), True, "llama", Verdict.DIFFERENT, False),
        (table(), one_row_off(), None, "gemma3_text", Verdict.DIFFERENT, False),
        (table(), one_row_off(), False, "llama", Verdict.DIFFERENT, False),
        (table(), table(1), True, "llama", Verdict.DIFFERENT, False),
        (table(), table(1), False, "llama", Verdict.DIFFERENT, False),
    ],
)
def test_bytes_decide_first_and_the_flag_second(
    lookup: np.ndarray | None,
    head: np.ndarray | None,
    flag: bool | None,
    model_type: str,
    verdict: Verdict,
    tied: bool,
    graph: Callable[..., TieGraph],
) -> None:
    found = graph(lookup, head, flag, model_type=model_type)
    assert (found.verdict, found.tied) == (verdict, tied)
    assert (found.flag, found.flag_default) == (flag, model_type == "gemma3_text")
    assert (found.lookup.tensor, found.logits.tensor) == (
        None if lookup is None else TABLE,
        None if head is None else HEAD,
    )
    assert (found.rows, found.columns) == (ROWS, COLUMNS)
    assert found.table == (HEAD if lookup is None else TABLE)
    assert (flag is None) == any("tie_word_embeddings is absent" in note for note in found.notes)


def test_a_null_flag_counts_as_absent(checkpoint: Maker) -> None:
    found = tie_graph(CheckpointSource(checkpoint({TABLE: table()}, tie_word_embeddings=None)))
    assert (found.flag, found.verdict) == (None, Verdict.HEAD_MISSING)


def test_one_differing_row_is_counted_and_measured(graph: Callable[..., TieGraph]) -> None:
    found = graph(table(), one_row_off(), True)
    assert found.difference is not None
    assert found.difference.rows == 1
    # The one difference as float32 holds it.
    gap = float(np.abs(table() - one_row_off()).max())
    assert found.difference.max_abs == gap
    # 2**-50: the sum of 40 squares in float64 and a square root.
    norm = float(np.linalg.norm(table().astype(np.float64)))
    assert found.difference.relative_rms == pytest.approx(gap / norm, rel=2.0**-50 * 40)
    assert any("the flag says tied, but 1 rows differ" in note for note in found.notes)


def test_all_differing_rows_are_counted(graph: Callable[..., TieGraph]) -> None:
    found = graph(table(), table(1), False)
    assert found.difference is not None
    assert found.difference.rows == ROWS
    assert found.notes[0].startswith("10 rows differ between the copies")


def test_copies_are_compared_in_chunks_to_the_last_row(checkpoint: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    last = table()
    last[-1, -1] += 1
    source = CheckpointSource(checkpoint({TABLE: table(), HEAD: last}))
    lookup, head = source.role_tensors()
    assert lookup is not None
    assert head is not None
    whole = compare_copies(source, lookup, head)
    assert whole.rows == 1
    for chunk in (1, 3, ROWS):
        monkeypatch.setattr("tieq.source.tie._CHUNK_ROWS", chunk)
        found = compare_copies(source, lookup, head)
        assert (found.rows, found.max_abs) == (whole.rows, whole.max_abs)
        # Sums of float64 squares in another order.
        assert found.relative_rms == pytest.approx(whole.relative_rms, rel=1e-14)


def test_equal_copies_say_what_sharing_saves(graph: Callable[..., TieGraph]) -> None:
    notes = graph(table(), table(), True).notes
    assert notes == (f"'{HEAD}' repeats '{TABLE}'; one table is exported and 0.0 MB are saved.",)


def test_zero_tables_are_equal_and_a_zero_against_a_filled_one_differs(graph: Callable[..., TieGraph]) -> None:
    zeros = np.zeros((ROWS, COLUMNS), np.float32)
    found = graph(zeros, zeros, True)
    assert (found.verdict, found.difference.relative_rms) == (Verdict.EQUAL_COPIES, 0.0)


def test_a_filled_head_over_a_zero_table_differs(graph: Callable[..., TieGraph]) -> None:
    found = graph(np.zeros((ROWS, COLUMNS), np.float32), table(), True)
    assert (found.verdict, found.difference.relative_rms) == (Verdict.DIFFERENT, 1.0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_copies_with_equal_bytes_are_equal_whatever_they_hold(value: float, graph: Callable[..., TieGraph]) -> None:
    broken = table()
    broken[3, 1] = value
    assert graph(broken, broken, True).verdict is Verdict.EQUAL_COPIES


# --tie and --untie


def test_asking_to_share_differing_copies_is_refused_with_the_count(graph: Callable[..., TieGraph]) -> None:
    with pytest.raises(RefusedError, match=r"were to share one table, but 1 rows differ .*without --tie"):
        graph(table(), one_row_off(), True, tie=True)


@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize("tie", [True, False])
def test_equal_copies_are_shared_or_not_as_asked(flag: bool | None, tie: bool, graph: Callable[..., TieGraph]) -> None:
    assert graph(table(), table(), flag, tie=tie).tied is tie


def test_not_sharing_differing_copies_is_what_happens_anyway(graph: Callable[..., TieGraph]) -> None:
    assert graph(table(), one_row_off(), True, tie=False).tied is False


def test_not_sharing_a_table_that_is_stored_once_is_not_ignored(graph: Callable[..., TieGraph]) -> None:
    try:
        found = graph(table(), None, True, tie=False)
    except RefusedError:
        return
    assert not found.tied


def test_the_note_on_equal_copies_follows_what_was_asked(graph: Callable[..., TieGraph]) -> None:
    found = graph(table(), table(), True, tie=False)
    assert not found.tied
    assert not any("one table is exported" in note for note in found.notes)


# What cannot be exported, and odd shapes


@pytest.mark.parametrize(
    ("lookup", "head", "missing"), [(table(), None, "logits head"), (None, table(), "lookup table")]
)
def test_a_role_without_a_tensor_is_refused_for_export(
    lookup: np.ndarray | None, head: np.ndarray | None, missing: str, checkpoint: Maker
) -> None:
    stored = {name: values for name, values in ((TABLE, lookup), (HEAD, head)) if values is not None}
    source = CheckpointSource(checkpoint(stored, tie_word_embeddings=False))
    found = tie_graph(source)
    assert any(f"the flag says untied, but no {missing} is stored" in note for note in found.notes)
    with pytest.raises(RefusedError, match=f"untied and its {missing} is not stored; a random one is never exported"):
        refuse_unexportable(source, found)


def test_exportable_graphs_pass(checkpoint: Maker) -> None:
    source = CheckpointSource(checkpoint({TABLE: table(), HEAD: table(1)}))
    refuse_unexportable(source, tie_graph(source))


def test_no_table_at_all_is_refused_with_the_names_looked_for(checkpoint: Maker) -> None:
    with pytest.raises(RefusedError, match=f"neither '{TABLE}' nor '{HEAD}' is stored"):
        tie_graph(CheckpointSource(checkpoint({BODY: table()})))


def test_tables_of_different_shapes_are_refused(graph: Callable[..., TieGraph]) -> None:
    with pytest.raises(RefusedError, match=rf"'{TABLE}' is \[10, 4\] but '{HEAD}' is \[9, 4\]"):
        graph(table(), table()[:9], True)


@pytest.mark.parametrize("shape", [(40,), (2, 5, 4)])
def test_a_table_that_is_no_matrix_is_refused(shape: tuple[int, ...], graph: Callable[..., TieGraph]) -> None:
    with pytest.raises(RefusedError, match="is no matrix"):
        graph(table().reshape(shape), None, True)


def test_rows_that_contradict_the_configuration_are_noted(graph: Callable[..., TieGraph]) -> None:
    found = graph(table(), None, True, vocab_size=8)
    assert found.rows == ROWS
    assert "the configuration says 8 rows, the table has 10; the table is right." in found.notes


def test_rows_that_agree_with_the_configuration_are_not_noted(graph: Callable[..., TieGraph]) -> None:
    assert graph(table(), None, True).notes == ()


def test_the_only_stored_head_is_noted_as_playing_both_roles(graph: Callable[..., TieGraph]) -> None:
    assert f"only the head '{HEAD}' is stored; it plays both roles." in graph(None, table(), True).notes


def test_scaling_around_the_roles_is_in_the_graph(graph: Callable[..., TieGraph]) -> None:
    found = graph(table(), None, None, model_type="gemma2", final_logit_softcapping=30.0)
    # sqrt(hidden_size) = sqrt(4)
    assert (found.lookup.role, found.lookup.multiplier) == (Role.LOOKUP, 2.0)
    assert (found.logits.role, found.logits.multiplier, found.logits.softcap) == (Role.LOGITS, 1.0, 30.0)


def test_the_graph_becomes_plain_json(graph: Callable[..., TieGraph]) -> None:
    import json

    found = json.loads(json.dumps(graph(table(), one_row_off(), True).to_json()))
    assert found["verdict"] == "stored twice, different"
    assert found["lookup"]["role"] == "lookup"
    assert found["difference"]["rows"] == 1


# Arithmetic


@pytest.mark.parametrize("stored", [(TABLE,), (HEAD,), (TABLE, HEAD)], ids=["lookup only", "head only", "stored twice"])
def test_the_arithmetic_of_tying_is_that_of_the_hand(stored: tuple[str, ...], checkpoint: Maker) -> None:
    # Table 10 x 4 = 40, body 6 x 4 + 3 = 27: tied 67, untied 107, saved 40 of 107.
    tensors = {name: table() for name in stored}
    tensors |= {BODY: np.ones((6, 4)), "model.norm.weight": np.ones(3)}
    source = CheckpointSource(checkpoint(tensors, tie_word_embeddings=True))
    found = arithmetic(source, tie_graph(source))
    assert found == TieArithmetic(table=40, body=27)
    assert (found.tied_total, found.untied_total, found.saved_share) == (67, 107, 40 / 107)


def test_a_published_model_has_its_published_number_of_parameters() -> None:
    # SmolLM2-135M: 49,152 x 576 in the table, 134,515,008 in all.
    found = TieArithmetic(49152 * 576, 134_515_008 - 49152 * 576)
    assert (found.table, found.tied_total, found.untied_total) == (28_311_552, 134_515_008, 162_826_560)
    assert round(found.saved_share, 4) == 0.1739


# GGUF: one matrix in two types

BIG = np.random.default_rng(2).standard_normal((64, 256)).astype(np.float32)


def gguf_graph(maker: Maker, lookup: tuple | None, head: tuple | None, **options: Any) -> tuple[GgufSource, TieGraph]:
    tensors = {n: t for n, t in (("token_embd.weight", lookup), ("output.weight", head)) if t is not None}
    source = GgufSource(maker(tensors, {"llama.embedding_length": 256}))
    return source, tie_graph(source, **options)


def test_a_gguf_file_with_one_table_is_shared(gguf_file: Maker) -> None:
    _, found = gguf_graph(gguf_file, (BIG, "q8_0"), None)
    assert (found.verdict, found.tied, found.flag) == (Verdict.SHARED, True, True)


def test_a_gguf_file_with_only_a_head_is_shared(gguf_file: Maker) -> None:
    source, found = gguf_graph(gguf_file, None, (BIG, "q8_0"))
    assert (found.verdict, found.tied, found.table) == (Verdict.SHARED, True, "output.weight")
    assert table_name(source, found) == HEAD


@pytest.mark.parametrize(
    ("first", "second"), [("q8_0", "q4_0"), ("q4_0", "q8_0"), ("q6_k", "q4_k"), ("f16", "q3_k"), ("q2_k", "q8_0")]
)
def test_one_matrix_in_two_types_is_recognized_and_the_better_copy_kept(
    first: str, second: str, gguf_file: Maker
) -> None:
    source, found = gguf_graph(gguf_file, (BIG, first), (BIG, second))
    assert (found.verdict, found.tied) == (Verdict.TWO_PRECISIONS, False)
    assert any("hold one matrix in two types" in note for note in found.notes)
    shared = tie_graph(source, tie=True)
    assert (shared.verdict, shared.tied) == (Verdict.TWO_PRECISIONS, True)
    lookup, head = source.role_tensors()
    assert lookup is not None
    assert head is not None
    better = TABLE if lookup.nbytes > head.nbytes else HEAD
    assert table_name(source, shared) == better


def test_one_matrix_is_recognized_in_two_bits(gguf_file: Maker) -> None:
    assert gguf_graph(gguf_file, (BIG, "q8_0"), (BIG, "q2_0"))[1].verdict is Verdict.TWO_PRECISIONS


@pytest.mark.parametrize("coarse", ["tq1_0", "tq2_0"])
def test_one_matrix_is_recognized_in_a_ternary_type(coarse: str, gguf_file: Maker) -> None:
    assert gguf_graph(gguf_file, (BIG, "q8_0"), (BIG, coarse))[1].verdict is Verdict.TWO_PRECISIONS


def test_a_head_that_moved_away_from_its_lookup_is_no_second_precision_at_two_bits(gguf_file: Maker) -> None:
    # A head that was trained on: half as much change as there is weight. Q2_K's own noise is under 0.3.
    moved = BIG + 0.5 * np.random.default_rng(5).standard_normal(BIG.shape).astype(np.float32)
    assert gguf_graph(gguf_file, (BIG, "q8_0"), (moved, "q2_k"))[1].verdict is Verdict.DIFFERENT


def test_really_different_tables_in_two_types_stay_apart(gguf_file: Maker) -> None:
    other = np.random.default_rng(3).standard_normal(BIG.shape).astype(np.float32)
    _, found = gguf_graph(gguf_file, (BIG, "q8_0"), (other, "q4_0"))
    assert (found.verdict, found.tied) == (Verdict.DIFFERENT, False)
    assert found.difference is not None
    # Independent matrices of equal variance: |a - b| / |a| is sqrt(2) within a few percent for 16,384 numbers.
    assert found.difference.relative_rms == pytest.approx(2**0.5, rel=0.05)
    with pytest.raises(RefusedError, match="were to share one table, but 64 rows differ"):
        gguf_graph(gguf_file, (BIG, "q8_0"), (other, "q4_0"), tie=True)


def test_equal_gguf_copies_are_untied_until_asked(gguf_file: Maker) -> None:
    source, found = gguf_graph(gguf_file, (BIG, "q8_0"), (BIG, "q8_0"))
    assert (found.verdict, found.tied) == (Verdict.EQUAL_COPIES, False)
    assert tie_graph(source, tie=True).tied


def test_a_matrix_that_is_stored_twice_is_shared_again_where_that_is_wanted(gguf_file: Maker) -> None:
    _, found = gguf_graph(gguf_file, (BIG, "q8_0"), (BIG, "q8_0"), retie=True)
    assert (found.verdict, found.tied) == (Verdict.EQUAL_COPIES, True)
    _, found = gguf_graph(gguf_file, (BIG, "q4_0"), (BIG, "q8_0"), retie=True)
    assert (found.verdict, found.tied) == (Verdict.TWO_PRECISIONS, True)
    assert any("the better copy is shared, which saves" in note for note in found.notes)
    _, found = gguf_graph(gguf_file, (BIG, "q8_0"), (-BIG, "q8_0"), retie=True)
    assert (found.verdict, found.tied) == (Verdict.DIFFERENT, False)
    _, found = gguf_graph(gguf_file, (BIG, "q8_0"), (BIG, "q8_0"), retie=True, tie=False)
    assert found.tied is False


def test_the_same_type_with_noise_is_no_second_precision(gguf_file: Maker) -> None:
    noisy = BIG + 0.01 * np.random.default_rng(4).standard_normal(BIG.shape).astype(np.float32)
    assert gguf_graph(gguf_file, (BIG, "q8_0"), (noisy, "q8_0"))[1].verdict is Verdict.DIFFERENT


def test_gguf_arithmetic_leaves_rope_factors_out(gguf_file: Maker) -> None:
    tensors = {"token_embd.weight": (BIG, "q8_0"), "blk.0.ffn_up.weight": (np.ones((3, 32)), "f32")}
    source = GgufSource(gguf_file(tensors))
    assert arithmetic(source, tie_graph(source)) == TieArithmetic(table=64 * 256, body=96)
