"""The oracle of `gqa_decode` against a loop that shares no code with it, and the rules of quantizing and appending."""

import dataclasses
import math
from typing import Any, get_args

import pytest
import torch

from cute_kernels.gqa import reference
from cute_kernels.gqa.layouts import LAYOUTS, ScaleKind, Which
from cute_kernels.gqa.reference import dequantize, quantize, reference_gqa_decode
from tests.kit.gqa_cases import (
    KV_DTYPES,
    SCALE_NAMES,
    VALUES,
    GqaCase,
    GqaExpectation,
    check_gqa,
    gqa_case,
    gqa_yardstick,
)
from tests.kit.mla_cases import covering_cases, generator

NAN, INF = math.nan, math.inf
PAGED = [name for name, layout in LAYOUTS.items() if layout.paged]
KINDS = list(SCALE_NAMES.values())


# ---- the loop


def token_of(cache: Any, layout: str, which: Which, outer: int, row: int, head: int) -> torch.Tensor:
    """(d,) codes of one token and head by the documentation, without a `CacheLayout`."""
    if layout in ("BNSH", "paged_HND"):
        return cache[outer, head, row]
    if layout in ("BSNH", "paged_NHD"):
        return cache[outer, row, head]
    if which == "k":
        return torch.stack([cache[outer, head, chunk, row] for chunk in range(cache.shape[2])]).flatten()
    return cache[outer, head, :, row]


def scale_of(scale: Any, layout: str, outer: int, row: int, head: int, d: int) -> torch.Tensor:
    """(d,) scales of one token and head; the rank determines the granularity."""
    if scale is None:
        return torch.ones(d)
    if scale.numel() == 1:
        return scale.flatten().expand(d)
    if scale.ndim == 1:
        return scale[head].expand(d)
    if scale.ndim == 2:
        return scale[outer, row].expand(d)
    if layout in ("BSNH", "paged_NHD"):
        own = scale[outer, row, head]
    elif scale.ndim == 4 and layout == "paged_vllm":
        own = scale[outer, head, :, row]
    else:
        own = scale[outer, head, row]
    return own.expand(d) if scale.ndim == 3 else torch.stack([own[i * len(own) // d] for i in range(d)])


def naive_decode(case: GqaCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query head at a time. The sink is one more key with a value of zeros."""
    batch, s_q, h_q, d = case.q.shape
    heads_axis = {"BSNH": 2, "paged_NHD": 2}.get(case.layout, 1)
    rows_axis = {"BSNH": 1, "paged_NHD": 1, "paged_vllm": 3}.get(case.layout, 2)
    num_outer, h_kv, rows = (case.v_cache.shape[axis] for axis in (0, heads_axis, rows_axis))
    capacity = rows * (case.block_table.shape[1] if case.block_table is not None else 1)
    scale = 1 / math.sqrt(d) if case.softmax_scale is None else case.softmax_scale
    out = torch.zeros(batch, s_q, h_q, d, dtype=torch.float64)
    lse = torch.full((batch, s_q, h_q), -INF, dtype=torch.float64)
    for b in range(batch):
        length = capacity if case.cache_seqlens is None else min(max(int(case.cache_seqlens[b]), 0), capacity)
        for j in range(s_q):
            position = length - s_q + j
            seen = []
            for key in range(length):
                outer = int(case.block_table[b, key // rows]) if case.block_table is not None else b
                hidden = case.causal and key > position
                hidden |= case.window is not None and key <= position - case.window
                if not hidden and 0 <= outer < num_outer:
                    seen.append((key, outer, key % rows))
            for h in range(h_q) if seen else ():
                head = h // (h_q // h_kv)
                scores, values = [], []
                for key, outer, row in seen:
                    token = [
                        token_of(cache, case.layout, which, outer, row, head).double()
                        * scale_of(scales, case.layout, outer, row, head, d).double()
                        for which, cache, scales in zip(
                            get_args(Which), (case.k_cache, case.v_cache), (case.k_scale, case.v_scale), strict=True
                        )
                    ]
                    score = float(case.q[b, j, h].double() @ token[0]) * scale
                    if case.softcap is not None:
                        score = case.softcap * math.tanh(score / case.softcap)
                    if case.alibi_slopes is not None:
                        slope = case.alibi_slopes[b, h] if case.alibi_slopes.ndim == 2 else case.alibi_slopes[h]
                        score += float(slope) * (key - position)
                    scores.append(score)
                    values.append(token[1])
                lse[b, j, h] = torch.logsumexp(torch.tensor(scores, dtype=torch.float64), dim=0)
                sink = -INF if case.s_aux is None else float(case.s_aux[h])
                if sink != INF:
                    weights = torch.softmax(torch.tensor([*scores, sink], dtype=torch.float64), dim=0)
                    out[b, j, h] = weights[:-1] @ torch.stack(values)
    return out, lse


def require_equal(case: GqaCase, tolerance: float = 1e-11) -> None:
    out, lse = reference_gqa_decode(**case.arguments())
    expected, expected_lse = naive_decode(case)
    assert expected.isfinite().all()
    size = expected.abs().amax(dim=-1, keepdim=True).clamp_min(1e-300)
    torch.testing.assert_close(out / size, expected / size, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, expected_lse, rtol=tolerance, atol=tolerance)


SEMANTICS = covering_cases(
    {
        "layout": tuple(LAYOUTS),
        "kv_dtype": tuple(KV_DTYPES),
        "k_scales": tuple(SCALE_NAMES),
        "v_scales": tuple(SCALE_NAMES),
        "scale_dtype": (torch.float32, torch.float16),
        "values": VALUES,
        "ratio": (1, 3),
        "s_q": (1, 3),
        "window": (None, 1, 4),
        "softcap": (None, 5.0),
        "alibi": ("none", "head", "batch"),
        "sink": ("none", "finite", "inf"),
        "causal": (True, False),
        "bad_entries": (False, True),
        "padded": (True, False),
        "page_size": (1, 4, 8),
    }
)


def small_case(seed: int, *, ratio: int = 2, page_size: int = 8, **options: Any) -> GqaCase:
    if options["layout"] == "paged_vllm":
        page_size = 8
    q_dtype = torch.float16 if options["kv_dtype"] == "fp16" else torch.bfloat16
    lengths = [0, 1, 2, 7, 9, 19]
    sizes = {"h_q": 2 * ratio, "h_kv": 2, "d": 64, "page_size": page_size, "q_dtype": q_dtype, "seed": seed}
    return gqa_case(seqlens=lengths, **sizes, **options)


@pytest.mark.parametrize("seed", range(len(SEMANTICS)))
def test_against_the_loop(seed):
    require_equal(small_case(seed, **SEMANTICS[seed]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lengths_of_any_value(layout):
    lengths = torch.tensor([-1, -(2**31), 2**31 - 1, 11], dtype=torch.int32)
    whole = gqa_case(seqlens=[11] * 4, h_q=2, h_kv=1, d=64, s_q=2, layout=layout, page_size=8, whole=True)
    table = None if whole.block_table is None else whole.block_table[:, :1]
    require_equal(dataclasses.replace(whole, cache_seqlens=lengths, block_table=table) if table is not None else whole)
    if table is None:
        require_equal(dataclasses.replace(whole, cache_seqlens=lengths))


@pytest.mark.parametrize("layout", PAGED)
def test_entries_that_are_no_page_hide_their_keys(layout):
    case = gqa_case(seqlens=[40, 40, 40, 16], h_q=2, h_kv=2, d=64, s_q=3, layout=layout, page_size=8)
    table: Any = case.block_table
    table = table.clone()
    pages = case.k_cache.shape[0]
    table[0, :3] = torch.tensor([-1, pages, 2**31 - 1])
    table[1, 4] = -(2**31)
    table[2, :5] = -1
    case = dataclasses.replace(case, block_table=table)
    require_equal(case)
    out, lse = reference_gqa_decode(**case.arguments())
    assert (out[2] == 0).all()
    assert (lse[2] == -INF).all()


def test_without_requests_or_tokens():
    for batch, capacity in ((0, 5), (2, 0)):
        cache = torch.zeros(batch, 2, capacity, 64, dtype=torch.bfloat16)
        q = torch.ones(batch, 1, 4, 64, dtype=torch.bfloat16)
        out, lse = reference_gqa_decode(q, cache, cache)
        assert out.shape == (batch, 1, 4, 64)
        assert (out == 0).all()
        assert (lse == -INF).all()


def test_few_heads_at_a_time_give_the_same(monkeypatch):
    case = small_case(
        3, layout="BSNH", kv_dtype="int8", s_q=2, alibi="head", k_scales="per_head", v_scales="per_group_32"
    )
    expected = reference_gqa_decode(**case.arguments())
    yardstick = gqa_yardstick(case)
    monkeypatch.setattr(reference, "ELEMENTS_PER_CHUNK", 1)
    for got, want in zip(reference_gqa_decode(**case.arguments()), expected, strict=True):
        assert torch.equal(got, want)
    assert torch.equal(gqa_yardstick(case).out, yardstick.out)


def test_float32_on_request():
    case = small_case(0, layout="BNSH", kv_dtype="int8")
    out, lse = reference_gqa_decode(**case.arguments(), dtype=torch.float32)
    expected, expected_lse = reference_gqa_decode(**case.arguments())
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


# ---- against torch, and by hand


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ratio", [1, 4])
def test_against_torch(causal, ratio):
    gen = generator(ratio)
    s_q, s_k, h_kv, d = 5, 70, 3, 64
    q = torch.randn(2, s_q, h_kv * ratio, d, generator=gen, dtype=torch.float64)
    k, v = torch.randn(2, 2, h_kv, s_k, d, generator=gen, dtype=torch.float64)
    seen = torch.ones(s_q, s_k, dtype=torch.bool)
    mask = seen.tril(s_k - s_q) if causal else seen
    attend = torch.nn.functional.scaled_dot_product_attention
    expected = attend(q.transpose(1, 2), k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    out, _ = reference_gqa_decode(q, k, v, causal=causal)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def numbered(s_k: int, s_q: int = 1, h_q: int = 1) -> dict[str, Any]:
    """Keys with logit 0. Channel k of the value is 1 for key k and 0 for others."""
    v = torch.eye(s_k, 64).view(1, 1, s_k, 64)
    return {"q": torch.ones(1, s_q, h_q, 64), "k_cache": torch.zeros_like(v), "v_cache": v}


def test_causal_and_window_by_hand():
    def shares(**options: Any) -> list[list[float]]:
        out, _ = reference_gqa_decode(**numbered(5, s_q=2), **options)
        return [[round(x, 6) for x in row] for row in out[0, :, 0, :5].tolist()]

    assert shares() == [[0.25, 0.25, 0.25, 0.25, 0], [0.2, 0.2, 0.2, 0.2, 0.2]]
    assert shares(causal=False) == [[0.2] * 5, [0.2] * 5]
    assert shares(window=2) == [[0, 0, 0.5, 0.5, 0], [0, 0, 0, 0.5, 0.5]]
    assert shares(window=1) == [[0, 0, 0, 1, 0], [0, 0, 0, 0, 1]]
    assert shares(window=2, causal=False) == [
        [0, 0, round(1 / 3, 6), round(1 / 3, 6), round(1 / 3, 6)],
        [0, 0, 0, 0.5, 0.5],
    ]
    assert shares(window=2**31 - 1) == shares()


def test_keys_before_a_start_are_not_there():
    """A sequence that begins late must have the result of a sequence without the earlier tokens."""
    lengths, starts = [40, 40, 40, 40, 40, 40], [0, 7, 39, 40, 55, -3]
    options: dict[str, Any] = {"h_q": 4, "h_kv": 2, "d": 64, "s_q": 3, "alibi": "head", "sink": "finite"}
    for layout, window, causal in (("BNSH", None, True), ("BSNH", 9, True), ("paged_NHD", None, False)):
        case = gqa_case(
            seqlens=lengths, starts=starts, layout=layout, window=window, causal=causal, page_size=8, **options
        )
        out, lse = reference_gqa_decode(**case.arguments())
        assert torch.isfinite(out).all(), "what is before a start is NaN here"
        assert (out[3:5] == 0).all() and (lse[3:5] == -INF).all()
        if layout != "BNSH":
            continue
        for row, start in enumerate(starts[:3]):
            cut = {name: getattr(case, name)[row : row + 1, :, start:] for name in ("k_cache", "v_cache")}
            cut |= {name: getattr(case, name)[row : row + 1, :, start:] for name in ("k_scale", "v_scale")}
            shorter = {**case.arguments(), **cut, "q": case.q[row : row + 1], "cache_starts": None}
            shorter["cache_seqlens"] = torch.tensor([40 - start])
            own_out, own_lse = reference_gqa_decode(**shorter)
            assert torch.equal(out[row], own_out[0]) and torch.equal(lse[row], own_lse[0])


def test_a_nan_in_a_visible_key_is_not_hidden():
    """The NaN must not reach a query that does not see its key."""
    for cache in ("k_cache", "v_cache"):
        call = numbered(5, s_q=2)
        call[cache] = call[cache].clone()
        call[cache][0, 0, 4, 7] = NAN
        out, _ = reference_gqa_decode(**call)
        assert out[0, 0].isfinite().all()
        assert out[0, 1].isnan().any()


def dequantized(codes: torch.Tensor, scale: torch.Tensor, kind: ScaleKind) -> torch.Tensor:
    """(n, h_kv, d) float64 by hand."""
    n, h_kv, d = codes.shape
    if kind.granularity == "per_group":
        spread = scale.unsqueeze(-1).expand(n, h_kv, -1, kind.group_size).reshape(n, h_kv, d)
    else:
        shape = {"per_tensor": (1, 1, 1), "per_head": (1, h_kv, 1), "per_token": (n, 1, 1)}
        spread = scale.reshape(shape.get(kind.granularity, (n, h_kv, 1)))
    return codes.double() * spread.double()


# ---- quantization


def quantize_row(values: list[float], dtype: torch.dtype = torch.bfloat16, **options: Any) -> tuple[list[int], float]:
    """Codes and scale of one head of one token; zeros follow the values."""
    x = torch.zeros(1, 1, 64, dtype=dtype)
    x[0, 0, : len(values)] = torch.tensor(values, dtype=dtype)
    codes, scale = quantize(x, ScaleKind("per_token_head"), **options)
    return codes[0, 0, : len(values)].tolist(), scale.float().item()


def test_codes_by_hand():
    assert quantize_row([127, -127, 64, 1, 0, -1]) == ([127, -127, 64, 1, 0, -1], 1.0)
    assert quantize_row([254, -254, 2, 1, 3, 5, -1, -3]) == ([127, -127, 1, 0, 2, 2, 0, -2], 2.0), "half to even"
    assert quantize_row([]) == ([], 1.0)
    assert quantize_row([0.0, -0.0]) == ([0, 0], 1.0)
    third = torch.tensor(1.0) / 127
    assert quantize_row([1.0, 0.5, -0.25]) == ([127, 64, -32], third.item())


def test_nan_counts_as_zero_and_infinity_as_the_largest_number():
    assert quantize_row([NAN, 127.0, -1.0]) == ([0, 127, -1], 1.0)
    assert quantize_row([NAN, NAN]) == ([0, 0], 1.0)
    for dtype in (torch.bfloat16, torch.float16):
        largest = torch.finfo(dtype).max
        scale = (torch.tensor(largest, dtype=torch.float32) / 127).item()
        assert quantize_row([INF, -INF, 1.0], dtype) == ([127, -127, 0], scale)


def test_scales_have_a_floor_and_a_ceiling():
    smallest = 2.0**-133  # a subnormal of bfloat16, whose scale would be 2^-140
    assert quantize_row([smallest, -(2.0**-120)]) == ([0, -64], 2.0**-126)
    assert quantize_row([2.0**-10, -(2.0**-14)], scale_dtype=torch.float16) == ([16, -1], 2.0**-14)
    assert quantize_row([2.0**-15, 2.0**-16], scale_dtype=torch.float16) == ([0, 0], 2.0**-14), "half to even"
    assert quantize_row([1e30, -1e30], scale_dtype=torch.float16) == ([127, -127], 65504.0)
    assert quantize_row([65504 * 127.0], scale_dtype=torch.float16)[0] == [127]


def test_the_division_uses_the_scale_as_stored():
    """1.0 / 127 is 0.007874 in float32 and 0.007874 + 2e-6 in float16. Both give 127; values in between differ."""
    gen = generator(2)
    x = torch.randn(4000, 2, 64, generator=gen).bfloat16()
    codes, scale = quantize(x, ScaleKind("per_token_head"), torch.float16)
    wide = (x.float().abs().amax(dim=-1) / 127).to(torch.float16)
    assert torch.equal(scale, wide)
    assert torch.equal(codes, (x.float() / wide.float().unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8))
    assert not torch.equal(codes, quantize(x, ScaleKind("per_token_head"))[0])


def test_a_given_scale_is_used_as_it_is():
    assert quantize_row([1.0, 2.0, -300.0, NAN], given_scale=torch.full((1, 1), 2.0)) == ([0, 1, -127, 0], 2.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float16])
def test_every_granularity(kind, scale_dtype):
    x = torch.randn(9, 3, 128, generator=generator(1)).bfloat16()
    x[..., 3] *= 20
    codes, scale = quantize(x, kind, scale_dtype)
    groups = 128 // kind.group_size if kind.group_size else 0
    shapes = {"per_tensor": (1,), "per_head": (3,), "per_token": (9,), "per_token_head": (9, 3)}
    assert scale.shape == shapes.get(kind.granularity, (9, 3, groups))
    assert scale.dtype == scale_dtype
    assert codes.abs().max() == 127
    back = dequantized(codes, scale, kind)
    step = dequantized(torch.ones_like(codes), scale, kind)
    # a float16 scale may be too small by 2^-11, and the largest code is then clamped
    slack = 0 if scale_dtype == torch.float32 else 127 * 2.0**-11
    assert ((back - x.double()).abs() <= step * (0.5 + slack + 1e-5)).all()
    for other, its_scale in ((kind, scale),):
        again, _ = quantize(x, other, given_scale=its_scale)
        assert torch.equal(again, codes)


# ---- the inputs, and the tolerance rule over them


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_logits_are_of_usual_size(values, kv_dtype):
    """In every head, whatever the size of its keys, weights are neither all equal nor one-hot."""
    q_dtype = torch.float16 if kv_dtype == "fp16" else torch.bfloat16
    for name in SCALE_NAMES:
        options = {"kv_dtype": kv_dtype, "values": values, "q_dtype": q_dtype, "k_scales": name, "seed": 7}
        case = gqa_case(seqlens=[300] * 4, h_q=8, h_kv=4, layout="paged_NHD", **options)
        _, lse = reference_gqa_decode(**case.arguments())
        spread = lse - math.log(300)
        assert 0.3 < spread.mean() < 8, name
        assert (spread.mean(dim=(0, 1)) > 0.1).all(), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_nobody_sees_is_poison(layout):
    options = {"layout": layout, "s_q": 2, "window": 5, "h_q": 2, "h_kv": 1, "d": 64, "page_size": 8}
    case = gqa_case(seqlens=[1, 0, 30], kv_dtype="fp8", v_scales="per_token", **options)
    keys = dequantize(case.k_cache, case.k_scale, layout, "k")
    values = dequantize(case.v_cache, case.v_scale, layout, "v")
    for tokens in (keys, values):
        assert int(tokens.isfinite().all(dim=-1).sum()) == 1 + 6
        assert int(tokens.isnan().all(dim=-1).sum()) == tokens[..., 0].numel() - 7


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("v_scales", ["per_token_head", "per_group_32"])
def test_the_rule_tells_right_from_wrong(values, v_scales):
    options = {"values": values, "v_scales": v_scales, "sink": "finite", "layout": "paged_HND"}
    case = gqa_case(seqlens=[200, 64, 90, 0] * 11, h_q=8, h_kv=2, s_q=2, **options)
    rule = GqaExpectation.of(case)
    expected, exact, lse = rule.out, rule.out.bfloat16(), rule.lse.float()
    assert check_gqa(exact, lse, case).require().rel_err < 3e-3
    emulated = rule.check(rule.yardstick.out, rule.yardstick.lse)
    assert not [problem for problem in emulated.problems if not problem.startswith("lse")]
    for wrong in (expected * 1.02, expected.roll(1, dims=2), expected.roll(32, dims=3), expected * NAN):
        assert not rule.check(wrong.bfloat16(), lse)
    small_groups = expected.clone()
    small_groups[..., 32:64] *= 1.05
    assert not rule.check(small_groups.bfloat16(), lse)
    for wrong_lse in (lse + 9e-4, lse + 5e-5, torch.zeros_like(lse)):
        assert not rule.check(exact, wrong_lse)


def test_a_case_in_poisoned_outputs():
    case = gqa_case(seqlens=[5], h_q=4, h_kv=2, d=64, q_dtype=torch.float16)
    out, lse = case.outputs(padded=True)
    assert out.tensor.shape == (1, 1, 4, 64) and out.tensor.dtype == torch.float16
    assert lse.tensor.shape == (1, 1, 4) and lse.tensor.dtype == torch.float32
    assert out.tensor.isnan().all() and lse.tensor.isnan().all()
    with pytest.raises(ValueError, match="values: got 'odd'"):
        gqa_case(seqlens=[5], h_q=4, h_kv=2, values="odd")
