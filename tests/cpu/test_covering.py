"""The covering arrays lack no possible combination, every row is a valid call, and there are few kernels."""

import dataclasses
import itertools
from typing import Any, get_args

import pytest
import torch

from cute_kernels import gqa_decode, mla_fp8_decode
from cute_kernels.gqa import op as gqa_op
from cute_kernels.gqa import request as gqa_request
from cute_kernels.gqa.launch import decode_spec
from cute_kernels.gqa.layouts import LAYOUTS, CacheSizes, Which, scale_shapes
from cute_kernels.gqa.plan import cluster_for
from cute_kernels.gqa.spec import GqaDecodeSpec
from cute_kernels.mla import op as mla_op
from cute_kernels.mla import request as mla_request
from cute_kernels.mla.crossover.spec import shipped_specs as shipped_crossover_specs
from cute_kernels.mla.spec import shipped_specs as shipped_mla_specs
from tests.kit import covering
from tests.kit.arrays import Model, Rule, extended, uncovered
from tests.kit.covering import GQA, GQA_ROWS, LONG, MLA, MLA_ROWS, NUM_SMS
from tests.kit.gqa_cases import KV_DTYPES, SCALE_NAMES
from tests.kit.mla_cases import dense_case

ARRAYS = {
    "gqa": (GQA, [dataclasses.asdict(row) for row in GQA_ROWS]),
    "mla": (MLA, [dataclasses.asdict(row) for row in MLA_ROWS]),
}
SMALL = Model(
    factors={"a": (0, 1, 2), "b": ("x", "y"), "c": (None, 5), "d": (False, True), "e": (1, 2, 3)},
    triples=("a", "b", "c", "d"),
    pairs=("e",),
    rules=(
        Rule(("a", "b"), lambda a, b: a != 0 or b == "x"),
        Rule(("b", "c", "e"), lambda b, c, e: c is None or e > 1),
    ),
)


def test_what_is_missing_is_named_and_added():
    rows = extended(SMALL, [])
    assert uncovered(SMALL, rows) == [] and all(SMALL.keeps_rules(row) for row in rows)
    few = [row for row in rows if not (row["a"] == 2 and row["d"])]
    assert {"a": 2, "b": "y", "d": True} in uncovered(SMALL, few)
    assert SMALL.complete({"a": 0, "b": "y"}) is None
    more = extended(SMALL, few)
    assert more[: len(few)] == few and uncovered(SMALL, more) == []


# ---- the arrays


@pytest.mark.parametrize("name", ARRAYS)
def test_every_possible_combination_occurs(name):
    model, rows = ARRAYS[name]
    assert set(model.factors) == {*model.triples, *model.pairs}
    assert all(model.keeps_rules(row) for row in rows)
    assert uncovered(model, rows) == []


def broken(model: Model, *names: str) -> list[tuple[Any, ...]]:
    """The pairs of values that a model's rule about two factors forbids."""
    [rule] = [rule for rule in model.rules if rule.names == names]
    return [values for values in itertools.product(*(model.factors[name] for name in names)) if not rule.holds(*values)]


def gqa_call(kv: str, q: str, k: str, v: str, layout: str = "BNSH", page: str = "none") -> dict[str, Any]:
    """Arguments of any values, compatible or not."""
    known, rows = LAYOUTS[layout], covering.PAGE_SIZES[page] or 32
    dtype, sizes = KV_DTYPES[kv], CacheSizes(2, rows, 2, 64)
    caches = [
        torch.zeros(known.shape(which, sizes, dtype.itemsize), dtype=dtype, device="cpu") for which in get_args(Which)
    ]
    shapes = scale_shapes(known, sizes)
    scales = [
        None if name == "none" else torch.ones(shapes[SCALE_NAMES[name]], dtype=torch.float32, device="cpu")
        for name in (k, v)
    ]
    return {
        "q": torch.zeros((2, 1, 2, 64), dtype=covering.Q_DTYPES[q], device="cpu"),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "k_scale": scales[0],
        "v_scale": scales[1],
        "layout": layout,
        "cache_seqlens": torch.full((2,), 9, dtype=torch.int32, device="cpu"),
        "block_table": None if page == "none" else torch.zeros((2, 1), dtype=torch.int32, device="cpu"),
    }


def test_what_the_rules_of_gqa_leave_out_is_refused():
    """No rule excludes a call that users can make."""
    scales = broken(GQA, "kv_dtype", "k_scales")
    assert scales == broken(GQA, "kv_dtype", "v_scales") and len(scales) == 13
    calls = [gqa_call(kv, kv if kv in covering.Q_DTYPES else "bf16", name, name) for kv, name in scales]
    calls += [gqa_call(kv, q, "none", "none") for kv, q in broken(GQA, "kv_dtype", "q_dtype")]
    calls += [gqa_call("fp8", "bf16", k, v) for k, v in broken(GQA, "k_scales", "v_scales")]
    calls += [gqa_call("int8", "bf16", "per_head", "per_head", *place) for place in broken(GQA, "layout", "page")]
    for call in calls:
        with pytest.raises((TypeError, ValueError)):
            gqa_decode(**call)
    for layout, page in (("BNSH", "none"), ("paged_NHD", "smallest"), ("paged_vllm", "small")):
        gqa_decode(**gqa_call("fp8", "fp16", "per_head", "per_token", layout, page))


def test_what_the_rules_of_mla_leave_out_is_refused():
    assert broken(MLA, "mode", "lengths") == [("dense", "query")]
    case = dense_case(seqlens=[3, 4], h_q=2, s_q=2)
    per_query = torch.ones((2, 2), dtype=torch.int32, device="cpu")
    with pytest.raises(ValueError, match="cache_seqlens"):
        mla_fp8_decode(case.q, case.kv_cache, block_table=case.block_table, cache_seqlens=per_query)


def test_clusters_are_left_out_where_none_is_planned():
    for splits, longest in broken(GQA, "splits", "longest"):
        assert splits == "cluster"
        assert cluster_for(GqaDecodeSpec("bfloat16", "int8", 64, 8), 1, 1, 1, longest, NUM_SMS) == 1


# ---- rows


@pytest.mark.parametrize("row", GQA_ROWS, ids=lambda row: str(row.seed))
def test_gqa_rows_are_valid_calls_with_the_kernel_that_is_compiled(row):
    case = row.call("cpu", short=True)
    request = gqa_request.DECODE.request(**case.arguments(), num_splits=1)
    out, lse = case.outputs(padded=row.padded)
    written = {"num_splits": row.num_splits, "out": out.tensor, "lse": lse.tensor}
    gqa_op.check(gqa_request.DECODE.request(**{**request, **written}))
    assert decode_spec(request) == dataclasses.replace(row.spec(), cluster=1)
    assert row.spec().can_implement() == []
    assert len(row.seqlens()) == row.batch and max(row.seqlens()) == row.longest


def test_gqa_rows_get_the_plan_that_they_name():
    for row in GQA_ROWS:
        spec, plan = row.spec(), row.plan()
        if row.num_splits is None:
            assert (spec.cluster > 1) == (row.splits == "cluster")
            assert (plan.ranges > 1) == (row.splits == "ranges")
        else:
            assert spec.cluster == 1 and 1 <= plan.splits <= row.num_splits
        assert 4 * plan.states * plan.state_floats <= 2**30, "a workspace is kept, and several processes have one"


@pytest.mark.parametrize("row", MLA_ROWS, ids=lambda row: str(row.seed))
def test_mla_rows_are_valid_calls(row):
    case = row.call("cpu", short=True)
    out, lse = case.outputs(padded=row.padded)
    request = mla_request.DECODE.request(
        q=case.q, kv_cache=case.kv_cache, **case.options(), num_splits=row.splits, exchange=row.exchange,
        out=out.tensor, lse=lse.tensor,
    )  # fmt: skip
    mla_op.check(request)


def test_mla_rows_have_plans_that_fit():
    shipped = {*shipped_mla_specs(), *shipped_crossover_specs()}
    for row in MLA_ROWS:
        plan = row.plan()
        assert plan.spec in shipped
        assert plan.partial_rows <= covering.MOST_PARTIALS
        assert row.splits is None or plan.num_splits == row.splits
        assert (row.batch * row.s_q > 1024) == (row.queries == "more")
        assert plan.spec.balanced <= (row.splits is None and row.queries != "more")


def test_sizes_at_the_ends_are_among_the_rows():
    plans = [(row, row.plan()) for row in GQA_ROWS]
    for num_splits in (64, 128, 256):
        assert any(plan.splits == num_splits for _, plan in plans), "each of so many has tiles of its own"
        assert any(row.splits == num_splits and row.keys == "long" and row.mode == "dense" for row in MLA_ROWS)
    assert any(row.longest == LONG and row.s_q == 8 for row in GQA_ROWS)
    assert any(row.queries == "more" and row.lengths == "query" for row in MLA_ROWS)
    assert any(row.queries == "more" and row.lengths == "ragged" and row.mode == "dense" for row in MLA_ROWS)
    balanced = [row for row in MLA_ROWS if row.plan().spec.balanced]
    assert any(row.batch * row.s_q == 1024 for row in balanced)
    assert {row.longest for row in MLA_ROWS} == {64, 333, 2048, 65_536, LONG}
    assert any(row.longest == 65_536 and row.s_q == 8 for row in MLA_ROWS)


def test_kernels_stay_few():
    """A kernel of `gqa_decode` takes 2.2 s to compile; the kernels of `mla_fp8_decode` ship anyway."""
    specs = covering.all_specs()
    assert len(set(specs)) == len(specs)
    assert len(set(specs) - {*shipped_mla_specs(), *shipped_crossover_specs()}) <= 250


@pytest.mark.parametrize("row", [*GQA_ROWS[::12], *MLA_ROWS[::12]], ids=lambda row: f"{type(row).__name__}{row.seed}")
def test_rows_give_what_the_oracle_gives(row):
    """The check of the GPU tests runs with few keys. On a CPU both sides are the reference."""
    row.check("cpu", short=True)


def test_a_wrong_output_is_found(monkeypatch):
    """One output is wrong in one head, another has unwritten values outside the compared sample."""
    row = next(row for row in MLA_ROWS if row.h_q == 8 and row.keys == "some" and row.sink == "none")

    def zeroed(*args: Any, out: torch.Tensor, lse: torch.Tensor, **options: Any) -> None:
        mla_fp8_decode(*args, **options, out=out, lse=lse)
        out[:, :, 3] = 0

    monkeypatch.setattr(covering, "mla_fp8_decode", zeroed)
    with pytest.raises(AssertionError, match="out:"):
        row.check("cpu", short=True)

    def unwritten(*args: Any, out: torch.Tensor, lse: torch.Tensor, **options: Any) -> None:
        mla_fp8_decode(*args, **options, out=out, lse=lse)
        out[:, :, 3] = torch.nan

    monkeypatch.setattr(covering, "mla_fp8_decode", unwritten)
    monkeypatch.setattr(covering.MlaRow, "_sample", lambda row, case: ([0], [0, 1]))
    with pytest.raises(AssertionError, match="was not written"):
        row.check("cpu", short=True)
