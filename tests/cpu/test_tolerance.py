"""The tolerance rule passes computations that are as good as a kernel's, and refuses errors.

`decode_by_warps` and `attend_by_tiles` round where `cute_kernels.gqa` and `cute_kernels.sink` do. Their results come in
float32, so that an error can be planted before the last rounding.
"""

import dataclasses
import math
from typing import Any

import pytest
import torch

from tests.kit.compare import Comparison, rounding_noise, rounding_variance
from tests.kit.gqa_cases import GqaCase, GqaExpectation, gqa_case
from tests.kit.mla_cases import generator
from tests.kit.sink_cases import GAINS, NAMES, SinkCase, SinkExpectation, sink_case

GROWTH = 8.0  # growth of scores over the maximum that P is relative to, in units of log2
LOG2_E, LN_2 = 1 / math.log(2), math.log(2)
BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
MISTAKES = (1.0012, 0.9988)


def decode_by_warps(
    case: Any, *, splits: int = 1, dropped: int | None = None, operand: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decodes a BNSH cache with scales of tokens and heads, of heads, or none. It skips key `dropped`, if any.

    A warp has 16 keys of 128, its own maximum, and float32 sums. P is rounded to q's dtype, or with scales of tokens P
    times the scale to bfloat16; `operand` overrides both. Codes are exact.
    """
    batch, s_q, h_q, d = case.q.shape
    h_kv = case.k_cache.shape[1]
    q = case.q.float().unflatten(2, (h_kv, -1)) * (d**-0.5 if case.softmax_scale is None else case.softmax_scale)
    token_scales = case.v_scale is not None and case.v_scale.numel() > h_kv
    usual = BFLOAT16 if token_scales else FLOAT16 if case.v_cache.element_size() == 1 else case.q.dtype
    operand = operand or usual
    one = torch.ones((h_kv, 1))
    sinks = torch.full((h_q,), -math.inf) if case.s_aux is None else case.s_aux.float()
    out, lse = torch.zeros(q.shape), torch.full(q.shape[:-1], -math.inf)
    for b, length in enumerate(case.cache_seqlens.tolist()):
        keys, codes = (cache[b, :, :length].float() for cache in (case.k_cache, case.v_cache))
        k_scale, v_scale = (
            one if scale is None else scale[b, :, :length].float() if token_scales else scale.float().view(-1, 1)
            for scale in (case.k_scale, case.v_scale)
        )
        position = torch.arange(length)
        for s in range(s_q):
            seen = position <= length - s_q + s
            if dropped is not None:
                seen &= position != dropped
            if not seen.any():
                continue
            scores = (q[b, s] @ keys.mT * k_scale[:, None]).masked_fill(~seen, -math.inf) * LOG2_E
            states = []
            for part in (position * splits // length) * 8 + position // 16 % 8 == torch.arange(8 * splits)[:, None]:
                if part.any():
                    states.append(of_warp(scores, codes, v_scale if token_scales else None, operand, position[part]))
            peaks, sums = torch.stack([state.peak for state in states]), torch.stack([state.total for state in states])
            peak = peaks.amax(dim=0)
            weights = torch.exp2(peaks - peak)
            total = (weights * sums).sum(dim=0)
            acc = sum((weight[..., None] * state.acc for weight, state in zip(weights, states, strict=True)), start=0.0)
            share = 1 / (total + torch.exp2(sinks.view(h_kv, -1) * LOG2_E - peak))
            out[b, s] = acc * (share * (1.0 if token_scales else v_scale))[..., None]
            lse[b, s] = (peak + torch.log2(total)) * LN_2
    return out.flatten(2, 3), lse.flatten(2)


@dataclasses.dataclass
class State:
    """State of a warp: the maximum that P is relative to, the sum, and values relative to that maximum."""

    peak: torch.Tensor
    total: torch.Tensor
    acc: torch.Tensor


def of_warp(
    scores: torch.Tensor, codes: torch.Tensor, v_scale: torch.Tensor | None, operand: torch.dtype, own: torch.Tensor
) -> State:
    """The state of a warp after its own keys, 16 at a time; scores (h_kv, ratio, keys) are in units of log2."""
    peak, total = torch.full(scores.shape[:2], -math.inf), torch.zeros(scores.shape[:2])
    acc = torch.zeros((*scores.shape[:2], codes.shape[-1]))
    for keys in own.split(16):
        s = scores[..., keys]
        highest = torch.maximum(s.amax(dim=-1), peak)
        if (highest > peak + GROWTH).any():
            alpha = torch.exp2(peak - torch.where(highest == -math.inf, 0.0, highest))
            peak, total, acc = highest, total * alpha, acc * alpha[..., None]
        p = torch.exp2(s - torch.where(peak == -math.inf, 0.0, peak)[..., None])
        total = total + p.sum(dim=-1)
        acc = acc + (p if v_scale is None else p * v_scale[:, None, keys]).to(operand).float() @ codes[:, keys]
    return State(peak, total, acc)


def attend_by_tiles(case: SinkCase) -> tuple[torch.Tensor, ...]:
    """`out`, lse, dq, dk, dv and ds_aux of one batch, computed in tiles of 64 keys from the last one."""
    dtype, ratio = case.q.dtype, case.q.shape[2] // case.k.shape[2]
    unit = case.softmax_scale * LOG2_E

    def short(values: torch.Tensor) -> torch.Tensor:
        return values.to(dtype).float()

    q, k, v, d_out = (t.float().transpose(1, 2) for t in (case.q, case.k, case.v, case.d_out))
    k, v = (t.repeat_interleave(ratio, dim=1) for t in (k, v))
    assert case.s_aux is not None
    sinks = case.s_aux.float()[:, None] * LOG2_E
    scores = (q @ k.mT).masked_fill(~case.mask(0), -math.inf) * unit
    reference, total = torch.full(q.shape[:-1], -math.inf), torch.zeros(q.shape[:-1])
    acc = torch.zeros_like(q)
    for first in range((k.shape[2] - 1) // 64 * 64, -1, -64):
        s = scores[..., first : first + 64]
        highest = s.amax(dim=-1)
        moved = torch.where(highest - reference > GROWTH, highest, reference)
        finite = torch.where(moved == -math.inf, 0.0, moved)
        alpha, reference = torch.exp2(reference - finite), moved
        p = torch.exp2(s - finite[..., None])
        total = total * alpha + p.sum(dim=-1)
        acc = acc * alpha[..., None] + short(p) @ v[:, :, first : first + 64]
    dead = total == 0
    share = torch.where(dead, 0.0, 1 / (total + torch.exp2(sinks - torch.where(dead, 0.0, reference))))
    out = acc * share[..., None]
    lse = torch.where(dead, -math.inf, (reference + torch.log2(total)) * LN_2)
    level = torch.where(dead, 0.0, torch.logaddexp2(reference + torch.log2(total), sinks.expand_as(total)))
    p = torch.where(dead[..., None], 0.0, torch.exp2(scores - level[..., None]))
    delta = (short(out) * d_out).sum(dim=-1)
    ds = short(p * (d_out @ v.mT - delta[..., None]))
    dq, dk, dv = ds @ k * case.softmax_scale, ds.mT @ q * case.softmax_scale, short(p).mT @ d_out
    dk, dv = (t.unflatten(1, (-1, ratio)).sum(dim=2) for t in (dk, dv))
    ds_aux = -(torch.where(dead, 0.0, torch.exp2(sinks - level)) * delta).sum(dim=(0, 2))
    return (out.transpose(1, 2), lse.transpose(1, 2), *(t.transpose(1, 2) for t in (dq, dk, dv)), ds_aux)


def bnsh(seqlens: list[int], **options: Any) -> GqaCase:
    return gqa_case(**{"seqlens": seqlens, "h_q": 8, "h_kv": 2, "d": 64, "padded": False, **options})


KINDS: dict[str, dict[str, Any]] = {
    "int8, scales of tokens": {"q_dtype": BFLOAT16},
    "int8, scales of tokens, float16": {"q_dtype": FLOAT16},
    "int8, scales of heads": {"q_dtype": FLOAT16, "k_scales": "per_head", "v_scales": "per_head"},
    "fp8, none": {"q_dtype": FLOAT16, "kv_dtype": "fp8", "k_scales": None, "v_scales": None},
    "float16": {"q_dtype": FLOAT16, "kv_dtype": "fp16"},
    "bfloat16": {"q_dtype": BFLOAT16, "kv_dtype": "bf16"},
}
LENGTHS: dict[str, list[int]] = {"one": [1] * 5, "few": [1, 2, 3, 17, 2], "some": [300, 0, 129, 64, 65], "many": [500]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_decode_as_good_as_the_kernel_passes(kind):
    """Each kind has twelve inputs: few and many keys, flat and peaked softmax, one split and several."""
    for seed, (lengths, values) in enumerate((n, v) for v in ("normal", "channels", "tokens") for n in LENGTHS):
        sizes = {"query_size": (3.0, 1.0, 0.2, 8.0)[seed // 3], "sink": ("none", "finite")[seed % 2]}
        case = bnsh(LENGTHS[lengths], values=values, seed=seed, s_q=1 + seed % 2, **sizes, **KINDS[kind])
        expected = GqaExpectation.of(case)
        for splits in (1, 3):
            out, lse = decode_by_warps(case, splits=splits)
            check = expected.check(out.to(case.q.dtype), lse, name=f"{lengths}, {values}, {splits}").require()
            assert check.worst < 0.8 and abs(check.gain_err) < 0.8 * check.gain_allowed and check.worst_lse < 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_a_gain_of_12_in_10000_is_found(kind):
    case = bnsh([400, 333, 129, 250] * 3, query_size=1.0, h_q=16, **KINDS[kind])
    expected, (out, lse) = GqaExpectation.of(case), decode_by_warps(case)
    assert expected.check(out.to(case.q.dtype), lse)
    for mistake in MISTAKES:
        check = expected.check((out * mistake).to(case.q.dtype), lse)
        assert "mean gain" in str(check), str(check)


@pytest.mark.parametrize("kind", [kind for kind, options in KINDS.items() if options["q_dtype"] == FLOAT16])
def test_a_float16_output_is_held_to_float16(kind):
    """A factor of 1.012 is less than 2 ulp of bfloat16 in most elements, and 12 ulp of float16."""
    case = bnsh([300, 33, 129, 64, 65], **KINDS[kind])
    expected, (out, lse) = GqaExpectation.of(case), decode_by_warps(case)
    check = expected.check((out * 1.012).half(), lse)
    assert any("elements are beyond" in problem for problem in check.problems), str(check)
    if kind != "int8, scales of tokens, float16":  # P is in bfloat16 there, which takes more rows
        assert expected.check((out * MISTAKES[0]).half(), lse).problems
        assert expected.check(out.bfloat16().half(), lse).problems, "rounded to bfloat16 on its way"


@pytest.mark.parametrize("kind", ["int8, scales of heads", "fp8, none", "float16"])
def test_p_in_bfloat16_is_no_float16(kind):
    """P in bfloat16 is eight times as coarse as a float16 result needs. Only scales of tokens excuse it."""
    case = bnsh([400, 333, 129, 250], **KINDS[kind])
    out, lse = decode_by_warps(case, operand=BFLOAT16)
    assert "elements are beyond" in str(GqaExpectation.of(case).check(out.half(), lse))


def test_a_log_sum_exp_is_held_to_2e_5():
    case = bnsh([300, 33, 129, 64, 65])
    expected, (out, lse) = GqaExpectation.of(case), decode_by_warps(case)
    assert expected.check(out.bfloat16(), lse)
    for mistake in (9e-4, 5e-5, -5e-5):
        wrong = lse.clone()
        wrong[2, 0, 5] += mistake
        assert expected.check(out.bfloat16(), wrong).problems[0].startswith("lse: 1 of 40 are off by more than 2e-05")
    far = dataclasses.replace(expected, lse=expected.lse + 500)
    assert far.check(out.bfloat16(), lse + 500)
    assert not far.check(out.bfloat16(), lse + 500.001)


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_is_missing_is_found(kind):
    """One key of 500 is missing, in an ordinary softmax. The log-sum-exp shows it, and so does the output by itself."""
    case = bnsh([500, 450], query_size=1.0, **KINDS[kind])
    expected, (out, lse) = GqaExpectation.of(case), decode_by_warps(case, dropped=77)
    problems = expected.check(out.to(case.q.dtype), lse).problems
    assert problems[0].startswith("out: ") and problems[-1].startswith("lse: ")


def test_heads_that_round_one_key_alike_are_one_draw_of_its_rounding():
    """Sequences have one key, so that P is 1 in all 64 heads and the rounding is that of the key's scale."""
    refused = 0
    for seed in range(8):
        case = bnsh([1, 1], h_q=64, h_kv=1, seed=seed)
        expected, (out, lse) = GqaExpectation.of(case), decode_by_warps(case)
        check = expected.check(out.bfloat16(), lse).require()
        # an emulation without error, or twice its gain would be allowed
        no_keys = expected.yardstick._replace(shared=torch.zeros_like(expected.yardstick.shared), out=expected.out)
        refused += "mean gain" in str(dataclasses.replace(expected, yardstick=no_keys).check(out.bfloat16(), lse))
        assert check.gain_allowed > 4 * rounding_noise(BFLOAT16) / math.sqrt(2)
    assert refused, "rows alone would have done: it shows nothing"


def test_rounding_variance_is_that_of_rounding():
    gen = generator(0)
    for dtype in (BFLOAT16, FLOAT16):
        values = torch.exp2(8 * torch.rand(200_000, generator=gen, dtype=torch.float64))
        errors = values.to(dtype).double() - values
        assert 0.97 < (errors / values).square().mean().sqrt() / rounding_noise(dtype) < 1.03
        assert 0.97 < (errors.square() / rounding_variance(values, dtype)).mean() < 1.03
    small = 2e-6 * torch.rand(200_000, generator=gen, dtype=torch.float64)  # multiples of 2^-24
    assert 0.97 < (small.half().double() - small).square().mean() / rounding_variance(small, FLOAT16).mean() < 1.03
    assert rounding_variance(torch.zeros(1, dtype=torch.float64), FLOAT16) == 0


SINKS: dict[str, dict[str, Any]] = {
    "full": {"lengths": [(130, 257)]},
    "window": {"lengths": [(200, 200)], "window": 64},
    "one key": {"lengths": [(65, 65)], "window": 1},
    "large sinks": {"lengths": [(65, 129)], "sinks": "large"},
    "not causal": {"lengths": [(9, 300)], "causal": False, "d": 128},
}


def compare_all(case: SinkCase, factor: float = 1.0) -> dict[str, Comparison]:
    """Compares each result, multiplied by `factor`, with its expectation."""
    expected, (out, lse, *gradients) = SinkExpectation.of(case), attend_by_tiles(case)
    checks = {"out": expected.check_forward((out * factor).to(case.q.dtype), lse)}
    for name, measure, found in zip(NAMES, expected.gradients, gradients, strict=True):
        got = found[:, None] * factor if name == "ds_aux" else (found * factor).to(case.q.dtype)
        checks[name] = measure.compare(got, name, gain=name in GAINS)
    return checks


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("kind", SINKS)
def test_attention_as_good_as_the_kernel_passes(kind, dtype):
    for seed in range(3):
        case = sink_case(**SINKS[kind], dtype=dtype, seed=seed, padded=False, device="cpu")
        for check in compare_all(case).values():
            check.require()
            assert check.worst < 0.9 and abs(check.gain_err) < 0.8 * check.gain_allowed


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_gains_of_attention_and_of_its_gradients_are_found(dtype):
    case = sink_case([(300, 300)], dtype=dtype, padded=False, device="cpu")
    for mistake in MISTAKES:
        checks = compare_all(case, mistake)
        for name in ("out", *GAINS):
            assert "mean gain" in str(checks[name])
    assert not any(compare_all(case, 1.012).values()) if dtype == FLOAT16 else True


def test_a_gain_counts_normal_numbers_alone():
    """Sinks of 20 to 40 leave outputs of 1e-9, which float16 rounds to 0: no gain may be judged on them."""
    case = sink_case([(65, 65)], dtype=FLOAT16, sinks="large", padded=False, device="cpu")
    check = SinkExpectation.of(case).check_forward(attend_by_tiles(case)[0].half())
    assert check and check.gain_err == 0 and check.gain_allowed == math.inf
