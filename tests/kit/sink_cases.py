"""Cases of sink attention, and the tolerance rule for its output and gradients.

The oracle is written here for whole sequences in float64, so that it shares nothing with the package's reference. The
emulation computes as a kernel does, in q's dtype: scores and sums in float32, probabilities and gradients of scores
rounded to that dtype before their products, delta from the rounded output. The emulation's error, and the standard
deviation of its roundings at each element, are the yardsticks of `tests.kit.compare`.

Results are judged in ulps of their own dtype, ds_aux in those of float32. The mean gain is judged if the errors of rows
are independent: for out and dq, whose rows are queries, and for dv, whose rows are keys and which depends on P alone.
It is not judged for dk: the error of a query's delta is in all keys that it sees, so their errors do not add up in
squares. Nor is it for ds_aux, one number a head that is the remainder of sums that cancel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from cute_kernels.sink.reference import reference_sink_attention, reference_sink_attention_backward
from tests.kit.compare import Comparison, compare, rounding_noise, rounding_variance
from tests.kit.draws import generator, normal

SINKS: Final = ("some", "none", "absent", "extreme", "large")
"""Values of the sinks. some: N(0,1). none: -inf. absent: no tensor. extreme: -inf, +inf, 40, -40. large: 20 to 40."""
NAMES: Final = ("dq", "dk", "dv", "ds_aux")
LEAST_P: Final = torch.finfo(torch.float32).tiny
"""A GPU's exp2 gives 0 below this. It shows only in gradients of keys that every query scores low, about 1e-36 with
dout in the hundreds."""
GAINS: Final = ("dq", "dv")
"""Gradients whose mean gain is judged; the module's docstring says why."""


@dataclass
class SinkCase:
    """One call of `sink_attention` and the gradient of its output. The tensors are those of its docstring.

    lengths  (queries, keys) of each sequence
    d_out    gradient of the output, q's shape
    """

    lengths: list[tuple[int, int]]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    s_aux: torch.Tensor | None
    d_out: torch.Tensor
    causal: bool
    window: int | None
    softmax_scale: float
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None

    @property
    def packed(self) -> bool:
        """Whether sequences are packed, one after the other."""
        return self.cu_seqlens_q is not None

    @property
    def dtype(self) -> str:
        """The dtype of q, as a spec names it."""
        return str(self.q.dtype).removeprefix("torch.")

    def arguments(self) -> dict[str, Any]:
        """Arguments of `sink_attention` and of its reference by name, tensors detached."""
        names = ("q", "k", "v", "s_aux", "causal", "window", "softmax_scale", "cu_seqlens_q", "cu_seqlens_k")
        return {name: getattr(self, name) for name in names}

    def of_queries(self, t: torch.Tensor, sequence: int) -> torch.Tensor:
        """The rows of one sequence, from a tensor with a row per query."""
        return self._rows(t, sequence, 0)

    def of_keys(self, t: torch.Tensor, sequence: int) -> torch.Tensor:
        """The rows of one sequence, from a tensor with a row per key."""
        return self._rows(t, sequence, 1)

    def _rows(self, t: torch.Tensor, sequence: int, side: int) -> torch.Tensor:
        if not self.packed:
            return t[sequence]
        start = sum(pair[side] for pair in self.lengths[:sequence])
        return t[start : start + self.lengths[sequence][side]]

    def mask(self, sequence: int) -> torch.Tensor:
        """Which keys each query of a sequence sees, (queries, keys) bool."""
        s_q, s_k = self.lengths[sequence]
        position = torch.arange(s_q, dtype=torch.int64, device=self.q.device)[:, None] + s_k - s_q
        key = torch.arange(s_k, dtype=torch.int64, device=self.q.device)[None, :]
        seen = key <= position if self.causal else torch.ones_like(key <= position)
        return seen if self.window is None else seen & (key > position - self.window)


def sink_case(
    lengths: Sequence[tuple[int, int]],
    h_q: int = 4,
    h_kv: int = 2,
    d: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    *,
    causal: bool = True,
    window: int | None = None,
    packed: bool = False,
    sinks: str = "some",
    padded: bool = True,
    seed: int = 0,
    device: torch.device | str = "cuda",
) -> SinkCase:
    """A case of N(0,1) numbers with a softmax scale of 1.3 d^-0.5.

    Args:
        lengths: (queries, keys) of each sequence; all are equal unless packed.
        h_q: query heads, a multiple of `h_kv`.
        h_kv: heads of keys and values.
        dtype: torch.bfloat16 or torch.float16.
        causal: as the call takes it.
        window: as the call takes it.
        packed: whether sequences are packed one after the other; otherwise they are a batch.
        sinks: one of `SINKS`.
        padded: whether tensors are not contiguous, with NaN between their rows.
    """
    gen = generator(seed, device)

    def rows(side: int, heads: int) -> torch.Tensor:
        total = sum(pair[side] for pair in lengths)
        shape = (total, heads) if packed else (len(lengths), total // max(1, len(lengths)), heads)
        values = normal((*shape, d), gen).to(dtype)
        if not padded:
            return values
        wide = values.new_full((*shape, d + 8), math.nan)
        wide[..., :d] = values
        return wide[..., :d]

    q, k, v, d_out = rows(0, h_q), rows(1, h_kv), rows(1, h_kv), rows(0, h_q)
    drawn = normal((h_q,), gen)
    ends = [(0, 0), *itertools.accumulate(lengths, lambda a, b: (a[0] + b[0], a[1] + b[1]))]
    cu_q, cu_k = (
        torch.tensor([end[i] for end in ends], dtype=torch.int32, device=gen.device) if packed else None
        for i in range(2)
    )
    return SinkCase(
        list(lengths), q, k, v, _sinks(sinks, drawn), d_out, causal, window, 1.3 * d**-0.5, cu_q, cu_k
    )  # fmt: skip


def _sinks(kind: str, drawn: torch.Tensor) -> torch.Tensor | None:
    if kind not in SINKS:
        raise ValueError(f"sinks: got {kind!r}, needs one of {', '.join(SINKS)}")
    if kind == "absent":
        return None
    if kind == "none":
        return torch.full_like(drawn, -math.inf)
    if kind == "extreme":
        values = drawn.new_tensor([-math.inf, math.inf, 40.0, -40.0])
        return values.repeat(-(-len(drawn) // 4))[: len(drawn)]
    return 20 + 20 * torch.sigmoid(drawn) if kind == "large" else drawn


def reference_gradients(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """dq, dk, dv and ds_aux of the package's reference, computed from its unrounded out and lse."""
    out, lse = reference_sink_attention(q, k, v, s_aux, **options)
    return reference_sink_attention_backward(dout, q, k, v, out, lse, s_aux, **options)


class Measure(NamedTuple):
    """The values that a result is compared with.

    exact     the oracle's values in float64
    emulated  the values of the computation in q's dtype
    noise     the standard deviation of the emulation's roundings, float64
    """

    exact: torch.Tensor
    emulated: torch.Tensor
    noise: torch.Tensor

    def compare(self, got: torch.Tensor, name: str, **options: Any) -> Comparison:
        """Applies the tolerance rule; the options are those of `compare`."""
        return compare(got, self.exact, self.emulated, noise=self.noise, name=name, **options)


class SinkExpectation(NamedTuple):
    """The oracle's results of a case, with their yardsticks.

    out        q's shape
    lse        q's shape without d, float64
    gradients  dq, dk, dv, and ds_aux as (h_q, 1); without a tensor of sinks, ds_aux is that of sinks at -inf
    """

    out: Measure
    lse: torch.Tensor
    gradients: tuple[Measure, Measure, Measure, Measure]

    @classmethod
    @torch.no_grad()
    def of(cls, case: SinkCase) -> SinkExpectation:
        """Computes the oracle, the emulation and the noise, one sequence and KV head at a time."""
        h_q, h_kv = case.q.shape[-2], case.k.shape[-2]
        out, dq, dk, dv = (_blank(t) for t in (case.q, case.q, case.k, case.v))
        ds_aux = _blank(case.q.new_zeros((h_q, 1)))
        lse = torch.full(case.q.shape[:-1], -math.inf, dtype=torch.float64, device=case.q.device)
        sinks = case.q.new_full((h_q,), -math.inf, dtype=torch.float64) if case.s_aux is None else case.s_aux.double()
        for b, pair in enumerate(case.lengths):
            if 0 in pair:
                continue
            rows = [case.of_queries(t, b).unflatten(1, (h_kv, -1)) for t in (case.q, case.d_out)]
            keys = [case.of_keys(t, b) for t in (case.k, case.v)]
            for head in range(h_kv):
                group = slice(head * (h_q // h_kv), (head + 1) * (h_q // h_kv))
                q, d_out, k, v = (t[:, head] for t in (*rows, *keys))
                found = _one_head(_Operands(q, d_out, k, v, sinks[group]), case.mask(b), case)
                case.of_queries(lse, b)[:, group] = found.lse
                for measure, part in zip((out, dq), (found.out, found.dq), strict=True):
                    for whole, values in zip(measure, part, strict=True):
                        case.of_queries(whole, b)[:, group] = values
                for measure, part in zip((dk, dv), (found.dk, found.dv), strict=True):
                    for whole, values in zip(measure, part, strict=True):
                        case.of_keys(whole, b)[:, head] = values
                ds_aux.exact[group, 0] += found.ds_aux.exact
                ds_aux.emulated[group, 0] += found.ds_aux.emulated
                ds_aux.noise[group, 0] += found.ds_aux.noise.square()
        return cls(out, lse, (dq, dk, dv, ds_aux._replace(noise=ds_aux.noise.sqrt())))

    def check_forward(self, out: torch.Tensor, lse: torch.Tensor | None = None, name: str = "out") -> Comparison:
        """Compares an output and, if given, its log-sum-exp."""
        return self.out.compare(out, name, lse=lse, expected_lse=self.lse)

    def require_gradients(self, *gradients: torch.Tensor | None) -> None:
        """Raises AssertionError if dq, dk, dv or ds_aux is wrong. None is not checked."""
        for name, measure, got in zip(NAMES, self.gradients, gradients, strict=True):
            if got is not None:
                got = got.unsqueeze(-1) if name == "ds_aux" else got
                measure.compare(got, name, gain=name in GAINS).require()


def _blank(t: torch.Tensor) -> Measure:
    """Zeros for each result. The emulation's are float64, too, which holds every 16-bit number."""
    return Measure(*(torch.zeros(t.shape, dtype=torch.float64, device=t.device) for _ in range(3)))


class _Head(NamedTuple):
    """Results of a sequence and KV head: rows (s_q, ratio[, d]), keys (s_k, d), sinks (ratio,)."""

    out: Measure
    lse: torch.Tensor
    dq: Measure
    dk: Measure
    dv: Measure
    ds_aux: Measure


class _Operands(NamedTuple):
    """The inputs of a sequence and KV head: q, d_out (s_q, ratio, d), k, v (s_k, d), sinks (ratio,)."""

    q: torch.Tensor
    d_out: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor

    def to(self, dtype: torch.dtype) -> _Operands:
        return _Operands(*(t.to(dtype) for t in self))


class _Weights(NamedTuple):
    """Values that follow from scores: for keys (ratio, s_q, s_k), for sinks and log-sum-exp (ratio, s_q)."""

    p: torch.Tensor
    p_sink: torch.Tensor
    lse: torch.Tensor


def _weights(t: _Operands, mask: torch.Tensor, scale: float) -> _Weights:
    scores = (torch.einsum("qrd,kd->rqk", t.q, t.k) * scale).masked_fill_(~mask, -math.inf)
    lse = torch.logsumexp(scores, -1)
    sink = t.sinks.to(lse.dtype)[:, None].expand_as(lse)
    total = torch.logaddexp(lse, sink)
    dead = (lse == -math.inf) | (total == math.inf)
    safe = torch.where(dead, 0.0, total)
    p = torch.where(dead[..., None], 0.0, scores.sub_(safe[..., None]).exp_())
    p = torch.where(p < LEAST_P, 0.0, p)
    return _Weights(p, torch.where(dead, 0.0, torch.exp(sink - safe)), lse)


class _Products(NamedTuple):
    out: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    ds_aux: torch.Tensor
    ds: torch.Tensor


def _products(t: _Operands, weights: _Weights, scale: float, rounded: torch.dtype | None) -> _Products:
    """Output and gradients. With a dtype, operands of second products and the results are rounded to it."""

    def short(values: torch.Tensor) -> torch.Tensor:
        return values if rounded is None else values.to(rounded).to(values.dtype)

    p = weights.p
    # rounded relative to the largest of a row, as in kernels
    largest = p.amax(-1, keepdim=True)
    largest = torch.where(largest == 0, 1.0, largest)
    out = short(torch.einsum("rqk,kd->qrd", short(p / largest) * largest, t.v))
    delta = torch.einsum("qrd,qrd->rq", out, t.d_out)
    ds = p * (torch.einsum("qrd,kd->rqk", t.d_out, t.v) - delta[..., None])
    return _Products(
        out,
        short(torch.einsum("rqk,kd->qrd", short(ds), t.k) * scale),
        short(torch.einsum("rqk,qrd->kd", short(ds), t.q) * scale),
        short(torch.einsum("rqk,qrd->kd", short(p), t.d_out)),
        -(weights.p_sink * delta).sum(-1),
        ds,
    )


def _one_head(t: _Operands, mask: torch.Tensor, case: SinkCase) -> _Head:
    scale, dtype = case.softmax_scale, case.q.dtype
    single = t.to(torch.float32)
    emulated = _products(single, _weights(single, mask, scale), scale, dtype)
    t = t.to(torch.float64)
    weights = _weights(t, mask, scale)
    exact = _products(t, weights, scale, None)

    # variances of rounded values: P relative to the largest of a row, P itself, dS, and delta, in which the output and
    # its P are rounded
    largest = weights.p.amax(-1, keepdim=True)
    var_p = rounding_variance(weights.p / torch.where(largest == 0, 1.0, largest), dtype) * largest.square()
    var_ds = rounding_variance(exact.ds, dtype)
    var_delta = torch.einsum("qrd,qrd->rq", t.d_out.square(), exact.out.square()) * rounding_noise(dtype) ** 2
    var_delta += torch.einsum("rqk,rqk->rq", var_p, torch.einsum("qrd,kd->rqk", t.d_out, t.v).square())
    var_out = torch.einsum("rqk,kd->qrd", var_p, t.v.square())
    # an error of delta is the same along a row, so in dq these errors add up
    var_dq = torch.einsum("rqk,kd->qrd", var_ds, t.k.square())
    var_dq += torch.einsum("rqk,kd->qrd", weights.p, t.k).square() * var_delta.T[..., None]
    var_scores = var_ds + weights.p.square() * var_delta[..., None]
    var_dk = torch.einsum("rqk,qrd->kd", var_scores, t.q.square())
    var_dv = torch.einsum("rqk,qrd->kd", rounding_variance(weights.p, dtype), t.d_out.square())
    var_sinks = (weights.p_sink.square() * var_delta).sum(-1)
    noise = (var_out.sqrt(), var_dq.sqrt() * scale, var_dk.sqrt() * scale, var_dv.sqrt(), var_sinks.sqrt())
    out, dq, dk, dv, ds_aux = map(Measure, exact[:5], emulated[:5], noise)
    return _Head(out, weights.lse.T, dq, dk, dv, ds_aux)
