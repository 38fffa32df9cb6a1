"""The tolerance rule: how far a kernel's output may be from the float64 oracle.

The yardstick is the same computation in plain bf16 (`emulate_bf16_decode`): what a kernel with bf16 operands and
float32 accumulators cannot avoid losing. It is read in three ways.

Elements. Per group of 128 output elements of one query head (they share a cache scale), with E the largest error of the
emulation in the group and sigma the noise of the element itself, every element must satisfy

    |out - oracle| <= 2 max(E, 3 sigma) + 2 ulp,    ulp = the spacing of bf16 numbers at the oracle's value
    sigma = 1.66e-3 sqrt(sum_k (P_k V_kc)^2),       P normalized, sink included; V_kc the value of key k, channel c

E alone would do if the elements of a group were of one magnitude: it is then the largest of 128 draws of the rounding
error. But a channel that stands out, as trained models have them, is alone in its group; E is then *one* draw, often
next to nothing, and in 1 to 40 of 10,000 such elements a computation as good as the emulation is beyond twice that.
Sigma is no draw: it is the standard deviation that rounding P to bf16, and nothing else, has there. In groups without
such a channel E is 5 sigma or more (medians of 5.3 to 10.8 measured), so that 3 sigma change nothing there.

Channels. Elements are allowed several standard deviations each, and 2 ulp alone are up to 1.6%: none of them can tell
an error of 1% in one channel from rounding. All of them together can. With 32 or more batch rows that have keys (rows
have errors of their own), the root mean square of a channel's errors over rows and heads, each in units of what is
allowed at its element, must be at most twice that of sqrt(the emulation's error^2 + sigma^2).

The rest. A log-sum-exp must be within 1e-3 absolute; infinities and NaNs must stand in the same places, with the same
sign.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from fp8_mla import QUANT_TILE, V_DIM, as_pages, reference_decode, slots_from_block_table, unpack, valid_slots

LSE_ATOL: Final = 1e-3
BF16_FRACTION_BITS: Final = 7
BF16_MIN_EXPONENT: Final = -126
ROUNDING_NOISE: Final = 2.0**-8 / math.sqrt(8 * math.log(2))
"""Standard deviation of the relative error of rounding to bf16, 1.66e-3: 2^-8 / sqrt(3) at a power of two, half of that
just below the next, and this in the mean square over evenly spread logarithms."""
NOISE_MULTIPLE: Final = 3.0
MIN_ROWS_OF_CHANNEL: Final = 32
"""Batch rows from which on the error of a channel is judged: a root mean square of so many is within 25% of the true
one, at two standard deviations. Heads do not count: they share keys, so their errors may be one and the same."""
KEYS_PER_CHUNK: Final = 1 << 18
"""Keys that the emulation holds dequantized at a time: 600 MB as float32, 1.1 GB of values as float64."""


class Yardstick(NamedTuple):
    """What `bf16_yardstick` returns.

    out     (batch, s_q, h_q, 512) bfloat16, the output of the emulation
    lse     (batch, s_q, h_q) float32, its log-sum-exp
    noise   (batch, s_q, h_q, 512) float64, the standard deviation that rounding P to bf16 has at each element
    """

    out: torch.Tensor
    lse: torch.Tensor
    noise: torch.Tensor


@dataclass(frozen=True)
class Comparison:
    """Outcome of one comparison. True in a boolean context when it passed.

    problems   what is wrong, in words; empty when all is well
    rel_err    relative norm of the output's error, ``|out - oracle| / |oracle|`` over the finite elements
    rel_err_baseline   the same of the bf16 emulation
    worst      the largest error in units of what is allowed at that element; passes up to 1
    lse_err    largest absolute error of the log-sum-exp over the finite elements; 0.0 when none was compared
    """

    name: str
    problems: tuple[str, ...]
    rel_err: float
    rel_err_baseline: float
    worst: float
    lse_err: float

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        figures = (
            f"relative error {self.rel_err:.2e} (bf16 emulation {self.rel_err_baseline:.2e}), "
            f"worst element at {self.worst:.2f} of its tolerance, lse error {self.lse_err:.1e}"
        )
        return f"{self.name}: {'; '.join(self.problems) or 'ok'} [{figures}]"

    def require(self) -> Comparison:
        """Return self, or raise AssertionError with the whole message if the comparison failed."""
        if self.problems:
            raise AssertionError(str(self))
        return self


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """``|got - expected| / |expected|`` in float64; 0.0 for equal zeros, inf for an error on zeros, NaN for a NaN."""
    error = torch.linalg.vector_norm(got.double() - expected.double()).item()
    norm = torch.linalg.vector_norm(expected.double()).item()
    if norm == 0.0:
        return 0.0 if error == 0.0 else float("nan") if error != error else float("inf")
    return error / norm


def bf16_ulp(values: torch.Tensor) -> torch.Tensor:
    """Spacing of bf16 numbers at each value: 2 ** (exponent - 7), subnormals included. Float64 of the same shape."""
    _, exponent = torch.frexp(values.double())  # |value| = m * 2**exponent with m in [0.5, 1)
    exponent = (exponent - 1).clamp_min(BF16_MIN_EXPONENT).masked_fill(values == 0, BF16_MIN_EXPONENT)
    return torch.exp2((exponent - BF16_FRACTION_BITS).double())


def compare(
    out: torch.Tensor,
    expected: torch.Tensor,
    baseline: torch.Tensor,
    *,
    noise: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    expected_lse: torch.Tensor | None = None,
    name: str = "out",
) -> Comparison:
    """Apply the tolerance rule.

    Args:
        out: (..., d) any floating dtype, the output under test.
        expected: (..., d) float64, the oracle.
        baseline: (..., d), the same computation in plain bf16. Where it is not finite it excuses nothing.
        noise: (..., d) float64, sigma of the module's docstring. None: 0, and channels are not judged. Where it is not
            finite it excuses nothing.
        lse: (...), the log-sum-exp under test. None: not compared.
        expected_lse: (...) float64, the oracle's.
        name: leads the message.

    Raises:
        ValueError: shapes differ: a comparison of broadcast tensors proves nothing.
    """
    if not out.shape == expected.shape == baseline.shape:
        raise ValueError(f"{name}: got shapes {out.shape}, {expected.shape}, {baseline.shape}, needs three equal ones")
    if noise is not None and noise.shape != out.shape:
        raise ValueError(f"{name}: got noise of {noise.shape}, needs {out.shape}")
    got, want, base = out.double(), expected.double(), baseline.double()
    problems = _misplaced("out", got, want)

    finite = got.isfinite() & want.isfinite()
    error = torch.where(finite, (got - want).abs(), 0.0)
    base_error = torch.where(base.isfinite() & want.isfinite(), (base - want).abs(), 0.0)
    sigma = torch.zeros_like(want) if noise is None else torch.where(noise.isfinite(), noise, 0.0)
    ulp = bf16_ulp(torch.where(finite, want, 0.0))
    allowed = 2 * torch.maximum(_group_max(base_error), NOISE_MULTIPLE * sigma) + 2 * ulp
    excess = error / allowed
    worst = excess.max().item() if excess.numel() else 0.0
    if worst > 1:
        at = _unravel(int(excess.argmax()), excess.shape)
        count = int((excess > 1).sum())
        problems.append(
            f"out: {count} of {excess.numel()} elements are beyond 2 x the bf16 error + 2 ulp, the worst at {at}: "
            f"got {got[at].item():.6g}, needs {want[at].item():.6g} +- {allowed[at].item():.2g}"
        )
    rows_with_keys = int((want != 0).flatten(1).any(dim=1).sum()) if want.ndim > 1 else 0
    if noise is not None and rows_with_keys >= MIN_ROWS_OF_CHANNEL:
        problems += _compare_channels(excess, base_error / allowed, sigma / allowed)

    lse_err = 0.0
    if lse is not None and expected_lse is not None:
        if lse.shape != expected_lse.shape:
            raise ValueError(f"{name}: got lse of {lse.shape}, needs {expected_lse.shape}")
        lse_problems, lse_err = _compare_lse(lse.double(), expected_lse.double())
        problems += lse_problems
    clean = torch.where(finite, want, 0.0)
    return Comparison(
        name=name,
        problems=tuple(problems),
        rel_err=relative_error(torch.where(finite, got, 0.0), clean),
        rel_err_baseline=relative_error(torch.where(finite & base.isfinite(), base, clean), clean),
        worst=worst,
        lse_err=lse_err,
    )


def check_decode(
    out: torch.Tensor, lse: torch.Tensor | None, *, name: str = "mla_fp8_decode", **call: Any
) -> Comparison:
    """Compare a decode's results with the float64 oracle.

    Args:
        out: (batch, s_q, h_q, 512), what the kernel wrote.
        lse: (batch, s_q, h_q) float32 or None.
        name: leads the message.
        call: q, kv_cache and the keyword arguments that say which keys count, as `fp8_mla.reference_decode` takes them.
    """
    expected, expected_lse = reference_decode(**call)
    yardstick = bf16_yardstick(**call)
    return compare(out, expected, yardstick.out, noise=yardstick.noise, lse=lse, expected_lse=expected_lse, name=name)


def emulate_bf16_decode(**call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of `bf16_yardstick`, with the same arguments."""
    out, lse, _ = bf16_yardstick(**call)
    return out, lse


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
) -> Yardstick:
    """The decode in plain bf16, to measure what that precision costs; arguments as in `fp8_mla.reference_decode`.

    Keys dequantized to bf16, q in bf16, scores and sums in float32, probabilities (relative to the row's maximum)
    rounded to bf16 for the second product, output rounded to bf16. The noise of each element is computed in float64,
    where the square of a value of 1e38 is no overflow.
    """
    pages = as_pages(kv_cache)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    batch, s_q, h_q, _ = q.shape
    num_slots = pages.shape[0] * pages.shape[1]
    # Every item of a work list is a row of slots and, for the queries that share it, which of the slots they see.
    if indices is not None:
        slots = indices.reshape(batch * s_q, -1).long()
        seen = valid_slots(slots, num_slots)
        if topk_length is not None:
            length = topk_length if topk_length.ndim == 2 else topk_length.unsqueeze(1).expand(batch, s_q)
            seen &= torch.arange(slots.shape[1], device=q.device) < length.reshape(-1, 1)
        seen = seen.unsqueeze(1)
    else:
        if block_table is None or cache_seqlens is None:
            raise ValueError("block_table, cache_seqlens: got None, needs both where there are no indices")
        slots = slots_from_block_table(block_table, cache_seqlens, pages.shape[1], num_pages=pages.shape[0])
        slots = slots[:, : max(int(cache_seqlens.max()), 0)] if batch else slots
        ahead = torch.arange(s_q, device=q.device) - s_q + 1 if causal else torch.zeros(s_q, device=q.device)
        limit = cache_seqlens.long().clamp(0, block_table.shape[1] * pages.shape[1]).unsqueeze(1) + ahead
        positions = torch.arange(slots.shape[1], device=q.device)
        seen = (slots >= 0).unsqueeze(1) & (positions < limit.unsqueeze(-1))
    queries = q.bfloat16().float().reshape(slots.shape[0], seen.shape[1] * h_q, -1)
    out = torch.empty((*queries.shape[:-1], V_DIM), dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(queries.shape[:-1], dtype=torch.float32, device=q.device)
    noise = torch.empty(out.shape, dtype=torch.float64, device=q.device)
    sink = None if s_aux is None else s_aux.float().repeat(seen.shape[1])
    for rows in _chunks(slots.shape[0], max(1, KEYS_PER_CHUNK // max(1, slots.shape[1]))):
        mask = seen[rows].repeat_interleave(h_q, dim=1)
        out[rows], lse[rows], noise[rows] = _bf16_attention(queries[rows], pages, slots[rows], mask, scale, sink)
    shape = (batch, s_q, h_q)
    return Yardstick(out.view(*shape, V_DIM), lse.view(shape), noise.view(*shape, V_DIM))


def _bf16_attention(
    q: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attend with q (rows, m, 576) to slots (rows, n) where seen (rows, m, n).

    Returns out (rows, m, 512), lse (rows, m) and noise (rows, m, 512).
    """
    safe = torch.where(seen.any(dim=1), slots, 0)
    if pages.shape[0] == 0 or slots.shape[1] == 0:
        zeros = q.new_zeros((*q.shape[:-1], V_DIM))
        return zeros.bfloat16(), q.new_full(q.shape[:-1], -torch.inf), zeros.double()
    keys = unpack(pages[safe // pages.shape[1], safe % pages.shape[1]], torch.bfloat16).float()
    # A product with 0 does not silence a NaN that nobody may see: such keys become zeros first.
    keys = torch.where(seen.any(dim=1).unsqueeze(-1), keys, 0.0)
    scores = torch.where(seen, q @ keys.mT * scale, -torch.inf)
    row_max = scores.amax(dim=-1, keepdim=True)
    shift = torch.where(row_max == -torch.inf, 0.0, row_max)
    weights = torch.exp(scores - shift)
    row_sum = weights.sum(dim=-1, keepdim=True)
    values = keys[..., :V_DIM]
    acc = weights.bfloat16().float() @ values
    variance = weights.double().square() @ values.double().square()
    lse = (shift + torch.log(row_sum)).squeeze(-1)
    share = row_sum.reciprocal()
    if sink is not None:
        share *= torch.sigmoid(lse - sink).unsqueeze(-1)
    out = torch.where(row_sum == 0, 0.0, acc * share)
    noise = torch.where(row_sum == 0, 0.0, ROUNDING_NOISE * variance.sqrt() * share)
    return out.bfloat16(), lse, noise


def _chunks(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _compare_lse(got: torch.Tensor, want: torch.Tensor) -> tuple[list[str], float]:
    """Problems, and the largest absolute error over the elements that are finite in both."""
    problems = _misplaced("lse", got, want)
    finite = got.isfinite() & want.isfinite()
    error = torch.where(finite, (got - want).abs(), 0.0)
    largest = error.max().item() if error.numel() else 0.0
    if largest > LSE_ATOL:
        at = _unravel(int(error.argmax()), error.shape)
        problems.append(
            f"lse: {int((error > LSE_ATOL).sum())} of {error.numel()} are off by more than {LSE_ATOL:g}, the worst at "
            f"{at}: got {got[at].item():.8g}, needs {want[at].item():.8g}"
        )
    return problems, largest


def _compare_channels(error: torch.Tensor, base_error: torch.Tensor, sigma: torch.Tensor) -> list[str]:
    """Problem of the worst channel, if there is one; all (..., d), in units of what is allowed at each element."""
    leading = tuple(range(error.ndim - 1))
    found = error.square().mean(dim=leading).sqrt()
    limit = 2 * (base_error.square() + sigma.square()).mean(dim=leading).sqrt()
    beyond = found > limit
    if not beyond.any():
        return []
    # a channel of exact numbers allows nothing, and 0 / 0 is no excess
    at = int(torch.where(beyond, found / limit, 0.0).argmax())
    return [
        f"out: {int(beyond.sum())} of {len(found)} channels have an error beyond 2 x that of bf16 over all rows, the "
        f"worst is {at}: root mean square {found[at].item():.3g}, needs {limit[at].item():.3g}, in units of what is "
        f"allowed at each element"
    ]


def _misplaced(name: str, got: torch.Tensor, want: torch.Tensor) -> list[str]:
    """One sentence for each kind of non-finite number that does not stand where it should."""
    problems = []
    kinds = {"NaN": torch.isnan, "+inf": torch.isposinf, "-inf": torch.isneginf}
    for kind, test in kinds.items():
        wrong = test(got) != test(want)
        if wrong.any():
            at = _unravel(int(wrong.flatten().int().argmax()), wrong.shape)
            problems.append(
                f"{name}: {kind} misplaced or missing in {int(wrong.sum())} of {wrong.numel()} places, "
                f"the first at {at}: got {got[at].item():.6g}, needs {want[at].item():.6g}"
            )
    return problems


def _group_max(error: torch.Tensor) -> torch.Tensor:
    """The largest value among each 128 consecutive elements (or all of a shorter row), in every one of its places."""
    width = QUANT_TILE if error.shape[-1] % QUANT_TILE == 0 else error.shape[-1]
    if error.numel() == 0:
        return error
    groups = error.unflatten(-1, (-1, width))
    return groups.amax(dim=-1, keepdim=True).expand_as(groups).flatten(-2)


def _unravel(index: int, shape: torch.Size) -> tuple[int, ...]:
    place = []
    for size in reversed(shape):
        index, rest = divmod(index, size)
        place.append(rest)
    return tuple(reversed(place))
