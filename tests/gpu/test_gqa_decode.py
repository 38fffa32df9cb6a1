"""`gqa_decode` on the GPU against the float64 oracle, under the tolerance rule of `tests.kit.compare`.

test_covering.py has the combinations of cache, scales, layout, sizes and modifiers. Many of these need a kernel of
their own, so the tests here use only the variants of `usual`, which `kernel_specs` lists.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cute_kernels import gqa_decode
from cute_kernels.gqa.launch import decode_spec
from cute_kernels.gqa.layouts import LAYOUTS
from cute_kernels.gqa.plan import cluster_for
from cute_kernels.gqa.reference import reference_gqa_decode
from cute_kernels.gqa.request import DECODE
from cute_kernels.gqa.spec import GqaDecodeSpec
from tests.kit.bits import require_same_bits_each_time
from tests.kit.compare import relative_error
from tests.kit.gqa_cases import SCALE_NAMES, VALUES, GqaCase, GqaExpectation, gqa_case
from tests.kit.graphs import capture
from tests.kit.mla_cases import generator, ragged_lengths

pytestmark = pytest.mark.usefixtures("free_memory")
INF = math.inf
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
SM_COUNT = 132

USUAL_LAYOUTS = ("BNSH", "BSNH", "paged_NHD")
FINE_SCALES: tuple[dict[str, Any], ...] = tuple(
    {"d": d, "k_scales": k_scales, "v_scales": v_scales, "layout": layout}
    for d in (64, 128, 256)
    for scales in ("per_token_head", "per_group_32")
    for k_scales, v_scales, layout in (
        (scales, scales, "paged_NHD"), (scales, "per_head", "paged_NHD"), ("per_head", scales, "BNSH")
    )
)  # fmt: skip
"""Kernels with every kind of scale warps: three or two that take turns, and one for K and one for V."""

STARTED: tuple[dict[str, Any], ...] = (
    {"layout": "paged_NHD"},
    {"layout": "BNSH", "alibi": "batch"},
    {"layout": "BSNH", "kv_dtype": "bf16", "d": 64},
    {"layout": "paged_vllm", "page_size": 16, "kv_dtype": "fp8", "k_scales": "per_head", "v_scales": "per_token"},
    {"layout": "BNSH", "kv_dtype": "bf16", "d": 256},
)
"""Caches whose sequences begin after their first token. What precedes is NaN if the dtype has NaN."""

VARIANTS: tuple[dict[str, Any], ...] = (
    *({"layout": layout, "page_size": 16 if LAYOUTS[layout].x_packed else 64} for layout in LAYOUTS),
    *({"page_size": page_size} for page_size in (1, 2, 16, 1024)),
    *({"kv_dtype": "fp8", "k_scales": None, "v_scales": None, "q_dtype": q} for q in (torch.bfloat16, torch.float16)),
    {"kv_dtype": "fp8"},
    {"layout": "BNSH", "kv_dtype": "fp8", "k_scales": "per_head", "v_scales": "per_head"},
    *({"layout": "BNSH", "alibi": "head", "softcap": softcap} for softcap in (None, 2.0)),
    *({"layout": "BNSH", "k_scales": scales, "v_scales": scales} for scales in SCALE_NAMES),
    *FINE_SCALES,
    *({**options, "starts": [1, 0, 65]} for options in STARTED),
)
"""Options of `usual` that need other kernels."""


def kernel_specs() -> list[GqaDecodeSpec]:
    """Kernels of this file, found with small cases on the CPU, so that several compile at a time.

    If the number of splits is not given, a cluster merges short sequences of small batches.
    """
    specs: dict[GqaDecodeSpec, None] = {}
    for case in (usual(**options, device="cpu") for options in VARIANTS):
        spec = decode_spec(DECODE.request(**case.arguments(), num_splits=1))
        h_kv = case.k_cache.shape[LAYOUTS[case.layout].key.index("h")]
        _, s_q, h_q, _ = case.q.shape
        cluster = cluster_for(spec, 3, h_kv, h_q // h_kv * s_q, 700, SM_COUNT)
        specs |= {spec: None, dataclasses.replace(spec, cluster=cluster): None}
    return list(specs)


def case_of(**options: Any) -> Any:
    """A `GqaCase` on the GPU. Typed Any here and below, because each call makes plain which tensors are None."""
    return gqa_case(**{"device": "cuda", **options})


def usual(**options: Any) -> Any:
    """The variant that most tests share: int8, 8 query heads, 2 KV heads, d 128, scales per token and head."""
    return case_of(**{"seqlens": [700, 1, 65], "h_q": 8, "h_kv": 2, "layout": "paged_NHD", **options})


def decode(case: GqaCase, **options: Any) -> Any:
    return gqa_decode(**{**case.arguments(), **options})


def hold(case: GqaCase, *, splits: Sequence[int | None] = (None, 1, 3), padded: bool = True) -> None:
    """Runs a case into poisoned outputs with each number of splits, and applies the tolerance rule to each result."""
    expectation = GqaExpectation.of(case)
    out, lse = case.outputs(padded=padded)
    for num_splits in splits:
        out.poison()
        lse.poison()
        decode(case, num_splits=num_splits, out=out.tensor, lse=lse.tensor)
        expectation.check(out.tensor, lse.tensor, name=f"num_splits {num_splits}").require()
        out.require_no_stray_writes()
        lse.require_no_stray_writes()


@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16])
def test_fp8_without_scales(q_dtype):
    options = {"kv_dtype": "fp8", "k_scales": None, "v_scales": None, "q_dtype": q_dtype}
    hold(usual(**options))
    hold(usual(**options, values="wild", seed=1))


# ---- lengths, pages, windows


@pytest.mark.parametrize("layout", USUAL_LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
def test_every_length_around_tiles_and_pages(layout, causal):
    for s_q in (1, 2):
        hold(usual(seqlens=range(260), layout=layout, s_q=s_q, causal=causal, page_size=64), splits=(None, 1, 2))


@pytest.mark.parametrize("page_size", [1, 2, 16, 64, 1024])
def test_lengths_around_pages(page_size):
    edge_lengths = {k * page_size + step for k in (1, 2, 3) for step in (-1, 0, 1)}
    hold(usual(seqlens=sorted(edge_lengths), page_size=page_size))


@pytest.mark.parametrize("layout", USUAL_LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
def test_windows_around_tiles(layout, causal):
    """Every token before the windows of all queries is poison."""
    for window in (1, 2, 63, 64, 65, 127, 128, 129, 1000, INT32_MAX):
        lengths = [0, 1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 1100, 2049]
        hold(usual(seqlens=lengths, layout=layout, s_q=2, window=window, causal=causal, seed=window % 97))


@pytest.mark.parametrize("options", STARTED, ids=str)
@pytest.mark.parametrize("s_q", [1, 2, 8])
def test_sequences_that_begin_late(options, s_q):
    """Starts lie at borders of tiles and pages, below zero, at the end and beyond it. Tokens before are poison."""
    starts = [-7, 0, 1, 15, 16, 17, 63, 64, 127, 128, 129, 255, 256, 383, 384, 385, 2000, INT32_MAX]
    lengths = [384] * len(starts)
    for window in (None, 1, 100, 300):
        case = usual(seqlens=lengths, starts=starts, s_q=s_q, window=window, sink="finite", h_q=2, **options)
        hold(case)
        out, lse = decode(case, return_lse=True)
        assert (out[-4:] == 0).all() and (lse[-4:] == -INF).all(), "no keys"
        assert (out[-5, -1] != 0).any(), "one key, of the last query alone"
    hold(usual(seqlens=lengths, starts=starts, s_q=s_q, causal=False, sink="inf", h_q=2, **options))


def test_sequences_of_all_lengths_that_begin_late():
    """A range has many sequences, some with all tiles before their first token, and beside them lies a long one."""
    lengths = ragged_lengths(300, 1500, 64, seed=5) + [100_003, 3000, 0]
    starts = [length * (i % 7) // 6 - i % 3 for i, length in enumerate(lengths[:-3])] + [90_001, 2990, 5]
    hold(usual(seqlens=lengths, starts=starts, sink="finite"), splits=(None, 1, 2, 132))
    hold(usual(seqlens=lengths, starts=starts, s_q=2, window=700), splits=(None, 3))


def test_starts_of_zero_change_no_bit():
    for layout in ("BNSH", "paged_NHD"):
        case = usual(seqlens=[700, 1, 65, 3000, 0], layout=layout, sink="finite")
        zeros = torch.zeros_like(case.cache_seqlens)
        for num_splits in (None, 1, 3):
            plain = decode(case, num_splits=num_splits, return_lse=True)
            started = decode(case, num_splits=num_splits, return_lse=True, cache_starts=zeros)
            assert all(torch.equal(a, b) for a, b in zip(plain, started, strict=True))


def test_starts_change_between_replays():
    case = usual(seqlens=[700, 130, 65], starts=[0, 0, 0])
    moved = torch.tensor([600, 129, 0], device="cuda").int()
    graph, out = capture(lambda: decode(case))
    expected = decode(dataclasses.replace(case, cache_starts=moved))
    case.cache_starts.copy_(moved)
    graph.replay()
    assert torch.equal(out, expected)


def test_all_tokens_of_a_contiguous_cache():
    for layout in ("BNSH", "BSNH"):
        hold(usual(seqlens=[321] * 3, layout=layout, whole=True))
        hold(usual(seqlens=[64] * 3, layout=layout, whole=True, s_q=2))


def test_sequences_shorter_than_their_queries():
    """Calls are causal: of two queries over a sequence of one key, only the last sees it."""
    case = usual(seqlens=[1, 2, 3, 0], s_q=2)
    hold(case)
    out = decode(case)
    assert (out[0, 0] == 0).all()
    assert (out[0, 1] != 0).any()
    hold(usual(seqlens=[1, 2, 7, 8, 9, 0], s_q=8, h_q=2, layout="BNSH", alibi="head", window=3))


@pytest.mark.parametrize("layout", USUAL_LAYOUTS)
def test_lengths_beyond_the_capacity_and_below_zero(layout):
    case = usual(seqlens=[192] * 4, layout=layout, whole=True)
    table = None if case.block_table is None else case.block_table[:, :3]
    lengths = torch.tensor([193, INT32_MAX, -5, INT32_MIN], device="cuda").int()
    case = dataclasses.replace(case, cache_seqlens=lengths, block_table=table)
    expected, _ = reference_gqa_decode(**case.arguments())
    assert (expected[:2] != 0).any() and (expected[2:] == 0).all()
    hold(case)


def test_table_entries_outside_the_cache():
    case = usual(seqlens=[640, 640, 640])
    table = case.block_table.clone()
    table[0, 3] = -1
    table[1, 0] = case.k_cache.shape[0]
    table[2, :10] = INT32_MAX
    hold(dataclasses.replace(case, block_table=table))


def test_sequences_that_share_pages():
    case = usual(seqlens=[300, 300, 300])
    hold(dataclasses.replace(case, block_table=case.block_table[:1].expand(3, -1).contiguous()))


@pytest.mark.parametrize("kind", ["lengths 0", "no table", "no pages", "no tokens", "bad entries"])
def test_rows_without_keys_are_zero_and_minus_infinity(kind):
    paged, flat = usual(seqlens=[0] * 74, sink="finite", s_q=2), usual(seqlens=[0] * 74, layout="BNSH", sink="finite")
    some = torch.full((74,), 100, device="cuda").int()
    case = {
        "lengths 0": paged,
        "no table": dataclasses.replace(paged, block_table=paged.block_table[:, :0], cache_seqlens=some),
        "no pages": without_outer(paged, some),
        "no tokens": without_rows(flat, some),
        "bad entries": dataclasses.replace(
            paged, block_table=torch.full_like(paged.block_table, INT32_MIN), cache_seqlens=some
        ),
    }[kind]
    for num_splits in (None, 1, 3):
        out, lse = case.outputs(padded=True)
        decode(case, num_splits=num_splits, out=out.tensor, lse=lse.tensor)
        assert (out.tensor == 0).all()
        assert (lse.tensor == -INF).all()
        out.require_no_stray_writes()
        lse.require_no_stray_writes()


def without_outer(case: Any, lengths: torch.Tensor) -> Any:
    """A cache without pages, although the table still names pages."""
    cut = {name: getattr(case, name)[:0] for name in ("k_cache", "v_cache", "k_scale", "v_scale")}
    return dataclasses.replace(case, **cut, block_table=torch.zeros_like(case.block_table), cache_seqlens=lengths)


def without_rows(case: Any, lengths: torch.Tensor) -> Any:
    """BNSH with a capacity of 0 tokens."""
    cut = {name: getattr(case, name)[:, :, :0] for name in ("k_cache", "v_cache", "k_scale", "v_scale")}
    return dataclasses.replace(case, **cut, cache_seqlens=lengths)


def test_no_requests():
    for layout in ("BNSH", "paged_NHD"):
        case = usual(seqlens=[], layout=layout)
        out, lse = decode(case, return_lse=True)
        assert out.shape == (0, 1, 8, 128)
        assert lse.shape == (0, 1, 8)


# ---- sizes


@pytest.mark.parametrize("layout", USUAL_LAYOUTS)
def test_many_ragged_sequences(layout):
    seqlens = ragged_lengths(300, 1500, 64, seed=3)
    seqlens[17:200:13] = [0] * len(range(17, 200, 13))
    hold(usual(seqlens=seqlens, layout=layout, sink="inf"))


@pytest.mark.parametrize("options", FINE_SCALES, ids=str)
def test_many_short_sequences_in_a_range(options):
    """Page numbers, scales and Q are prefetched across sequences, some of which have no keys or less than a tile."""
    seqlens = [0, 1, 127, 128, 129, 0, 0, 512, 300, 640, 2, 0] * 24
    hold(usual(seqlens=seqlens, sink="finite", **options), splits=(None, 2))
    hold(usual(seqlens=seqlens[::-1], s_q=2, **options), splits=(None, 2))


def test_one_long_sequence_beside_short_ones():
    hold(usual(seqlens=[100_003, 1, 0, 64, 3000], sink="finite"), splits=(None, 1, 132))
    hold(usual(seqlens=[131_072], layout="BNSH"), splits=(None, 1, 132))


@pytest.mark.parametrize("layout", USUAL_LAYOUTS)
def test_cache_beyond_2_gib(layout):
    """K and V have more than 2^31 elements. Pages in use are at both ends; all others have NaN scales."""
    case = usual(seqlens=[300, 129, 300], layout=layout, padded=False)
    rows = 2 if layout == "BNSH" else 1
    if layout == "paged_NHD":
        used, num_pages = case.k_cache.shape[0], (2**31 + 2**27) // (64 * 2 * 128)
        spread = torch.arange(used, device="cuda")
        spread[used // 2 :] += num_pages - used
        table = case.block_table.long()
        valid = (table >= 0) & (table < used)
        case = dataclasses.replace(
            case, block_table=torch.where(valid, spread[table.clamp(0, used - 1)], INT32_MAX).int()
        )
    else:
        num_rows, used = (2**30 + 2**27) // (2 * 128), case.k_cache.shape[rows]
    grown = {}
    for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
        small = getattr(case, name)
        shape = list(small.shape)
        shape[0 if layout == "paged_NHD" else rows] = num_pages if layout == "paged_NHD" else num_rows
        grown[name] = torch.full(shape, 77 if small.dtype == torch.int8 else math.nan, dtype=small.dtype, device="cuda")
        if layout == "paged_NHD":
            grown[name][spread] = small
        else:
            grown[name].narrow(rows, 0, used).copy_(small)
    assert grown["k_cache"].numel() > 2**31
    hold(dataclasses.replace(case, **grown))


# ---- splits


@pytest.mark.parametrize("layout", USUAL_LAYOUTS)
@pytest.mark.parametrize("values", ["normal", "wild"])
def test_forced_splits_agree(layout, values):
    """Split results may differ by at most twice the 2.7e-3 that one may be off. Each also passes the rule."""
    case = usual(seqlens=[1, 0, 700, 65, 2048], layout=layout, values=values, sink="finite", s_q=2)
    splits = (1, 2, 3, 7, 32, 200)
    hold(case, splits=splits)
    results = [decode(case, num_splits=num_splits, return_lse=True) for num_splits in splits]
    for out, lse in results[1:]:
        assert relative_error(out, results[0][0]) < 5.4e-3
        torch.testing.assert_close(lse, results[0][1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_splits", [None, 1, 5])
def test_the_same_bits_on_20_runs(num_splits):
    for case in (
        usual(seqlens=[4000, 1, 513, 64, 0], sink="finite", s_q=2),
        usual(seqlens=[20_000], layout="BNSH"),
        usual(seqlens=ragged_lengths(200, 1000, 64, seed=1), layout="BSNH"),
    ):
        require_same_bits_each_time(case, functools.partial(decode, case, num_splits=num_splits))


@pytest.mark.parametrize("layout", USUAL_LAYOUTS)
@pytest.mark.parametrize("num_splits", [None, 1, 4])
def test_graph_whose_lengths_change_between_replays(layout, num_splits):
    """A graph captured with one case is replayed with the tensors of others copied over its own."""
    cases = [
        usual(seqlens=lengths, layout=layout, whole=False, sink="finite", seed=seed, padded=False)
        for seed, lengths in enumerate([[2000] * 6, [0, 1, 64, 2000, 65, 700], [0] * 5 + [2000], [2000, 0, 0, 3, 0, 1]])
    ]
    most = max(len(case.k_cache) for case in cases)
    static = fitting(cases[0], most)
    out, lse = static.outputs(padded=True)

    def call() -> None:
        decode(static, num_splits=num_splits, out=out.tensor, lse=lse.tensor)

    graph, _ = capture(call)
    for case in [*cases, cases[1]]:
        for name, tensor in fitting(case, most).arguments().items():
            if isinstance(tensor, torch.Tensor):
                getattr(static, name).copy_(tensor)
        out.poison()
        lse.poison()
        graph.replay()
        GqaExpectation.of(static).check(out.tensor, lse.tensor).require()


def fitting(case: Any, outer: int) -> Any:
    """The call with this number of pages; contiguous caches already have one shape."""
    if case.block_table is None:
        return dataclasses.replace(case)
    grown: dict[str, Any] = {}
    for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
        small = getattr(case, name)
        grown[name] = torch.full(
            (outer, *small.shape[1:]), 5 if small.dtype == torch.int8 else math.nan, dtype=small.dtype, device="cuda"
        )
        grown[name][: len(small)] = small
    return dataclasses.replace(case, **grown)


# ---- numbers


@pytest.mark.parametrize("num_splits", [1, 4])
def test_sinks_at_infinity(num_splits):
    case = usual()

    def with_sink(sink: float) -> Any:
        s_aux = torch.full((8,), sink, device="cuda")
        return decode(case, s_aux=s_aux, num_splits=num_splits, return_lse=True)

    out, lse = decode(case, num_splits=num_splits, return_lse=True)
    minus_inf, minus_inf_lse = with_sink(-INF)
    assert torch.equal(out, minus_inf)
    assert torch.equal(lse, minus_inf_lse)
    nothing, same_lse = with_sink(INF)
    assert (nothing == 0).all()
    assert torch.equal(lse, same_lse), "the log-sum-exp leaves the sink out"


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_a_nan_in_a_visible_scale_is_not_hidden(name):
    """The NaN must reach every query head of its KV head, and no other."""
    case = usual(seqlens=[100, 200, 300], layout="BNSH", padded=False)
    scale = getattr(case, name).clone()
    scale[1, 1, 170] = math.nan
    case = dataclasses.replace(case, **{name: scale})
    expected, _ = reference_gqa_decode(**case.arguments())
    assert expected[1, 0, 4:].isnan().all() and int(expected.isnan().sum()) == 4 * 128
    hold(case)


@pytest.mark.parametrize("value", [math.nan, INF, -INF])
def test_a_nan_or_inf_in_one_query_head_stays_there(value):
    """An infinity meets keys of either sign and codes of 0, so that it is a NaN in the end."""
    case = usual(seqlens=[130, 130])
    q = case.q.clone()
    q[1, 0, 6, 11] = value
    case = dataclasses.replace(case, q=q)
    others = [head for head in range(8) if head != 6]
    expected, _ = reference_gqa_decode(**case.arguments())
    expectation = GqaExpectation.of(case)
    assert int(expected.isnan().sum()) == 128
    for num_splits in (None, 1, 2):
        out, lse = decode(case, num_splits=num_splits, return_lse=True)
        assert out[1, 0, 6].isnan().all()
        parts = [tensor[:, :, others] for tensor in expectation.yardstick if tensor is not None]
        trimmed = GqaExpectation(
            expectation.out[:, :, others], expectation.lse[:, :, others], type(expectation.yardstick)(*parts)
        )
        trimmed.check(out[:, :, others], lse[:, :, others]).require()


def test_queries_far_from_usual_size():
    """Logits have the usual size, but q is large, tiny, or differs from head to head."""
    case = usual(padded=False)
    for exponent in (40, -40):
        scale = 128**-0.5 * 2.0**-exponent
        hold(dataclasses.replace(case, q=case.q * 2.0**exponent, softmax_scale=scale))
    small = case.q.clone()
    small[:, :, ::2] *= 2.0**-30
    hold(dataclasses.replace(case, q=small))
    hold(dataclasses.replace(case, q=torch.zeros_like(case.q)))
    hold(dataclasses.replace(case, softmax_scale=0.0))


@pytest.mark.parametrize("query_size", [1.0, 8.0, 40.0])
def test_peaked_softmax(query_size):
    for values in VALUES:
        hold(usual(values=values, query_size=query_size, sink="finite"))


def test_the_largest_score_may_come_anywhere():
    """The running maximum rises in every tile, falls in every tile, or jumps once."""
    case = usual(seqlens=[640], layout="BNSH", whole=True, padded=False, h_q=2)
    ramp = torch.linspace(-1, 1, 640, device="cuda")
    jump = torch.cat([-torch.ones(320, device="cuda"), torch.ones(1, device="cuda"), ramp[:319]])
    q = torch.ones_like(case.q)
    signs = torch.randint(0, 2, case.k_cache.shape, generator=generator(0, "cuda"), device="cuda")
    for order in (ramp, ramp.flip(0), jump):
        codes = (order.view(1, 1, 640, 1) * 100 + signs).round().to(torch.int8)
        hold(dataclasses.replace(case, q=q, k_cache=codes, k_scale=torch.full_like(case.k_scale, 0.02)))


@pytest.mark.parametrize("exponent", [20.5, 36.0])
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_many_weights_far_below_the_largest(kv_dtype, exponent):
    """Keys have 2^-20.5 of the weight of a key whose value is 0. float16 holds that to 3%, and 2^7 times that to 0.1%.

    Weights of 2^-36 are below its range, so these keys count for nothing, as in the yardstick.
    """
    options = {"kv_dtype": kv_dtype, "k_scales": "per_head", "v_scales": "per_head", "h_q": 2, "padded": False}
    case = usual(seqlens=[640], layout="BNSH", whole=True, **options)
    k, v = torch.zeros_like(case.k_cache, dtype=torch.float32), torch.full_like(case.v_cache, 64, dtype=torch.float32)
    k[:, :, 0], v[:, :, 0] = 20, 0
    scales = {name: torch.ones_like(getattr(case, name)) for name in ("k_scale", "v_scale")}
    caches = {"k_cache": k.to(case.k_cache.dtype), "v_cache": v.to(case.v_cache.dtype)}
    softmax_scale = exponent * math.log(2) / (128 * 20)
    hold(dataclasses.replace(case, q=torch.ones_like(case.q), softmax_scale=softmax_scale, **scales, **caches))


@pytest.mark.parametrize("alibi", ["head", "batch"])
@pytest.mark.parametrize("softcap", [None, 2.0, 30.0])
def test_modifiers_over_many_tiles(alibi, softcap):
    for window in (None, 300):
        lengths = [0, 1, 65, 3000]
        hold(usual(seqlens=lengths, layout="BNSH", s_q=2, alibi=alibi, softcap=softcap, window=window, sink="inf"))


@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0, 1e3, 1e6], ids="scores of {}".format)
def test_every_softcap_is_exact(size):
    """A cap far above all scores changes none of them, one far below makes them equal."""
    for softcap in (
        2.0**-100,
        1e-30,
        2.0**-20,
        0.3,
        7.3,
        50.0,
        1e3,
        2.0**17,
        1e6,
        2.0**30,
        1e30,
        2.0**100,
        1e39,
        1e300,
    ):
        case = usual(seqlens=[0, 1, 65, 700], layout="BNSH", alibi="head", softcap=softcap, query_size=size)
        if softcap < 1e38 and (size < 1e6 or softcap < 1e5):  # the yardstick has float32 caps
            hold(case)
            continue
        # float32 scores of 1e6 are 1/16 apart, which shows in weights of keys; the log-sum-exp has the right rule
        _, lse = decode(case, return_lse=True)
        _, expected = reference_gqa_decode(**case.arguments())
        torch.testing.assert_close(lse.double(), expected, rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("k_scales", SCALE_NAMES)
def test_scales_of_very_different_size(k_scales):
    """The log-sum-exp must hold, because keys are not rounded with their scales."""
    for seed in range(3):
        hold(usual(values="wild", k_scales=k_scales, v_scales=k_scales, layout="BNSH", seed=seed))


# ---- interface


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_give_the_same_bits(layout):
    case = usual(layout=layout, page_size=16 if LAYOUTS[layout].x_packed else 64)
    dense = {
        name: value.contiguous() if isinstance(value, torch.Tensor) else value
        for name, value in case.arguments().items()
    }
    assert not case.k_cache.is_contiguous() and not case.q.is_contiguous()
    for one, other in zip(decode(case, return_lse=True), gqa_decode(**dense, return_lse=True), strict=True):
        assert torch.equal(one, other)


def test_results_are_the_same_however_they_are_asked_for():
    case = usual(s_q=2)
    out, lse = decode(case, return_lse=True)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert torch.equal(decode(case), out)
    own, own_lse = torch.empty_like(out), torch.empty_like(lse)
    assert decode(case, out=own) is own
    assert torch.equal(own, out)
    decode(case, out=own, lse=own_lse)
    assert torch.equal(own_lse, lse)


@pytest.mark.parametrize("num_splits", [None, 1])
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_accuracy(kv_dtype, num_splits):
    """Data are N(0,1), with scales per token and head, 8192 keys, and logits of standard deviation 1."""
    case = usual(seqlens=[8192] * 4, kv_dtype=kv_dtype, query_size=1.0)
    out, lse = decode(case, num_splits=num_splits, return_lse=True)
    expected, expected_lse = reference_gqa_decode(**case.arguments())
    error, lse_error = relative_error(out, expected), (lse - expected_lse).abs().max().item()
    print(f"relative error {error:.2e}, log-sum-exp {lse_error:.1e}")
    assert error <= 2.7e-3
    assert lse_error <= 2e-5


@pytest.mark.parametrize("sequences", [9, 14, 15, 33])
def test_clusters_of_all_sizes(sequences):
    """Sizes are 8, 4 and 2 CTAs, by the number of sequences and heads. Lengths lie around ends of tiles."""
    lengths = [1, 0, 127, 128, 129, 640, *ragged_lengths(sequences - 7, 2000, 64, seed=sequences), 1800]
    for options in ({}, {"layout": "BNSH", "kv_dtype": "fp8", "s_q": 3, "window": 300}, {"kv_dtype": "bf16", "d": 64}):
        hold(usual(seqlens=lengths, sink="finite", **options), splits=(None,))
