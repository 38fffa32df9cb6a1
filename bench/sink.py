"""The benchmarks of sink attention, forward and backward, over packed sequences, and of its routes for few queries.

Cases of one length have 65,536 tokens in total. All are causal, in bfloat16, with sinks. Each is checked against
float64 on some rows, keys and heads before it is timed. Bits are not compared for gradients that are sums over all
queries, nor for dq of a backward that is not deterministic, whose terms come in any order: they have a limit of their
relative error. cuDNN's attention, which has no sinks, and FlashAttention 3 and 4 run over the same tensors. FLOP count
pairs that are not masked: 4 d a pair and head forward, 10 d backward.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch

import cute_kernels.sink.op  # registers the operators of OPS
from bench import peers
from bench.gqa import heads_of_tokens
from bench.in_layer import Timing
from bench.run import RESULTS, Case, Work, finite
from bench.timing import Call, sets_to_outgrow_l2
from cute_kernels.sink import backward_spec
from cute_kernels.sink import spec as sink_spec
from cute_kernels.sink.plan import route
from cute_kernels.warm.shapes import GqaShape, PrefillShape
from tests.kit.compare import Comparison, relative_error
from tests.kit.draws import generator, integers
from tests.kit.sink_cases import GAINS, NAMES, Measure, SinkCase, SinkExpectation, sink_case
from tests.kit.values import query

TOKENS: Final = 65536
SETS: Final = 2
"""Number of input sets, each far larger than the L2 cache."""
BLOCK: Final = 64
"""Rows, or keys, that are checked together."""
GRADIENTS_LIMIT: Final = 5e-3
"""Largest relative error of sums over all queries: twice the error of rounding P and dS to bfloat16."""
FLASH: Final = ("fa3", "fa4")
OPS = torch.ops.cute_kernels


class ProductCase(Case):
    """A case that is bound by its products."""

    op: ClassVar[str] = "sink_attention"

    def rates(self, timing: Timing, ceilings: Any) -> dict[str, Any]:
        """Returns rates without the fraction of reads, which bounds none of these cases."""
        found = super().rates(timing, ceilings)
        return {name: found[name] for name in ("TFLOPs", "GBps")}


@dataclass(frozen=True)
class SinkAttentionCase(ProductCase):
    """A benchmark of sequences of one length.

    s              tokens of each sequence
    deterministic  gradients with the same bits in the same call
    sink_cost      whether to time it without sinks as well
    """

    s: int
    h_q: int
    h_kv: int
    d: int
    backward: bool = False
    window: int | None = None
    deterministic: bool = False
    sink_cost: bool = False

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return TOKENS // self.s

    @property
    def key(self) -> dict[str, Any]:
        """The entries of a record that identify the case."""
        key: dict[str, Any] = {"op": self.op, "pass": "backward" if self.backward else "forward", "batch": self.batch}
        key |= {"h_q": self.h_q, "h_kv": self.h_kv, "d": self.d, "s_q": self.s, "s_k": self.s}
        key |= {} if self.window is None else {"window": self.window}
        return {**key, "deterministic": True} if self.deterministic else key

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs that are not masked, over all sequences, for one head."""
        return self.batch * _pairs(self.s, self.window)

    @property
    def flops(self) -> int:
        """FLOP of the two products of the forward, or of the five of the backward."""
        return (10 if self.backward else 4) * self.d * self.h_q * self.pairs

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes: q, k, v and lse, with out (written); or these, dout and gradients."""
        queries, keys = (2 * self.batch * self.s * heads * self.d for heads in (self.h_q, self.h_kv))
        lse = 4 * self.batch * self.s * self.h_q
        return (4 * queries + 4 * keys if self.backward else 2 * queries + 2 * keys) + lse

    def specs(self, num_sms: int) -> list[Any]:
        """Returns the kernels; for a backward, all that ship."""
        if self.backward:
            return backward_spec.shipped_specs()
        shape = PrefillShape(self.h_q, self.h_kv, self.d, windows=(self.window,))
        return list(shape.specs([self.batch], [self.s], num_sms))

    def work(self, store: Any, family: str = "normal", rows_checked: int = 0) -> Work:
        """Makes the case on the device `store`."""
        inputs = [self._input(seed, store, family) for seed in range(SETS)]
        # a backward uses the output and log-sum-exp of a forward
        forwards = [_forward(one) for one in inputs] if self.backward else [(), ()]
        calls = [self._call(one, *forward) for one, forward in zip(inputs, forwards, strict=True)]
        results = calls[0]()
        normal = family == "normal"
        variants: dict[str, Any] = {}
        if self.sink_cost and normal:
            variants = {"us_without_sinks": {"": functools.partial(self._without_sinks, inputs)}}
        limits = {"dq": GRADIENTS_LIMIT if normal else math.inf} if self.backward and not self.deterministic else {}
        checks = _checks(inputs[0], forwards[0], results, normal)
        if self.backward and normal:
            checks += _check_sinks(inputs[0], forwards[0], results[3])
        return Work(
            _joined(self.name, checks, results),
            lambda: calls,
            results,
            NAMES if self.backward else RESULTS,
            limits,
            peers=lambda: peers.of_case(self, inputs, None, self._error),
            variants=variants,
        )

    def _input(self, seed: int, device: str, family: str) -> SinkCase:
        lengths = [(self.s, self.s)] * self.batch
        options: dict[str, Any] = {"window": self.window, "padded": False, "seed": seed, "device": device}
        case = sink_case(lengths, self.h_q, self.h_kv, self.d, **options)
        if family != "normal":
            gen = generator(seed, device)
            case.q.copy_(query(family, tuple(case.q.shape), gen))
            for tensor in (case.k, case.v):
                batch, length, heads, d = tensor.shape
                tensor.copy_(heads_of_tokens(family, (batch, heads, length, d), gen).transpose(1, 2))
        return case

    def _call(self, case: SinkCase, *forward: Any) -> Call:
        """Returns the call to time: the public forward, or the backward operator that autograd calls."""
        if not self.backward:
            return functools.partial(_forward, case)
        return functools.partial(_backward, case, self.deterministic, *forward)

    def _without_sinks(self, inputs: Sequence[SinkCase]) -> list[Call]:
        plain = [dataclasses.replace(one, s_aux=None) for one in inputs]
        return [self._call(one, *(_forward(one) if self.backward else ())) for one in plain]

    def _error(self, got: torch.Tensor, case: SinkCase) -> float:
        """Returns the relative error of the last rows of a peer's out or dq."""
        part = Part(case, 0, 0, self.s - BLOCK)
        expected = SinkExpectation.of(part.case)
        exact = expected.gradients[0] if self.backward else expected.out
        return relative_error(part.queries(got), exact.exact)


def _forward(case: SinkCase) -> Any:
    return cute_kernels.sink_attention(**case.arguments(), return_lse=True)


def _backward(case: SinkCase, deterministic: bool, out: torch.Tensor, lse: torch.Tensor) -> Any:
    tensors = (case.q, case.k, case.v, case.s_aux, case.cu_seqlens_q, case.cu_seqlens_k)
    numbers = (case.causal, case.window, case.softmax_scale, deterministic)
    return OPS.sink_attention_backward.default(case.d_out, out, lse, *tensors, *numbers, None)


# ---- packed sequences


@dataclass(frozen=True)
class PackedSinkCase(ProductCase):
    """A forward and backward of packed sequences, as in training.

    shortest, longest  bounds of the random lengths
    """

    h_q: int
    h_kv: int
    d: int
    window: int | None = None
    batch: int = 64
    shortest: int = 100
    longest: int = 4000

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence, the same in all runs."""
        gen = torch.Generator("cpu").manual_seed(0)
        drawn = integers(self.shortest, self.longest + 1, (self.batch,), gen)
        return [int(n) for n in drawn]

    @property
    def key(self) -> dict[str, Any]:
        """The entries of a record that identify the case."""
        key: dict[str, Any] = {"op": self.op, "pass": "packed", "batch": self.batch, "tokens": sum(self.lengths)}
        key |= {"h_q": self.h_q, "h_kv": self.h_kv, "d": self.d}
        return key if self.window is None else {**key, "window": self.window}

    @property
    def flops(self) -> int:
        """FLOP of the two products of the forward and the five of the backward."""
        return 14 * self.d * self.h_q * sum(_pairs(n, self.window) for n in self.lengths)

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes: q, k and v twice, out and lse written and read, dout, and gradients."""
        tokens = sum(self.lengths)
        return 2 * self.d * tokens * (6 * self.h_q + 6 * self.h_kv) + 8 * tokens * self.h_q

    def specs(self, num_sms: int) -> list[Any]:
        """Returns the kernels; of backwards all that ship."""
        return [*sink_spec.shipped_specs(), *backward_spec.shipped_specs()]

    def work(self, store: Any) -> Work:
        """Makes the case on the device `store`."""
        pairs = [(n, n) for n in self.lengths]
        options: dict[str, Any] = {"window": self.window, "packed": True, "padded": False, "device": store}
        inputs = [sink_case(pairs, self.h_q, self.h_kv, self.d, **options, seed=seed) for seed in range(SETS)]
        calls = [functools.partial(_both, one) for one in inputs]
        results = calls[0]()
        return Work(
            self._check(inputs[0], results),
            lambda: calls,
            results,
            (*RESULTS, *NAMES),
            {"dq": GRADIENTS_LIMIT},
            peers=lambda: peers.of_case(self, inputs, None, self._error),
        )

    def _check(self, case: SinkCase, results: Sequence[torch.Tensor]) -> Comparison:
        out, lse, dq, dk, dv, ds_aux = results
        checks = _check_sinks(case, (out, lse), ds_aux)
        for number in dict.fromkeys([0, self._longest, self.batch - 1]):
            one = _one_sequence(case, number)
            forward = [case.of_queries(t, number)[None] for t in (out, lse)]
            keys = [case.of_keys(t, number)[None] for t in (dk, dv)]
            checks += _checks(one, (), forward, True)
            checks += _checks(one, forward, [case.of_queries(dq, number)[None], *keys, ds_aux], True)
        return _joined(self.name, checks, results)

    @property
    def _longest(self) -> int:
        return self.lengths.index(max(self.lengths))

    def _error(self, got: torch.Tensor, case: SinkCase) -> float:
        """Returns the relative error of the last rows of a peer's dq of the longest sequence."""
        one = _one_sequence(case, self._longest)
        part = Part(one, 0, 0, one.lengths[0][0] - BLOCK)
        own = part.queries(case.of_queries(got, self._longest)[None])
        return relative_error(own, SinkExpectation.of(part.case).gradients[0].exact)


def _both(case: SinkCase) -> Any:
    out, lse = _forward(case)
    return (out, lse, *_backward(case, False, out, lse))


def _one_sequence(case: SinkCase, number: int) -> SinkCase:
    """Returns a packed sequence as a batch of one."""
    q, d_out = (case.of_queries(t, number)[None] for t in (case.q, case.d_out))
    k, v = (case.of_keys(t, number)[None] for t in (case.k, case.v))
    lengths = [case.lengths[number]]
    return dataclasses.replace(
        case, lengths=lengths, q=q, k=k, v=v, d_out=d_out, cu_seqlens_q=None, cu_seqlens_k=None
    )  # fmt: skip


def _pairs(s: int, window: int | None) -> int:
    """Returns the number of (query, key) pairs of a sequence that are not masked."""
    seen = min(s, window or s)
    return seen * (seen + 1) // 2 + (s - seen) * seen


# ---- checks


def _checks(
    case: SinkCase, forward: Sequence[torch.Tensor], results: Sequence[torch.Tensor], sums: bool
) -> list[Comparison]:
    """Compares results with float64: first, middle and last rows, of the first and the last KV head.

    Args:
        case: sequences of one length.
        forward: out and lse of a backward's forward; empty for a forward.
        results: out and lse, or dq, dk, dv and more.
        sums: whether to compare dk and dv that are sums over all queries too. The limit holds for N(0,1) numbers: terms
            of others may cancel.
    """
    checks, s = list[Comparison](), case.lengths[0][0]
    for sequence, head in dict.fromkeys([(0, 0), (len(case.lengths) - 1, case.k.shape[2] - 1)]):
        for first in dict.fromkeys([0, (s - BLOCK) // 2, s - BLOCK]):
            some = Part(case, sequence, head, first)
            expected = SinkExpectation.of(some.case)
            if not forward:
                out, lse = (some.queries(t) for t in results)
                checks.append(expected.check_forward(out, lse, name=f"rows from {first}"))
                continue
            dq, dk, dv, _ = results
            checks.append(expected.gradients[0].compare(some.queries(dq), f"dq from {first}"))
            if first == s - BLOCK:  # no earlier query sees these keys
                for name, measure, got in zip(NAMES[1:], expected.gradients[1:3], (dk, dv), strict=False):
                    last = Measure(*(t[:, first:] for t in measure))
                    part = some.keys(got)[:, first:]
                    checks.append(last.compare(part, f"{name} from {first}", gain=name in GAINS))
        if forward and sums:
            checks += _check_keys(Part(case, sequence, head, 0, s), forward, results)
    return checks


def _joined(name: str, checks: Sequence[Comparison], results: Sequence[torch.Tensor]) -> Comparison:
    """Joins all checks into one, which also requires that every element of the results is finite."""
    whole = Comparison(
        name,
        tuple(f"{check.name}: {problem}" for check in checks for problem in check.problems),
        rel_err=max(check.rel_err for check in checks),
        rel_err_baseline=max(check.rel_err_baseline for check in checks),
        worst=max(check.worst for check in checks),
        lse_err=max(check.lse_err for check in checks),
    )
    return finite(whole, *results)


class Part:
    """Some queries of a sequence, of the heads of one KV head, with all keys up to the last of these queries."""

    def __init__(self, whole: SinkCase, sequence: int, head: int, first: int, rows: int = BLOCK) -> None:
        ratio = whole.q.shape[2] // whole.k.shape[2]
        self.rows, self.end = slice(first, first + rows), first + rows
        self.sequence, self.head, self.group = sequence, head, slice(head * ratio, (head + 1) * ratio)
        self.case = dataclasses.replace(
            whole,
            lengths=[(rows, self.end)],
            q=self.queries(whole.q),
            d_out=self.queries(whole.d_out),
            k=self.keys(whole.k),
            v=self.keys(whole.v),
            s_aux=None if whole.s_aux is None else whole.s_aux[self.group],
        )

    def queries(self, t: torch.Tensor) -> torch.Tensor:
        """Returns the rows of these queries in a tensor that has a row for each query."""
        return t[self.sequence : self.sequence + 1, self.rows, self.group]

    def keys(self, t: torch.Tensor) -> torch.Tensor:
        """Returns the rows of these keys in a tensor that has a row for each key."""
        return t[self.sequence : self.sequence + 1, : self.end, self.head : self.head + 1]


def _check_keys(part: Part, forward: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[Comparison]:
    """Compares gradients of the first keys of a sequence, which are sums over all its queries.

    Expected values are in float64, from the output and log-sum-exp that the backward gets.
    """
    case = part.case
    q, d_out, rows_out, log_sum = (t[0].double() for t in (case.q, case.d_out, *map(part.queries, forward)))
    k, v = (t[0, :BLOCK, 0].double() for t in (case.k, case.v))
    total = log_sum if case.s_aux is None else torch.logaddexp(log_sum, case.s_aux.double())
    scores = torch.einsum("qrd,kd->qrk", q, k) * case.softmax_scale
    p = torch.exp(scores - total[..., None]).masked_fill_(~case.mask(0)[:, None, :BLOCK], 0.0)
    delta = (rows_out * d_out).sum(-1)
    ds = p * (torch.einsum("qrd,kd->qrk", d_out, v) - delta[..., None]) * case.softmax_scale
    expected = (torch.einsum("qrk,qrd->kd", ds, q), torch.einsum("qrk,qrd->kd", p, d_out))
    return [
        _within(f"{name} from 0", part.keys(got)[0, :BLOCK, 0], want)
        for name, want, got in zip(NAMES[1:], expected, results[1:3], strict=False)
    ]


def _check_sinks(case: SinkCase, forward: Sequence[torch.Tensor], ds_aux: torch.Tensor) -> list[Comparison]:
    """Compares gradients of the sinks, which are sums over all tokens."""
    if case.s_aux is None:
        return []
    expected = torch.zeros_like(case.s_aux, dtype=torch.float64)
    for number in range(len(case.lengths)):
        out, lse, d_out = (case.of_queries(t, number).double() for t in (*forward, case.d_out))
        expected -= (torch.sigmoid(case.s_aux.double() - lse) * (out * d_out).sum(-1)).sum(0)
    return [_within("ds_aux", ds_aux, expected)]


def _within(name: str, got: torch.Tensor, expected: torch.Tensor) -> Comparison:
    error = relative_error(got, expected)
    problems = () if error < GRADIENTS_LIMIT else (f"relative error {error:.2g}, needs {GRADIENTS_LIMIT}",)
    return Comparison(name, problems, error, 0.0, error / GRADIENTS_LIMIT, 0.0)


# ---- routing


@dataclass(frozen=True)
class RoutingCase(Case):
    """Few queries over a cache: the same call as a decode and as a prefill; the time is that of the chosen route."""

    batch: int
    s_q: int
    s_k: int
    h_q: int = 64
    h_kv: int = 8
    d: int = 64
    op: ClassVar[str] = "sink_attention"

    @property
    def key(self) -> dict[str, Any]:
        """The entries of a record that identify the case."""
        return {"op": self.op, "pass": "routing", **self.sizes, "s_k": self.s_k, "batch": self.batch}

    @property
    def sizes(self) -> dict[str, Any]:
        """The arguments of `route`."""
        return {"s_q": self.s_q, "h_q": self.h_q, "h_kv": self.h_kv, "d": self.d}

    @property
    def bytes_moved(self) -> int:
        """Bytes of queries and outputs, keys and values."""
        return 4 * self.batch * self.d * (self.s_q * self.h_q + self.s_k * self.h_kv)

    def specs(self, num_sms: int) -> list[Any]:
        """Returns the decoding kernel and the prefilling one."""
        plain: dict[str, Any] = {"kv_dtype": "bfloat16", "scales": None, "layout": "BSNH", "append": False}
        decode = GqaShape(self.h_q, self.h_kv, self.d, **plain, max_tokens=self.s_k)
        prefill = PrefillShape(self.h_q, self.h_kv, self.d)
        return [spec for shape in (decode, prefill) for spec in shape.specs([self.batch], [self.s_q], num_sms)]

    def rates(self, timing: Timing, ceilings: Any) -> dict[str, Any]:
        """Returns no rates: these cases only compare routes."""
        return {}

    def work(self, store: Any) -> Work:
        """Makes both routes, each checked."""
        lengths = [(self.s_q, self.s_k)] * self.batch
        sets = sets_to_outgrow_l2(self.bytes_moved, most=32)
        sizes: dict[str, Any] = {"h_q": self.h_q, "h_kv": self.h_kv, "d": self.d, "padded": False, "device": store}
        inputs = [sink_case(lengths, **sizes, seed=seed) for seed in range(sets)]
        routes = {name: functools.partial(_routed, inputs, name) for name in ("decode", "prefill")}
        expected = SinkExpectation.of(inputs[0])
        first = {name: make()[0]() for name, make in routes.items()}
        checks = [expected.check_forward(first[name][0], first[name][1], name) for name in routes]
        chosen = route(**self.sizes, dtype="bfloat16")
        return Work(
            max(checks, key=lambda check: (not check, check.worst)),
            routes[chosen],
            first[chosen],
            variants={f"{name}_us": {"": make} for name, make in routes.items()},
            facts={"route": chosen},
        )


def _routed(inputs: Sequence[SinkCase], name: str) -> list[Call]:
    if name == "decode":
        return [functools.partial(_decode, one) for one in inputs]
    # a differentiable call is never decoded
    return [
        functools.partial(
            OPS.sink_attention.default,
            *(one.q, one.k, one.v, one.s_aux, None, None),
            *(True, None, one.softmax_scale, False, True),
        )
        for one in inputs
    ]


def _decode(one: SinkCase) -> Any:
    options: dict[str, Any] = {"s_aux": one.s_aux, "softmax_scale": one.softmax_scale, "return_lse": True}
    return cute_kernels.gqa_decode(one.q, one.k, one.v, layout="BSNH", **options)


# ---- the cases; `must` is the project's goal, `ratio` against the fastest peer

_SMALL: Final[dict[str, Any]] = {"h_q": 64, "h_kv": 8, "d": 64}
_WIDE: Final[dict[str, Any]] = {"h_q": 32, "h_kv": 8, "d": 128}
_long = functools.partial(SinkAttentionCase, 16384, peers=FLASH)
_beside_cudnn = functools.partial(SinkAttentionCase, 16384, peers=("cudnn", *FLASH))
ATTENTION_CASES: Final = (
    _beside_cudnn(**_SMALL, must={"ratio": 1.03}, sustained=True, quick=True),
    _beside_cudnn(**_WIDE, must={"ratio": 1.05}),
    _long(**_SMALL, window=128, must={"us": 750.0}, quick=True),
    _long(**_WIDE, window=4096, must={"TFLOPs": 545.0}),
    _beside_cudnn(**_SMALL, backward=True, must={"ratio": 1.02}, sustained=True, quick=True, sink_cost=True),
    _beside_cudnn(**_WIDE, backward=True, must={"ratio": 1.02}),
    _long(**_SMALL, backward=True, window=128, must={"us": 2600.0}, quick=True, sink_cost=True),
    _long(**_WIDE, backward=True, window=4096),
    *(SinkAttentionCase(16384, **heads, backward=True, deterministic=True) for heads in (_SMALL, _WIDE)),
    *(
        SinkAttentionCase(4096, **heads, backward=backward, peers=("cudnn", *FLASH))
        for heads in (_SMALL, _WIDE)
        for backward in (False, True)
    ),
)
ROUTING_CASES: Final = tuple(
    RoutingCase(batch, s_q, s_k)
    for batch in (1, 32)
    for s_k in (64, 128, 256, 512, 1024, 2048, 8192)
    for s_q in (1, 2, 4, 8)
)
PACKED_CASES: Final = tuple(
    PackedSinkCase(**heads, window=window, peers=("fa4",), must={"ratio": 1.05})
    for heads in (_SMALL, _WIDE)
    for window in (None, 128)
)
CASES: Final = (*ATTENTION_CASES, *PACKED_CASES, *ROUTING_CASES)
