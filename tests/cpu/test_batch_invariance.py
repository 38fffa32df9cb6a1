"""With a given number of splits, a row's bits depend on that row alone. The planners' choices show it.

Bits follow from the kernel, which the spec identifies, and from the number of parts that a query's keys are cut into.
Each test draws two calls that differ in everything outside a row; both must have the same spec and the same parts.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.gqa.blocks_plan import DecodeShape
from cute_kernels.gqa.layouts import LAYOUTS, ScaleKind, cache_sizes
from cute_kernels.gqa.plan import choose_spec
from cute_kernels.gqa.plan import plan_decode as plan_gqa
from cute_kernels.merge.spec import WARP, MergeSpec
from cute_kernels.mla.plan import EXCHANGES, MAX_SPLITS, plan_decode
from cute_kernels.sink.op import MAX_TOKENS, _launchable
from cute_kernels.sink.request import FORWARD, Request
from fp8_mla.formats import FORMATS, PAIRS

FORMS = [*((name, "") for name in FORMATS), *PAIRS]
SPLITS = st.sampled_from([1, 2, 3, 4, 8, 9, 16, 64, MAX_SPLITS])
BATCHES = st.one_of(st.sampled_from([1, 2, 3, 16, 17, 64, 65, 128, 256]), st.integers(1, 5000))
PLENTY = settings(max_examples=500, deadline=None)


@st.composite
def others_of_mla(draw: st.DrawFn) -> dict[str, Any]:
    """What a batch adds to a row: other requests, whether there are lengths, and the width of tables."""
    return {
        "batch": draw(BATCHES), "s_q": draw(st.integers(1, 4)), "ragged": draw(st.booleans()),
        "max_keys": draw(st.sampled_from([1, 64, 65, 2048, 131_072])), "num_sms": draw(st.sampled_from([114, 132])),
    }  # fmt: skip


@PLENTY
@given(
    form=st.sampled_from(FORMS), sparse=st.booleans(), h_q=st.integers(1, 128), num_splits=SPLITS,
    exchange=st.sampled_from([None, *EXCHANGES]), inf_if_empty=st.booleans(),
    one=others_of_mla(), other=others_of_mla(),
)  # fmt: skip
def test_mla(form, sparse, h_q, num_splits, exchange, inf_if_empty, one, other):
    cache_format, extra_format = form
    if cache_format != "v3.2" or extra_format:
        exchange = None
    plans = [
        plan_decode(
            sparse=sparse or bool(extra_format), h_q=h_q, num_splits=num_splits, exchange=exchange,
            cache_format=cache_format, extra_format=extra_format, extra_keys=512 if extra_format else 0,
            inf_if_empty=inf_if_empty, **others,
        )
        for others in (one, other)
    ]  # fmt: skip
    assert plans[0].spec == plans[1].spec
    assert plans[0].num_splits == plans[1].num_splits == num_splits
    assert not plans[0].spec.balanced
    assert plans[0].spec.split == (num_splits > 1)


@PLENTY
@given(h_q=st.integers(65, 128), num_splits=SPLITS, others=others_of_mla())
def test_an_exchange_has_the_heads_and_the_merge_of_a_call_without(h_q, num_splits, others):
    """`mla_fp8_decode` promises results that are equal bit for bit."""
    plans = [
        plan_decode(sparse=True, h_q=h_q, num_splits=num_splits, exchange=exchange, **others)
        for exchange in (None, *EXCHANGES)
    ]
    assert len({(plan.spec.heads, plan.spec.merge_lanes, plan.num_splits) for plan in plans}) == 1


@PLENTY
@given(
    layout=st.sampled_from(sorted(LAYOUTS)), heads=st.sampled_from([(8, 1), (32, 8), (64, 8), (7, 7)]),
    s_q=st.integers(1, 8), d=st.sampled_from([64, 128, 256]), num_splits=SPLITS,
    kv_dtype=st.sampled_from(["int8", "float8_e4m3fn", "bfloat16"]), one=BATCHES, other=BATCHES,
    sms=st.sampled_from([114, 132]),
)  # fmt: skip
def test_gqa(layout, heads, s_q, d, num_splits, kv_dtype, one, other, sms):
    (h_q, h_kv), kind = heads, None if kv_dtype == "bfloat16" else ScaleKind("per_token_head")
    capacity, found = 4096, []
    for batch, num_sms in ((one, 132), (other, sms)):
        chosen = LAYOUTS[layout]
        size = {"o": 9 if chosen.paged else batch, "h": h_kv, "r": 16 if chosen.paged else capacity, "d": d}
        shape = DecodeShape(chosen, _sizes(chosen, size, kv_dtype), (batch, s_q, h_q), capacity)
        spec = choose_spec(
            shape, (kind, kind), q_dtype="bfloat16", kv_dtype=kv_dtype, scale_dtype="float32", num_sms=num_sms,
            num_splits=num_splits,
        )  # fmt: skip
        plan = plan_gqa(
            spec, batch=batch, h_kv=h_kv, rows=h_q // h_kv * s_q, max_keys=capacity, num_sms=num_sms,
            num_splits=num_splits,
        )  # fmt: skip
        # with as many splits as key tiles, or more, each tile is a split
        found.append((spec, plan.splits, plan.ranges))
        assert plan.splits == min(num_splits, -(-capacity // spec.keys_per_tile))
    assert found[0] == found[1]


def _sizes(layout: Any, size: dict[str, int], kv_dtype: str) -> Any:
    itemsize = 2 if kv_dtype == "bfloat16" else 1
    x = 16 // itemsize
    if layout.name == "paged_vllm":
        k: tuple[int, ...] = (size["o"], size["h"], size["d"] // x, size["r"], x)
        return cache_sizes(layout, k, (size["o"], size["h"], size["d"], size["r"]), itemsize)
    heads_first = layout.name in ("BNSH", "paged_HND")
    middle = (size["h"], size["r"]) if heads_first else (size["r"], size["h"])
    shape = (size["o"], *middle, size["d"])
    return cache_sizes(layout, shape, shape, itemsize)


@PLENTY
@given(
    num_states=st.integers(1, 130), d=st.integers(1, 64).map(lambda n: 8 * n),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]), one=st.integers(1, 10**6), other=st.integers(1, 10**6),
)  # fmt: skip
def test_merge_states(num_states, d, dtype, one, other):
    """A group adds states in their order. Lanes with a state each, or a warp of them, add weights in one order."""
    specs = [
        MergeSpec.for_launch(rows=rows, num_states=num_states, d=d, in_dtype=dtype, out_dtype=dtype)
        for rows in (one, other)
    ]
    assert specs[0].groups == specs[1].groups == 1
    lanes = [min(spec.lanes, WARP) for spec in specs]
    assert lanes[0] == lanes[1] or num_states <= min(lanes)


@PLENTY
@given(window=st.integers(1, 2000), one=st.integers(1, 3000), other=st.integers(1, 3000))
def test_sinks_over_packed_sequences(window, one, other):
    """The tokens of other sequences must not decide whether a window is compiled, which determines the key tile."""
    found = [_packed(window, tokens)["window"] for tokens in (one, other)]
    assert found[0] == found[1] == window


def test_a_window_wider_than_any_sequence_is_none():
    assert _packed(MAX_TOKENS, 64)["window"] is None


def _packed(window: int, tokens: int) -> Request:
    q, kv = torch.empty(tokens, 4, 64, device="meta"), torch.empty(tokens, 2, 64, device="meta")
    starts = torch.empty(2, dtype=torch.int32, device="meta")
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": tokens}
    return _launchable(FORWARD.request(q=q, k=kv, v=kv, window=window, **lengths))
