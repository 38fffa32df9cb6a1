"""The tolerance rule: how far a kernel's output may be from the float64 oracle.

The yardstick, or emulation, is the computation in plain torch in the dtype of the output (`bf16_yardstick` for MLA
decoding). A kernel with operands of that dtype and float32 accumulators cannot avoid losing that much. Below, u is the
rounding unit of the dtype (2^-8 for bfloat16, 2^-11 for float16, 2^-24 for float32), and ulp is the spacing of its
numbers at the oracle's value.

Elements. A group is the 128 output elements of a query head that share a cache scale, or fewer if fewer share one. E is
the largest error of the yardstick in the group, and sigma the noise of an element. Every element must satisfy

    |out - oracle| <= 2 max(E, 3 sigma) + 2 ulp
    sigma = 0.425 u sqrt(sum_k (P_k V_kc)^2),       P normalized, sink included; V_kc the value of key k, channel c

E alone would do if the elements of a group had one magnitude: it is then the largest of 128 draws of the rounding
error. But trained models have channels that are much larger than the others of their group. E is then *one* draw, often
close to 0, and in 1 to 40 of 10,000 such elements a computation as good as the emulation is beyond twice that draw.
Sigma is no draw but the standard deviation that rounding P alone causes. In groups without such a channel E is at least
5 sigma (medians of 5.3 to 10.8 measured), so that 3 sigma change nothing.

Channels. An element is allowed several standard deviations, and 2 ulp alone are up to 1.6% in bfloat16, so no single
element can tell an error of 1% in one channel from rounding. All of them together can. With 32 or more batch rows that
have keys, the root mean square of a channel's errors over rows and heads, each in units of what is allowed at its
element, must be at most twice that of sqrt(the emulation's error^2 + sigma^2).

Gain. An error that all elements share, such as a denominator that lacks a key or a factor of 1.0012, is too small to
see in one element. The slope of the output over the oracle o, fitted to each group g of each row r and averaged with
the weights of least variance,

    gain - 1 = sum_rg a_rg <error, o>_rg / sum_rg a_rg <o, o>_rg,     a_rg = <o, o>_rg / variance of <error, o>_rg

must be within max(3e-4, 4 S, 2 |gain of the emulation - 1|) of 0. S is its standard deviation, from three roundings:

    P          channels of a row share P, so their errors may all have one sign: a row counts with
               R_r = sum_g a_rg sum_c sigma_c |o_c|. Most rows have a P of their own, so R_r add up in squares
    keys       if a P is 1 in several rows, or its scale dominates what is rounded, heads and queries of a sequence
               round a key alike. Each key k therefore adds 0.425 u sum_rg a_rg P_rk <V_k, o_r>_g; keys add up in
               squares. This is small unless a sequence has few keys
    output     ulp / sqrt(12) at each element, in squares. Elements below the least normal number do not count, since
               those below half an ulp become 0

S falls with the square root of the rows: 4 S exceeds 3e-4 below about 300 rows in bfloat16 and 5 in float16. 3e-4 is a
quarter of the smallest error to be found, 1.2e-3, and above what float32 costs kernels: sums of 1000 products, each
rounded towards 0, are short by at most 1.2e-4. The factor is 4 because thousands of cases are compared: one draw in
16,000 is beyond it, and S is an upper bound, since the channels of a row seldom have one sign.

Log-sum-exp. |error| <= 2e-5 + 1e-6 |oracle| at each element. Kernels are within 3e-6 at logits of usual size. The
second term is 8 float32 roundings of the log-sum-exp itself, for logits in the hundreds.

Infinities and NaNs. They must stand in the oracle's places, with the oracle's sign.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from fp8_mla import FORMATS, QUANT_TILE, V_DIM, TokenFormat, reference_decode, row_views, slots_from_block_table, unpack
from fp8_mla.formats import format_of_cache, format_of_extra_cache
from fp8_mla.pages import gather
from fp8_mla.slots import valid_slots

LSE_ATOL: Final = 2e-5
LSE_RTOL: Final = 1e-6
P_CUT: Final = 2.0**-31
"""Relative to the largest probability of a row. With P in float16 smaller probabilities are 0."""
DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
NOISE_MULTIPLE: Final = 3.0
GAIN_LIMIT: Final = 3e-4
GAIN_SIGMAS: Final = 4.0
MIN_ROWS_OF_CHANNEL: Final = 32
"""Batch rows from which on the error of a channel is judged. A root mean square over 32 rows is within 25% of the true
one at two standard deviations. Heads do not count as rows: they share keys, so their errors may be equal."""
KEYS_PER_CHUNK: Final = 1 << 18
"""Number of keys that the emulation dequantizes at a time: 600 MB as float32, 1.1 GB of values as float64."""


class Yardstick(NamedTuple):
    """A decode in the dtype of its output, and the standard deviations of its rounding errors.

    out      (batch, s_q, h_q, d), the output of the emulation
    lse      (batch, s_q, h_q) float32, its log-sum-exp
    noise    (batch, s_q, h_q, d) float64, the standard deviation that rounding P has at each element
    shared   (batch, s_q, h_q) float64, what shared keys add to the variance of the sum that the gain is made of;
             the term of a sequence is spread over its rows
    """

    out: torch.Tensor
    lse: torch.Tensor
    noise: torch.Tensor
    shared: torch.Tensor

    def compare(self, out: torch.Tensor, expected: torch.Tensor, **options: Any) -> Comparison:
        """Applies the tolerance rule; the options are those of `compare`."""
        return compare(out, expected, self.out, noise=self.noise, shared=self.shared, **options)


@dataclass(frozen=True)
class Comparison:
    """Outcome of one comparison; true if it passed.

    problems   what is wrong, in words; empty when all is well
    rel_err    relative norm of the output's error, ``|out - oracle| / |oracle|`` over the finite elements
    rel_err_baseline   relative norm of the emulation's error
    worst      the largest error in units of what is allowed at that element; passes up to 1
    lse_err    largest absolute error of the log-sum-exp over the finite elements; 0.0 when none was compared
    worst_lse  the largest error of the log-sum-exp in units of what is allowed there
    gain_err   the mean gain of the output, less 1; 0.0 when it was not judged
    gain_allowed   the largest size that gain_err may have
    """

    name: str
    problems: tuple[str, ...]
    rel_err: float
    rel_err_baseline: float
    worst: float
    lse_err: float
    worst_lse: float = 0.0
    gain_err: float = 0.0
    gain_allowed: float = math.inf

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        figures = (
            f"relative error {self.rel_err:.2e} (emulation {self.rel_err_baseline:.2e}), "
            f"worst element at {self.worst:.2f} of its tolerance, gain off by {self.gain_err:.1e} "
            f"({self.gain_allowed:.1e} allowed), lse error {self.lse_err:.1e}, {self.worst_lse:.2f} of its tolerance"
        )
        return f"{self.name}: {'; '.join(self.problems) or 'ok'} [{figures}]"

    def require(self) -> Comparison:
        """Return self, or raise AssertionError with the whole message if the comparison failed."""
        if self.problems:
            raise AssertionError(str(self))
        return self


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the tensor as integers of the same size, in which NaNs compare by their bits."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """``|got - expected| / |expected|`` in float64; 0.0 for equal zeros, inf for an error on zeros, NaN for a NaN."""
    error = torch.linalg.vector_norm(got.double() - expected.double()).item()
    norm = torch.linalg.vector_norm(expected.double()).item()
    if norm == 0.0:
        return 0.0 if error == 0.0 else float("nan") if error != error else float("inf")
    return error / norm


def ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Spacing of a dtype's numbers at each value, subnormals included, as float64 of the values' shape."""
    kind = torch.finfo(dtype)
    least = math.frexp(kind.tiny)[1] - 1
    _, exponent = torch.frexp(values.double())  # |value| = m * 2**exponent with m in [0.5, 1)
    exponent = (exponent - 1).clamp_min(least).masked_fill(values == 0, least)
    return torch.exp2(exponent.double()) * kind.eps


def rounding_noise(dtype: torch.dtype) -> float:
    """Standard deviation of the relative error of rounding to a dtype: 1.66e-3 for bfloat16, 2.07e-4 for float16.

    It is u / sqrt(3) at a power of two, half of that just below the next, and u / sqrt(8 ln 2) in the mean square over
    evenly spread logarithms, u being half of the spacing at 1.
    """
    return torch.finfo(dtype).eps / 2 / math.sqrt(8 * math.log(2))


def rounding_variance(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Variance of the rounding error of each value. Values near 0 are rounded to a multiple of the least subnormal."""
    kind = torch.finfo(dtype)
    step = (values != 0).to(values.dtype) * ((kind.tiny * kind.eps) ** 2 / 12)
    return (rounding_noise(dtype) * values).square() + step


def compare(
    out: torch.Tensor,
    expected: torch.Tensor,
    baseline: torch.Tensor,
    *,
    noise: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    width: int | None = None,
    gain: bool = True,
    lse: torch.Tensor | None = None,
    expected_lse: torch.Tensor | None = None,
    name: str = "out",
) -> Comparison:
    """Applies the tolerance rule.

    Args:
        out: (..., d) bfloat16, float16 or float32, the output under test. Ulps are those of its dtype.
        expected: (..., d) float64, the oracle.
        baseline: (..., d), the emulation's result in the dtype of `out`. It excuses nothing where it is not finite.
        noise: (..., d) float64, sigma of the module's docstring. It excuses nothing where it is not finite. None means
            0, and channels are not judged.
        shared: (...), what keys add to the variance of the gain, as in `Yardstick`. None means 0.
        width: elements of a group. None means 128, or d if 128 does not divide d.
        gain: whether the mean gain is judged.
        lse: (...), the log-sum-exp under test. None: not compared.
        expected_lse: (...) float64, the log-sum-exp of the oracle.
        name: leads the message.

    Raises:
        ValueError: shapes differ, since comparing broadcast tensors proves nothing, or `out` has another dtype.
    """
    if out.dtype not in DTYPES:
        raise ValueError(f"{name}: got {out.dtype}, needs one of {', '.join(map(str, DTYPES))}")
    if not out.shape == expected.shape == baseline.shape:
        raise ValueError(f"{name}: got shapes {out.shape}, {expected.shape}, {baseline.shape}, needs three equal ones")
    if noise is not None and noise.shape != out.shape:
        raise ValueError(f"{name}: got noise of {noise.shape}, needs {out.shape}")
    if shared is not None and shared.shape != out.shape[:-1]:
        raise ValueError(f"{name}: got shared variances of {shared.shape}, needs {out.shape[:-1]}")
    width = width or default_width(out.shape[-1])
    got, want, base = out.double(), expected.double(), baseline.double()
    problems = _misplaced("out", got, want)

    finite = got.isfinite() & want.isfinite()
    clean = torch.where(finite, want, 0.0)
    error = torch.where(finite, got - want, 0.0)
    base_error = torch.where(base.isfinite() & want.isfinite(), (base - want).abs(), 0.0)
    sigma = torch.zeros_like(want) if noise is None else finite_or_zero(noise)
    spacing = ulp(clean, out.dtype)
    allowed = 2 * torch.maximum(_group_max(base_error, width), NOISE_MULTIPLE * sigma) + 2 * spacing
    excess = error.abs() / allowed
    worst = excess.max().item() if excess.numel() else 0.0
    if worst > 1:
        index = _place_of_largest(excess)
        count = int((excess > 1).sum())
        problems.append(
            f"out: {count} of {excess.numel()} elements are beyond 2 x the error of {_short(out.dtype)} + 2 ulp, the "
            f"worst at {index}: got {got[index].item():.6g}, needs {want[index].item():.6g} "
            f"+- {allowed[index].item():.2g}"
        )
    rows_with_keys = int((want != 0).flatten(1).any(dim=1).sum()) if want.ndim > 1 else 0
    if noise is not None and rows_with_keys >= MIN_ROWS_OF_CHANNEL:
        problems += _compare_channels(excess, base_error / allowed, sigma / allowed)
    found = _Gain(0.0, math.inf)
    if gain:
        rows_of_gain = Projections.of(clean, sigma, out.dtype, width)
        found = _mean_gain(rows_of_gain, error, shared)
        base_gain = _mean_gain(rows_of_gain, torch.where(base.isfinite() & finite, base - want, 0.0), shared)
        found = found._replace(allowed=max(found.allowed, 2 * abs(base_gain.deviation)))
    if abs(found.deviation) > found.allowed:
        problems.append(f"out: its mean gain is 1 {found.deviation:+.3g}, needs 1 +- {found.allowed:.2g}")

    lse_err = worst_lse = 0.0
    if lse is not None and expected_lse is not None:
        if lse.shape != expected_lse.shape:
            raise ValueError(f"{name}: got lse of {lse.shape}, needs {expected_lse.shape}")
        lse_problems, lse_err, worst_lse = _compare_lse(lse.double(), expected_lse.double())
        problems += lse_problems
    return Comparison(
        name=name,
        problems=tuple(problems),
        rel_err=relative_error(torch.where(finite, got, 0.0), clean),
        rel_err_baseline=relative_error(torch.where(finite & base.isfinite(), base, clean), clean),
        worst=worst,
        lse_err=lse_err,
        worst_lse=worst_lse,
        gain_err=found.deviation,
        gain_allowed=found.allowed,
    )


def check_decode(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    name: str = "mla_fp8_decode",
    **call: Any,
) -> Comparison:
    """Compares a decode's results with the float64 oracle.

    Args:
        out: (batch, s_q, h_q, 512), what the kernel wrote.
        lse: (batch, s_q, h_q) float32 or None.
        name: leads the message.
        call: q, kv_cache and the keyword arguments that say which keys count, as `fp8_mla.reference_decode` takes them.
    """
    expected, expected_lse = reference_decode(**call)
    yardstick = bf16_yardstick(**call)
    return yardstick.compare(out, expected, lse=lse, expected_lse=expected_lse, name=name)


def emulate_bf16_decode(**call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of `bf16_yardstick`, which takes the same arguments."""
    return bf16_yardstick(**call)[:2]


@torch.no_grad()
def bf16_yardstick(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    indices: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    s_aux: torch.Tensor | None = None,
    cache_format: str | None = None,
    cache_layout: str | None = None,
    extra_kv_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    extra_cache_format: str | None = None,
) -> Yardstick:
    """A decode in plain bf16, to measure what that precision costs; arguments as in `fp8_mla.reference_decode`.

    Keys dequantized to bf16, q in bf16, scores and sums in float32, probabilities (relative to the row's maximum)
    rounded to bf16 for the second product, output rounded to bf16. The noise of each element is computed in float64,
    where the square of a value of 1e38 is no overflow.
    """
    token_format = FORMATS[cache_format] if cache_format else format_of_cache(kv_cache.shape[-1], q.shape[-1])
    rows_of = row_views(kv_cache, token_format, cache_layout)
    num_pages, page_size, _ = rows_of[0].shape
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    batch, s_q, h_q, _ = q.shape
    second = None
    # each entry is a row of slots and, for each query that shares the row, which of its slots the query sees
    if indices is not None:
        slots, seen = _listed(indices, topk_length, num_pages * page_size)
        if extra_kv_cache is not None:
            assert extra_indices is not None
            extra_format = format_of_extra_cache(token_format, extra_kv_cache.shape[-1], extra_cache_format)
            extra_rows = row_views(extra_kv_cache, extra_format, cache_layout)
            num_slots = extra_rows[0].shape[0] * extra_rows[0].shape[1]
            extra_slots, extra_seen = _listed(extra_indices, extra_topk_length, num_slots)
            second = _Side(extra_format, extra_rows, extra_slots)
            seen = torch.cat([seen, extra_seen], dim=-1)
    else:
        if block_table is None or cache_seqlens is None:
            raise ValueError("block_table, cache_seqlens: got None, needs both where there are no indices")
        slots = slots_from_block_table(block_table, cache_seqlens, page_size, num_pages=num_pages)
        slots = slots[:, : max(int(cache_seqlens.max()), 0)] if batch else slots
        ahead = torch.arange(1 - s_q, 1, dtype=torch.int64, device=q.device) if causal else cache_seqlens.new_zeros(s_q)
        limit = cache_seqlens.long().clamp(0, block_table.shape[1] * page_size).unsqueeze(1) + ahead
        positions = torch.arange(slots.shape[1], dtype=torch.int64, device=q.device)
        seen = (slots >= 0).unsqueeze(1) & (positions < limit.unsqueeze(-1))
    queries = q.bfloat16().float().reshape(slots.shape[0], seen.shape[1] * h_q, -1)
    out = torch.empty((*queries.shape[:-1], V_DIM), dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(queries.shape[:-1], dtype=torch.float32, device=q.device)
    noise = torch.empty(out.shape, dtype=torch.float64, device=q.device)
    shared = torch.empty(lse.shape, dtype=torch.float64, device=q.device)
    whole = (out, lse, noise, shared)
    sink = None if s_aux is None else s_aux.float().repeat(seen.shape[1])
    sides = [_Side(token_format, rows_of, slots)] + ([second] if second is not None else [])
    step = max(1, KEYS_PER_CHUNK // max(1, seen.shape[2]))
    for start in range(0, len(slots), step):
        rows = slice(start, start + step)
        keys = torch.cat([side.keys(rows) for side in sides], dim=1)
        mask = seen[rows].repeat_interleave(h_q, dim=1)
        for tensor, part in zip(whole, _bf16_attention(queries[rows], keys, mask, scale, sink), strict=True):
            assert part is not None
            tensor[rows] = part
    return Yardstick(*(tensor.view(batch, s_q, h_q, *tensor.shape[2:]) for tensor in whole))


class _Side(NamedTuple):
    """One of the caches of a call: slots (rows, n), some of which are invalid."""

    token_format: TokenFormat
    rows: tuple[torch.Tensor, ...]
    slots: torch.Tensor

    def keys(self, rows: slice) -> torch.Tensor:
        """Keys (rows, n, d_qk) in float32, rounded to bf16; zeros where a slot is invalid."""
        slots = self.slots[rows]
        valid = valid_slots(slots, self.rows[0].shape[0] * self.rows[0].shape[1])
        tokens = gather(self.rows, slots[valid])
        keys = torch.zeros((*slots.shape, self.token_format.d_qk), dtype=torch.float32, device=slots.device)
        keys[valid] = unpack(tokens, torch.bfloat16, token_format=self.token_format).float()
        return keys


def _listed(
    indices: torch.Tensor, topk_length: torch.Tensor | None, num_slots: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of each query (batch * s_q, n), and which of them it sees (batch * s_q, 1, n)."""
    batch, s_q, topk = indices.shape
    slots = indices.reshape(batch * s_q, topk).long()
    seen = valid_slots(slots, num_slots)
    if topk_length is not None:
        length = topk_length if topk_length.ndim == 2 else topk_length.unsqueeze(1).expand(batch, s_q)
        seen &= torch.arange(topk, dtype=torch.int64, device=indices.device) < length.reshape(-1, 1)
    return slots, seen.unsqueeze(1)


def _bf16_attention(
    q: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, scale: float, sink: torch.Tensor | None
) -> Yardstick:
    """Attention of q (rows, m, d_qk) to the keys (rows, n, d_qk) that `seen` (rows, m, n) allows."""
    if keys.shape[1] == 0:
        zeros = q.new_zeros((*q.shape[:-1], V_DIM))
        no_lse = q.new_full(q.shape[:-1], -torch.inf)
        return Yardstick(zeros.bfloat16(), no_lse, zeros.double(), zeros[..., 0].double())
    # 0 x NaN is NaN, so keys that no query may see become zeros first.
    keys = torch.where(seen.any(dim=1).unsqueeze(-1), keys, 0.0)
    scores = torch.where(seen, q @ keys.mT * scale, -torch.inf)
    row_max = scores.amax(dim=-1, keepdim=True)
    shift = torch.where(row_max == -torch.inf, 0.0, row_max)
    weights = torch.exp(scores - shift)
    row_sum = weights.sum(dim=-1, keepdim=True)
    values = keys[..., :V_DIM]
    acc = torch.where(weights < P_CUT, 0.0, weights.bfloat16().float()) @ values
    lse = (shift + torch.log(row_sum)).squeeze(-1)
    share = row_sum.reciprocal()
    if sink is not None:
        share *= torch.sigmoid(lse - sink).unsqueeze(-1)
    out = torch.where(row_sum == 0, 0.0, acc * share)
    p, values = torch.where(row_sum == 0, 0.0, weights.double() * share), values.double()
    relative = rounding_noise(torch.bfloat16)
    noise = relative * (p.square() @ values.square()).sqrt()
    projections = Projections.of(finite_or_zero(out.double()), finite_or_zero(noise), torch.bfloat16, QUANT_TILE)
    key_errors = relative * projections.of_keys(p, values).sum(dim=-2, keepdim=True)
    shared = key_errors.square().sum(dim=-1).expand_as(lse) / lse.shape[-1]
    return Yardstick(out.bfloat16(), lse, noise, shared)


def finite_or_zero(values: torch.Tensor) -> torch.Tensor:
    """The values, with 0 in the place of those that are not finite."""
    return torch.where(values.isfinite(), values, 0.0)


def _compare_lse(got: torch.Tensor, want: torch.Tensor) -> tuple[list[str], float, float]:
    """Problems of a log-sum-exp, its largest error over finite elements, and that error in units of what is allowed."""
    problems = _misplaced("lse", got, want)
    finite = got.isfinite() & want.isfinite()
    error = torch.where(finite, (got - want).abs(), 0.0)
    if not error.numel():
        return problems, 0.0, 0.0
    allowed = LSE_ATOL + LSE_RTOL * torch.where(finite, want, 0.0).abs()
    excess = error / allowed
    worst = excess.max().item()
    if worst > 1:
        index = _place_of_largest(excess)
        problems.append(
            f"lse: {int((excess > 1).sum())} of {error.numel()} are off by more than {LSE_ATOL:g} + {LSE_RTOL:g} x "
            f"their size, the worst at {index}: got {got[index].item():.8g}, needs {want[index].item():.8g}"
        )
    return problems, error.max().item(), worst


class _Gain(NamedTuple):
    """The mean gain minus 1, and its largest allowed size."""

    deviation: float
    allowed: float


class Projections(NamedTuple):
    """Terms that each group of each row (..., groups) adds to the gain, which the module's docstring defines.

    want             (..., d), the oracle o, 0 where it is no normal number
    square           <o, o>
    p_bound          bound on the standard deviation of <error, o> that comes from rounding P
    output_variance  variance of <error, o> that comes from rounding the output
    weight           the weight a
    """

    want: torch.Tensor
    square: torch.Tensor
    p_bound: torch.Tensor
    output_variance: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def of(cls, want: torch.Tensor, sigma: torch.Tensor, dtype: torch.dtype, width: int) -> Projections:
        """Terms from an oracle and its noise, (..., d) float64 and finite, and the dtype of the output."""
        want = torch.where(want.abs() < torch.finfo(dtype).tiny, 0.0, want)
        square = _group_sum(want.square(), width)
        p_bound = _group_sum(sigma * want.abs(), width)
        output_variance = _group_sum((ulp(want, dtype) * want).square() / 12, width)
        weight = torch.where(square > 0, square / (p_bound.square() + output_variance), 0.0)  # the ulp is never 0
        return cls(want, square, p_bound, output_variance, weight)

    def of_keys(self, p: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """How much a relative error of each P changes the sum that the gain is made of, (..., rows, keys).

        p is normalized, (..., rows, keys), and values are (..., keys, d), both float64.
        """
        width = self.want.shape[-1] // self.weight.shape[-1]
        projected = (self.want * self.weight.repeat_interleave(width, dim=-1)) @ finite_or_zero(values).mT
        return finite_or_zero(p * projected)


def default_width(d: int) -> int:
    """Number of neighbouring elements of a row that are judged together."""
    return QUANT_TILE if d % QUANT_TILE == 0 else d


def _mean_gain(rows: Projections, error: torch.Tensor, shared: torch.Tensor | None) -> _Gain:
    """The gain that the module's docstring defines; `error` is (..., d), 0 where it is not finite."""
    total = (rows.weight * rows.square).sum()
    if total == 0:
        return _Gain(0.0, math.inf)
    width = error.shape[-1] // rows.weight.shape[-1]
    deviation = (rows.weight * _group_sum(error * rows.want, width)).sum() / total
    variance = (rows.weight * rows.p_bound).sum(dim=-1).square().sum() + (
        rows.weight.square() * rows.output_variance
    ).sum()
    if shared is not None:
        variance += finite_or_zero(shared).sum()
    return _Gain(deviation.item(), max(GAIN_LIMIT, GAIN_SIGMAS * (variance.sqrt() / total).item()))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compare_channels(error: torch.Tensor, base_error: torch.Tensor, sigma: torch.Tensor) -> list[str]:
    """The problem of the worst channel, if any. Errors are (..., d), in units of what each element is allowed."""
    leading = tuple(range(error.ndim - 1))
    found = error.square().mean(dim=leading).sqrt()
    limit = 2 * (base_error.square() + sigma.square()).mean(dim=leading).sqrt()
    excessive = found > limit
    if not excessive.any():
        return []
    # a channel of exact numbers allows no error, and an error of 0 there is 0 / 0
    index = int(torch.where(excessive, found / limit, 0.0).argmax())
    return [
        f"out: {int(excessive.sum())} of {len(found)} channels have an error beyond 2 x that of the yardstick over all "
        f"rows, the worst is {index}: root mean square {found[index].item():.3g}, needs {limit[index].item():.3g}, "
        f"in units of what is allowed at each element"
    ]


def _misplaced(name: str, got: torch.Tensor, want: torch.Tensor) -> list[str]:
    """One sentence for each kind of non-finite number that is missing or in a wrong place."""
    problems = []
    kinds = {"NaN": torch.isnan, "+inf": torch.isposinf, "-inf": torch.isneginf}
    for kind, test in kinds.items():
        wrong = test(got) != test(want)
        if wrong.any():
            index = _place_of_largest(wrong.int())
            problems.append(
                f"{name}: {kind} misplaced or missing in {int(wrong.sum())} of {wrong.numel()} places, "
                f"the first at {index}: got {got[index].item():.6g}, needs {want[index].item():.6g}"
            )
    return problems


def _group_max(error: torch.Tensor, width: int) -> torch.Tensor:
    """The largest value among each `width` consecutive elements, repeated for each of them."""
    if error.numel() == 0:
        return error
    groups = error.unflatten(-1, (-1, width))
    return groups.amax(dim=-1, keepdim=True).expand_as(groups).flatten(-2)


def _group_sum(values: torch.Tensor, width: int) -> torch.Tensor:
    """Sums of each `width` consecutive elements, (..., groups)."""
    return values.unflatten(-1, (-1, width)).sum(dim=-1)


def _place_of_largest(values: torch.Tensor) -> tuple[int, ...]:
    return tuple(map(int, torch.unravel_index(values.argmax(), values.shape)))
