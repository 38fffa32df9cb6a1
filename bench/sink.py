"""The benchmarks of sink attention, forward and backward, and of its two routes for few queries; run by `gpu_check.py`.

Every case has 65,536 tokens in all, causal, in bfloat16, with sinks. It is checked against float64 on some rows, keys
and heads before it is timed, and what the timed graph writes has the bits of eager calls, in every set. One thing has
not: dq of a backward that is not deterministic is a sum whose terms come in any order; of it the timed graph's relative
error against an eager call is limited, as is that of sums over all queries against float64. cuDNN's attention (in
torch), which has no sinks, and FlashAttention 3 and 4, where they are installed, run over the same tensors in the same
process. Where a case has a number that it must reach, the record holds it with what was reached. FLOP are those of
pairs that are not masked: 4 d a pair and head forward, 10 d backward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import cute_kernels
from bench import flash_attention, records
from bench.flash_attention import FA4
from bench.in_layer import prepare, prepare_eager, time_together
from bench.peers import OURS, Peer, entries, ready, ways
from bench.timing import Expected, capture_stream, sets_to_outgrow_l2
from cute_kernels.gqa import op as gqa_op
from cute_kernels.sink import backward_spec
from cute_kernels.sink import spec as forward_spec
from cute_kernels.sink.plan import route
from tests.kit.compare import Comparison, relative_error
from tests.kit.sink_cases import GAINS, NAMES, Measure, SinkCase, SinkExpectation, sink_case

TOKENS = 65536
SETS = 2  # of inputs, each far larger than the L2 cache
BLOCK = 64  # rows, or keys, that are checked together
PEER = "cudnn"
GRADIENTS_LIMIT = 5e-3
"""Largest relative error of sums over all queries: twice the error of rounding P and dS to bfloat16."""
SINKLESS = "without sinks"
OPS = torch.ops.cute_kernels


@dataclass(frozen=True)
class SinkBench:
    """One benchmark.

    s              tokens of each sequence
    deterministic  gradients with the same bits in the same call
    must           figures of the record that the case has to reach
    peer           run cuDNN as well
    sustained      take the times under load as well
    sink_cost      time it without sinks as well
    """

    s: int
    h_q: int
    h_kv: int
    d: int
    backward: bool = False
    window: int | None = None
    deterministic: bool = False
    must: Mapping[str, float] = field(default_factory=dict)
    peer: bool = False
    sustained: bool = False
    quick: bool = False
    sink_cost: bool = False

    @property
    def batch(self) -> int:
        """Sequences."""
        return TOKENS // self.s

    @property
    def key(self) -> dict[str, Any]:
        """The fields that name the case in a results file."""
        key: dict[str, Any] = {"op": "sink_attention", "pass": "backward" if self.backward else "forward"}
        key |= {"batch": self.batch, "h_q": self.h_q, "h_kv": self.h_kv, "d": self.d, "s_q": self.s, "s_k": self.s}
        key |= {} if self.window is None else {"window": self.window}
        return {**key, "deterministic": True} if self.deterministic else key

    @property
    def name(self) -> str:
        """The name that `--only` matches and the table prints."""
        key = self.key
        window = "" if self.window is None else f" window {self.window}"
        same = " deterministic" if self.deterministic else ""
        return f"sink_attention {key['pass']} {self.batch}x{self.h_q} s {self.s} d {self.d}{window}{same}"

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs that are not masked, over all sequences, for one head."""
        seen = min(self.s, self.window or self.s)
        return self.batch * (seen * (seen + 1) // 2 + (self.s - seen) * seen)

    @property
    def flops(self) -> int:
        """The two products of the forward, or the five of the backward."""
        return (10 if self.backward else 4) * self.d * self.h_q * self.pairs

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes a call can move: q, k, v and lse, with out (written); or these, dout and gradients."""
        queries, keys = (2 * self.batch * self.s * heads * self.d for heads in (self.h_q, self.h_kv))
        lse = 4 * self.batch * self.s * self.h_q
        return (4 * queries + 4 * keys if self.backward else 2 * queries + 2 * keys) + lse


def _cases() -> tuple[SinkBench, ...]:
    """All cases; `must` is the project's goal, `ratio` against the fastest peer."""
    small: dict[str, Any] = {"h_q": 64, "h_kv": 8, "d": 64}
    wide: dict[str, Any] = {"h_q": 32, "h_kv": 8, "d": 128}
    long = functools.partial(SinkBench, 16384)
    return (
        long(**small, must={"ratio": 1.03}, peer=True, sustained=True, quick=True),
        long(**wide, must={"ratio": 1.05}, peer=True),
        long(**small, window=128, must={"us": 750.0}, quick=True),
        long(**wide, window=4096, must={"TFLOPs": 545.0}),
        long(**small, backward=True, must={"ratio": 1.02}, peer=True, sustained=True, quick=True, sink_cost=True),
        long(**wide, backward=True, must={"ratio": 1.02}, peer=True),
        long(**small, backward=True, window=128, must={"us": 2600.0}, quick=True, sink_cost=True),
        long(**wide, backward=True, window=4096),
        long(**small, backward=True, deterministic=True),
        long(**wide, backward=True, deterministic=True),
        *(SinkBench(4096, **heads, backward=way, peer=True) for heads in (small, wide) for way in (False, True)),
    )


CASES = _cases()


@dataclass(frozen=True)
class RoutingBench:
    """One benchmark of few queries over a cache: the same call as a decode and as a prefill."""

    batch: int
    s_q: int
    s_k: int
    h_q: int = 64
    h_kv: int = 8
    d: int = 64
    quick: bool = False

    @property
    def key(self) -> dict[str, Any]:
        """The fields that name the case in a results file."""
        return {"op": "sink_attention", "pass": "routing", **self.sizes, "s_k": self.s_k, "batch": self.batch}

    @property
    def sizes(self) -> dict[str, Any]:
        """The arguments of `route`."""
        return {"s_q": self.s_q, "h_q": self.h_q, "h_kv": self.h_kv, "d": self.d}

    @property
    def name(self) -> str:
        """The name that `--only` matches."""
        return f"sink_attention routing {self.batch}x{self.h_q} s_q {self.s_q} s_k {self.s_k} d {self.d}"

    def case(self, device: str, seed: int = 0) -> SinkCase:
        """One input set."""
        lengths = [(self.s_q, self.s_k)] * self.batch
        return sink_case(lengths, self.h_q, self.h_kv, self.d, padded=False, seed=seed, device=device)


ROUTING_CASES = tuple(
    RoutingBench(batch, s_q, s_k)
    for batch in (1, 32)
    for s_k in (64, 128, 256, 512, 1024, 2048, 8192)
    for s_q in (1, 2, 4, 8)
)


def specs() -> list[Any]:
    """The kernels of all cases."""
    decoding = []
    for bench in ROUTING_CASES:
        q = torch.empty((bench.batch, bench.s_q, bench.h_q, bench.d), dtype=torch.bfloat16, device="meta")
        keys = q.new_empty((bench.batch, bench.s_k, bench.h_kv, bench.d))
        given: dict[str, Any] = {"q": q, "k_cache": keys, "v_cache": keys, "layout": "BSNH"}
        request = gqa_op._Request(**{**dict.fromkeys(gqa_op._Request._fields), **given})
        decoding.append(gqa_op.decode_spec(request))
    return [*forward_spec.shipped_specs(), *backward_spec.shipped_specs(), *decoding]


def run(bench: SinkBench, ceilings: Mapping[str, float], device: str = "cuda") -> dict[str, Any]:
    """Check, time and record one case."""
    cases = [_inputs(bench, seed, device) for seed in range(SETS)]
    calls = [_call(bench, case) for case in cases]
    results = calls[0]()
    check = check_call(bench, cases[0], calls[0], results)

    def measure() -> dict[str, Any]:
        peers = {**(run_peer(bench, cases) if bench.peer else {}), **run_flash(bench, cases, results)}
        ours = {OURS: prepare(calls, expected=expect(bench, calls, results))}
        if bench.sink_cost:
            sinkless = [_call(bench, dataclasses.replace(case, s_aux=None)) for case in cases]
            ours[SINKLESS] = prepare(sinkless, expected=expect(bench, sinkless, sinkless[0]()))
        timed = {**ours, **ways(ours[OURS], peers)}
        timings = time_together(timed, sustained=set(timed) - {SINKLESS} if bench.sustained else False)
        timing = timings[OURS]
        speeds = {"TFLOPs": round(bench.flops / timing.us / 1e6, 1)}
        speeds["GBps"] = round(bench.bytes_moved / timing.us / 1e3, 1)
        if bench.sink_cost:
            speeds["us_without_sinks"] = round(timings[SINKLESS].us, 3)
        return {**timing.as_record(), **speeds, "peers": entries(peers, timings)}

    return records.with_must(records.record_case(bench.key, check, measure), bench.must)


def expect(bench: SinkBench, calls: Sequence[Callable[[], Any]], first: Sequence[torch.Tensor]) -> Expected:
    """What a graph of these calls must write; `first` is the result of the first. Every call allocates its results."""
    if not bench.backward:
        return Expected.of(("out", "lse"), calls[1:], checked=first)
    limits = {} if bench.deterministic else {"dq": GRADIENTS_LIMIT}
    return Expected.of(NAMES, calls[1:], checked=first, limits=limits)


def _inputs(bench: SinkBench, seed: int, device: str) -> SinkCase:
    lengths = [(bench.s, bench.s)] * bench.batch
    options: dict[str, Any] = {"window": bench.window, "padded": False, "seed": seed, "device": device}
    return sink_case(lengths, bench.h_q, bench.h_kv, bench.d, **options)


def _call(bench: SinkBench, case: SinkCase) -> functools.partial[Any]:
    """The call to time: the public forward, or the backward operator that autograd calls, over a forward made here."""
    if not bench.backward:
        return functools.partial(cute_kernels.sink_attention, **case.arguments(), return_lse=True)
    out, lse = cute_kernels.sink_attention(**case.arguments(), return_lse=True)
    tensors = (case.q, case.k, case.v, case.s_aux, None, None)
    numbers = (case.causal, case.window, case.softmax_scale, bench.deterministic)
    return functools.partial(OPS.sink_attention_backward.default, case.d_out, out, lse, *tensors, *numbers)


# ---- checks


def check_call(
    bench: SinkBench,
    case: SinkCase,
    call: functools.partial[Any],
    results: Sequence[torch.Tensor],
    *,
    sums: bool = True,
) -> Comparison:
    """Compares results with float64: first, middle and last rows, of the first and the last KV head.

    `sums`: those over all queries too. Their limit is that of N(0,1) numbers: of others, terms may cancel.
    """
    forward = call.args[1:3]  # arguments of a backward: out and lse
    checks = []
    for sequence, head in dict.fromkeys([(0, 0), (bench.batch - 1, bench.h_kv - 1)]):
        for first in dict.fromkeys([0, bench.s // 2, bench.s - BLOCK]):
            some = _Part(case, sequence, head, first)
            expected = SinkExpectation.of(some.case)
            if not bench.backward:
                out, lse = (some.queries(t) for t in results)
                checks.append(expected.check_forward(out, lse, name=f"rows from {first}"))
                continue
            dq, dk, dv, _ = results
            checks.append(expected.gradients[0].compare(some.queries(dq), f"dq from {first}"))
            if first == bench.s - BLOCK:  # no earlier query sees these keys
                for name, measure, got in zip(NAMES[1:], expected.gradients[1:3], (dk, dv), strict=False):
                    last = Measure(*(t[:, first:] for t in measure))
                    part = some.keys(got)[:, first:]
                    checks.append(last.compare(part, f"{name} from {first}", gain=name in GAINS))
        if bench.backward and sums:
            checks += _check_keys(_Part(case, sequence, head, 0, bench.s), forward, results)
    if bench.backward and sums:
        checks += _check_sinks(case, forward, results[3])
    finite = all(bool(t.isfinite().all()) for t in results)
    problems = [f"{check.name}: {problem}" for check in checks for problem in check.problems]
    return Comparison(
        bench.name,
        tuple(problems if finite else [*problems, "not every element of the results is finite"]),
        rel_err=max(check.rel_err for check in checks),
        rel_err_baseline=max(check.rel_err_baseline for check in checks),
        worst=max(check.worst for check in checks),
        lse_err=max(check.lse_err for check in checks),
    )


class _Part:
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
        """The rows of these queries in a tensor that has a row for each query."""
        return t[self.sequence : self.sequence + 1, self.rows, self.group]

    def keys(self, t: torch.Tensor) -> torch.Tensor:
        """The rows of these keys in a tensor that has a row for each key."""
        return t[self.sequence : self.sequence + 1, : self.end, self.head : self.head + 1]


def _check_keys(part: _Part, forward: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[Comparison]:
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
    for rows_out, d_out, log_sum in zip(forward[0], case.d_out, forward[1], strict=True):
        delta = (rows_out.double() * d_out.double()).sum(-1)
        expected -= (torch.sigmoid(case.s_aux.double() - log_sum.double()) * delta).sum(0)
    return [_within("ds_aux", ds_aux, expected)]


def _within(name: str, got: torch.Tensor, expected: torch.Tensor) -> Comparison:
    error = relative_error(got, expected)
    problems = () if error < GRADIENTS_LIMIT else (f"relative error {error:.2g}, needs {GRADIENTS_LIMIT}",)
    return Comparison(name, problems, error, 0.0, error / GRADIENTS_LIMIT, 0.0)


# ---- cuDNN


def run_peer(bench: SinkBench, cases: Sequence[SinkCase]) -> dict[str, Peer]:
    """CuDNN's attention in torch over the same tensors, without sinks."""
    part = _Part(dataclasses.replace(cases[0], s_aux=None), 0, 0, bench.s - BLOCK)
    expected = SinkExpectation.of(part.case)

    def make() -> Peer:
        # a backward runs on the stream of its forward, and is captured on this one
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), _on_capture_stream(cases[0].q.device):
            calls = [_peer_call(bench, case) for case in cases]
            first = calls[0]()
            got, exact = (first[0], expected.gradients[0]) if bench.backward else (first, expected.out)
            rel_err = relative_error(part.queries(got.transpose(1, 2)), exact.exact)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            try:
                return Peer(prepare(calls), rel_err)
            except RuntimeError as error:
                if not bench.backward:
                    raise
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:120]
                return Peer(prepare_eager(calls), rel_err, f"eager, not captured: {reason}")

    return {PEER: ready(make)}


def _on_capture_stream(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The stream of captures within the block, in order with what the caller's stream has before and after."""
    return _joined_stream() if device.type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def _joined_stream() -> Iterator[None]:
    own, outer = capture_stream(), torch.cuda.current_stream()
    own.wait_stream(outer)
    with torch.cuda.stream(own):
        yield
    outer.wait_stream(own)


def _peer_call(bench: SinkBench, case: SinkCase) -> Callable[[], Any]:
    """Torch's attention, or its gradients from one forward whose graph is kept."""
    options: dict[str, Any] = {"is_causal": True, "scale": case.softmax_scale, "enable_gqa": True}
    q, k, v = (t.transpose(1, 2).detach().requires_grad_(bench.backward) for t in (case.q, case.k, case.v))
    attention = functools.partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, **options)
    if not bench.backward:
        return attention
    d_out = case.d_out.transpose(1, 2)
    return functools.partial(torch.autograd.grad, attention(), (q, k, v), d_out, retain_graph=True)


# ---- FlashAttention


def run_flash(bench: SinkBench, cases: Sequence[SinkCase], results: Sequence[torch.Tensor]) -> dict[str, Peer]:
    """FA3 (forward) and FA4 over the same tensors, where they are installed; not the order of sums that bits need.

    Both take sinks in bfloat16. `results` are those of our first call, which the oracle has passed.
    """
    if bench.deterministic:
        return {}
    makers: dict[str, tuple[Any, Callable[..., Peer]]] = {"fa4": (flash_attention.fa4(), _fa4_peer)}
    if not bench.backward:
        makers = {"fa3": (flash_attention.fa3(), _fa3_peer), **makers}
    return {
        name: ready(functools.partial(make, bench, cases, results, library))
        for name, (library, make) in makers.items()
        if not isinstance(library, str)
    }


def _fa3_peer(bench: SinkBench, cases: Sequence[SinkCase], results: Sequence[torch.Tensor], operators: Any) -> Peer:
    """Its build takes packed sequences alone."""
    calls = [functools.partial(flash_attention.fa3_forward, operators, **_fa3_arguments(case)) for case in cases]
    out = calls[0]().view_as(cases[0].q)
    return Peer(prepare(calls), _flash_error(bench, cases[0], (out,), results), "sinks in bfloat16, packed sequences")


def _fa3_arguments(case: SinkCase) -> dict[str, Any]:
    (s_q, s_k), batch = case.lengths[0], len(case.lengths)
    device = case.q.device
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    return {
        **{name: t.flatten(0, 1) for name, t in (("q", case.q), ("k", case.k), ("v", case.v))},
        "cu_seqlens_q": starts * s_q,
        "cu_seqlens_k": starts * s_k,
        "max_seqlen_q": s_q,
        "max_seqlen_k": s_k,
        "softmax_scale": case.softmax_scale,
        "s_aux": None if case.s_aux is None else case.s_aux.bfloat16(),
        **flash_attention.window_sizes(case.window),
    }


def _fa4_peer(bench: SinkBench, cases: Sequence[SinkCase], results: Sequence[torch.Tensor], fa4: FA4) -> Peer:
    """Forward, or the backward of its own forward; it gives no gradient of sinks."""
    with fa4.compiling():
        calls = [_fa4_call(bench, case, fa4) for case in cases]
        got = calls[0]()
    note = "sinks in bfloat16, which get no gradient" if bench.backward else "sinks in bfloat16"
    return Peer(prepare(calls), _flash_error(bench, cases[0], got, results), note)


def _fa4_call(bench: SinkBench, case: SinkCase, fa4: FA4) -> Callable[[], Any]:
    options: dict[str, Any] = {"softmax_scale": case.softmax_scale, "causal": True}
    if case.window is not None:
        options |= {"window_size_left": case.window - 1, "window_size_right": 0}
    sinks = None if case.s_aux is None else case.s_aux.bfloat16()
    forward = functools.partial(fa4.forward, case.q, case.k, case.v, **options, learnable_sink=sinks, return_lse=True)
    if not bench.backward:
        return lambda: forward()[:2]
    out, lse = forward()[:2]
    return functools.partial(fa4.backward, case.q, case.k, case.v, out, case.d_out, lse, **options)


def _flash_error(
    bench: SinkBench, case: SinkCase, got: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
) -> float:
    """The larger relative error: of the last rows of out or dq against float64, of all dk and dv against ours."""
    part = _Part(case, 0, 0, bench.s - BLOCK)
    expected = SinkExpectation.of(part.case)
    exact = expected.gradients[0] if bench.backward else expected.out
    errors = [relative_error(part.queries(got[0]), exact.exact)]
    if bench.backward:
        errors += [relative_error(own, ours) for own, ours in zip(got[1:3], results[1:3], strict=True)]
    return max(errors)


# ---- routing


def run_routing(bench: RoutingBench, ceilings: Mapping[str, float], device: str = "cuda") -> dict[str, Any]:
    """Checks and times both routes of one size; "us" in the record is the time of the route that a call takes."""
    moved = 4 * bench.batch * bench.d * (bench.s_q * bench.h_q + bench.s_k * bench.h_kv)
    cases = [bench.case(device, seed) for seed in range(sets_to_outgrow_l2(moved, most=32))]
    routes = {name: [_routed(case, name) for case in cases] for name in ("decode", "prefill")}
    expected = SinkExpectation.of(cases[0])
    checks, results = [], {}
    for name, calls in routes.items():
        results[name] = out, lse = calls[0]()
        checks.append(expected.check_forward(out, lse, name=name))
    chosen = route(**bench.sizes, dtype="bfloat16")

    def measure() -> dict[str, Any]:
        graphs = {
            name: prepare(calls, expected=Expected.of(("out", "lse"), calls[1:], checked=results[name]))
            for name, calls in routes.items()
        }
        timings = time_together(graphs, sustained=False)
        both = {f"{name}_us": round(timing.us, 3) for name, timing in timings.items()}
        return {**timings[chosen].as_record(), "route": chosen, **both}

    worst = max(checks, key=lambda check: (not check, check.worst))
    return records.record_case(bench.key, worst, measure)


def _routed(case: SinkCase, name: str) -> Callable[[], Any]:
    if name == "decode":
        options: dict[str, Any] = {"s_aux": case.s_aux, "softmax_scale": case.softmax_scale, "return_lse": True}
        return functools.partial(cute_kernels.gqa_decode, case.q, case.k, case.v, layout="BSNH", **options)
    tensors = (case.q, case.k, case.v, case.s_aux, None, None)
    # a differentiable call is never decoded
    return functools.partial(OPS.sink_attention.default, *tensors, True, None, case.softmax_scale, False, True)
