"""The kernels of sink attention, launched one by one, against float64 in plain torch."""

import itertools
from typing import Any

import pytest
import torch

from cute_kernels.runtime.compile import get_kernel
from cute_kernels.sink import backward_spec
from cute_kernels.sink import spec as forward_module
from cute_kernels.sink.backward_spec import (
    PADDING,
    SinkBackwardSpec,
    SinkFinishSpec,
    SinkPrepareSpec,
    SinkQueryGradSpec,
)
from cute_kernels.sink.spec import SinkForwardSpec, SinkWorkListSpec
from cute_kernels.testing.inputs import generator

NO_WINDOW = 1 << 30
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
EPSILON = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def kernel_specs() -> list:
    """What the tests here need: the shipped specs, other tiles and float16."""
    forward = [forward_spec("float16", *variant) for variant in PLAIN]
    layouts = [("float16", False, False), *[("bfloat16", *layout) for layout in LAYOUTS]]
    ways = [
        SinkBackwardSpec(dtype, d, packed, window, **way)
        for way in WAYS.values()
        for d in (64, 128)
        for dtype, packed, window in layouts
    ]
    backward = [spec for spec in ways if not spec.can_implement()]
    grads = [query_grad_spec(t, d, p, w, way) for way in WAYS for d in (64, 128) for t, p, w in layouts]
    small = [*grads, *[SinkFinishSpec("float16", d) for d in (64, 128)]]
    prepare = [SinkPrepareSpec("float16", d, fused=fused) for d in (64, 128) for fused in (True, False)]
    return [*forward, *TUNING, *GROUPED, *backward, *small, *prepare]


def query_grad_spec(dtype: str, d: int, packed: bool, window: bool, way: str) -> SinkQueryGradSpec:
    """The variant that is tested with a way; some ways bring one of their own, where it is for d."""
    spec = SinkQueryGradSpec(dtype, d, packed, window, **QUERY_GRADS.get(way, {}))
    return SinkQueryGradSpec(dtype, d, packed, window) if spec.can_implement() else spec


def forward_spec(dtype: str, d: int, packed: bool, window: int | None) -> SinkForwardSpec:
    return SinkForwardSpec.for_launch(dtype, d, packed=packed, window=window)


PLAIN = [(d, packed, window) for d in (64, 128) for packed in (False, True) for window in (None, 100, 600)]
TUNING = [
    SinkForwardSpec("bfloat16", 64, warpgroups=2),
    SinkForwardSpec("bfloat16", 64, turns=False),
    SinkForwardSpec("bfloat16", 64, warpgroups=3, emulated=2),
    SinkForwardSpec("bfloat16", 128, tile=64),
    SinkForwardSpec("bfloat16", 64, window=True, tile=96, warpgroups=3),
]
LAYOUTS = list(itertools.product((False, True), (False, True)))  # packed, window
GROUPED = [
    SinkForwardSpec("bfloat16", d, packed, True, warpgroups, tile, False, grouped=True)
    for d, warpgroups, tile in [(64, 3, 64), (64, 3, 96), (64, 2, 96), (64, 2, 192), (64, 4, 64), (128, 2, 64)]
    for packed in (False, True)
]
QUERY_GRADS: dict[str, dict[str, Any]] = {
    "apart ahead": {"tile": 96, "grouped": True},
    "apart skips": {"grouped": True},
}
WAYS: dict[str, dict[str, bool]] = {
    "fused": {},
    "apart": {"fused": False},
    "late": {"late": True},
    "helper": {"helper": True},
    "late bulk": {"late": True, "bulk": True},
    "late ahead bulk": {"late": True, "ahead": True, "bulk": True},
    "helper ahead": {"helper": True, "ahead": True},
    "helper ahead bulk": {"helper": True, "ahead": True, "bulk": True},
    "helper ahead held": {"helper": True, "ahead": True, "held": True},
    "apart ahead": {"fused": False, "ahead": True},
    "apart skips": {"fused": False, "skips": True},
    "apart skips held": {"fused": False, "skips": True, "held": True},
}


class Case:
    """Sequences (s_q, s_k), packed or of one length, with heads, mask and sinks."""

    def __init__(
        self, lengths, h_q, h_kv, d, dtype="bfloat16", causal=True, window=None, packed=False, sinks="some", seed=0
    ):
        self.lengths, self.d, self.dtype, self.causal, self.window, self.packed = (
            lengths,
            d,
            dtype,
            causal,
            window,
            packed,
        )
        self.small_sections = False
        self.h_q, self.h_kv, self.scale = h_q, h_kv, 1.3 * d**-0.5
        gen = generator(seed, "cuda")

        def rows(side, heads):
            total = sum(pair[side] for pair in lengths)
            shape = (total, heads, d) if packed else (len(lengths), total // len(lengths), heads, d)
            wide = torch.randn((*shape[:-1], d + 8), generator=gen, device="cuda").to(DTYPES[dtype])
            return wide[..., :d]  # not contiguous

        self.q, self.k, self.v, self.d_out = rows(0, h_q), rows(1, h_kv), rows(1, h_kv), rows(0, h_q)
        self.sink = torch.randn(h_q, generator=gen, device="cuda")
        if sinks == "none":
            self.sink.fill_(-torch.inf)
        if sinks == "extreme":
            values = torch.tensor([-torch.inf, torch.inf, 40.0, -40.0], device="cuda")
            self.sink = values[torch.arange(h_q, device="cuda") % 4].contiguous()
        starts = [(0, 0), *itertools.accumulate(lengths, lambda a, b: (a[0] + b[0], a[1] + b[1]))]
        self.cu_q, self.cu_k = (
            torch.tensor([s[i] for s in starts], dtype=torch.int32, device="cuda") for i in range(2)
        )
        self.max_q, self.max_k = max(a for a, _ in lengths), max(b for _, b in lengths)

    def of_queries(self, t, b):
        return t[self.cu_q[b] : self.cu_q[b + 1]] if self.packed else t[b]

    def of_keys(self, t, b):
        return t[self.cu_k[b] : self.cu_k[b + 1]] if self.packed else t[b]

    def mask(self, b):
        s_q, s_k = self.lengths[b]
        position = torch.arange(s_q, device="cuda")[:, None] + s_k - s_q
        key = torch.arange(s_k, device="cuda")[None, :]
        seen = key <= position if self.causal else torch.ones(s_q, s_k, dtype=torch.bool, device="cuda")
        return seen & (key > position - self.window) if self.window is not None else seen

    def reference(self, b, dtype=torch.float64):
        """(out, lse without the sink) of sequence b."""
        q, k, v = (
            f(t, b).to(dtype) for f, t in ((self.of_queries, self.q), (self.of_keys, self.k), (self.of_keys, self.v))
        )
        return attention(q, k, v, self.sink.to(dtype), self.mask(b), self.scale)

    def section(self, heads):
        """Pairs of a sequence and a head that are worked on together: of one sequence each, or of all."""
        return heads if self.small_sections else heads * len(self.lengths)

    def work_list(self, keys: bool, rows: int) -> torch.Tensor | None:
        if not self.packed:
            return None
        total = int((self.cu_k if keys else self.cu_q)[-1])
        work = torch.full((total // rows + len(self.lengths) + 1, 2), -7, dtype=torch.int32, device="cuda")
        window = NO_WINDOW if self.window is None else self.window
        longest = self.max_q if keys else self.max_k
        get_kernel(SinkWorkListSpec(keys))(self.cu_q, self.cu_k, work, rows, window, int(self.causal), max(longest, 1))
        return work


def attention(q, k, v, sink, mask, scale):
    """Queries (s_q, h_q, d), k and v (s_k, h_kv, d) -> out, lse without the sink."""
    ratio = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    scores = scores.masked_fill(~mask, -torch.inf)
    lse = torch.logsumexp(scores, -1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
    total = torch.logaddexp(lse, sink[:, None].expand_as(lse))
    safe = torch.where(total == -torch.inf, 0.0, total)
    weights = torch.where((total == torch.inf)[..., None], 0.0, torch.exp(scores - safe[..., None]))
    return torch.einsum("hqk,khd->qhd", weights, v), lse.transpose(0, 1)


def run_forward(case: Case, spec: SinkForwardSpec | None = None, ctas: int | None = None) -> tuple:
    """(out, lse) of the kernel; outputs poisoned before."""
    spec = spec or forward_spec(case.dtype, case.d, case.packed, case.window)
    out = torch.full((*case.q.shape[:-1], case.d + 8), float("nan"), dtype=case.q.dtype, device="cuda")[..., : case.d]
    lse = torch.full(case.q.shape[:-1], float("nan"), device="cuda")
    counters = torch.zeros(2, dtype=torch.int32, device="cuda")
    ctas = ctas or torch.cuda.get_device_properties(0).multi_processor_count
    packed = (case.cu_q, case.cu_k, case.work_list(False, spec.rows)) if case.packed else (None, None, None)
    get_kernel(spec)(
        case.q, case.k, case.v, case.sink, out, lse, *packed, case.scale, case.window or NO_WINDOW, int(case.causal),
        case.max_q, case.max_k, case.section(case.h_q), ctas, counters.data_ptr(),
    )  # fmt: skip
    torch.cuda.synchronize()
    assert not counters.any()
    return out, lse


def check_forward(case: Case, spec: SinkForwardSpec | None = None, ctas: int | None = None) -> None:
    out, lse = run_forward(case, spec, ctas)
    for b, (s_q, s_k) in enumerate(case.lengths):
        if s_q == 0:
            continue
        expected, expected_lse = case.reference(b)
        got, got_lse = case.of_queries(out, b), case.of_queries(lse, b)
        close(got, expected, EPSILON[case.dtype], f"out of {b}: {s_q} x {s_k}")
        assert torch.equal(got_lse == -torch.inf, expected_lse == -torch.inf), f"rows without keys of {b}"
        torch.testing.assert_close(got_lse.double(), expected_lse, rtol=1e-5, atol=1e-3)
        empty = expected_lse == -torch.inf
        assert (got[empty] == 0).all()


def close(got: torch.Tensor, expected: torch.Tensor, epsilon: float, what: str) -> None:
    """Rounded operands: the error of a row's norm, and of single elements against the largest of the tensor."""
    assert got.isfinite().all(), f"{what}: {int((~got.isfinite()).sum())} of {got.numel()} not finite"
    error = (got.double() - expected).abs()
    scale = expected.abs().max().clamp_min(1e-30)
    where = (error / scale).argmax().item()
    assert error.max() <= 4 * epsilon * scale, (
        f"{what}: {error.max().item():.2e} of {scale.item():.2e} at "
        f"{tuple(int(i) for i in torch.unravel_index(torch.tensor(where), error.shape))}, "
        f"{int((error > 4 * epsilon * scale).sum())} of {error.numel()} elements"
    )
    norm = expected.norm()
    if norm > 0:
        assert (got.double() - expected).norm() / norm < 1.5 * epsilon, f"{what}: relative norm"


# --- forward, the simplest first: a failure of an early one explains those behind it


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("s", [1, 64, 128, 192, 384])
def test_forward_of_one_head(d, causal, s):
    check_forward(Case([(s, s)], 1, 1, d, causal=causal, sinks="none"))


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    ("s_q", "s_k"),
    [(63, 65), (64, 127), (65, 129), (127, 255), (129, 257), (191, 193), (193, 191), (1, 1000), (300, 1), (500, 130)],
)
@pytest.mark.parametrize("causal", [False, True])
def test_forward_around_tiles(d, s_q, s_k, causal):
    check_forward(Case([(s_q, s_k)] * 2, 4, 2, d, causal=causal, seed=s_q))


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 127, 128, 129, 300, 600, 5000])
@pytest.mark.parametrize("causal", [False, True])
def test_forward_windows(d, window, causal):
    check_forward(Case([(777, 900)], 4, 1, d, causal=causal, window=window, seed=window))


@pytest.mark.parametrize(("h_q", "h_kv"), [(1, 1), (8, 1), (6, 2), (5, 5), (14, 2), (64, 8)])
def test_forward_ratios(h_q, h_kv):
    check_forward(Case([(200, 330)], h_q, h_kv, 64))
    check_forward(Case([(200, 330)], h_q, h_kv, 128, window=100))


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("window", [None, 100, 600])
def test_forward_packed(d, dtype, window):
    lengths = [(1, 1), (130, 700), (0, 5), (257, 257), (64, 0), (3, 2000), (191, 64), (0, 0), (640, 641)]
    check_forward(Case(lengths, 4, 2, d, dtype, window=window, packed=True))
    check_forward(Case(lengths, 4, 2, d, dtype, window=window, packed=True, causal=False))


@pytest.mark.parametrize("sinks", ["none", "extreme"])
@pytest.mark.parametrize("d", [64, 128])
def test_forward_sinks(d, sinks):
    check_forward(Case([(150, 150)] * 2, 8, 2, d, sinks=sinks))
    check_forward(Case([(150, 100)] * 2, 8, 2, d, sinks=sinks))  # the first rows see no key


@pytest.mark.parametrize("spec", TUNING, ids=repr)
def test_forward_other_tiles(spec):
    window = 600 if spec.window else None
    check_forward(Case([(700, 1300)] * 2, 4, 2, spec.d, window=window), spec)


@pytest.mark.parametrize("spec", GROUPED, ids=repr)
@pytest.mark.parametrize("window", [1, 64, 127, 128, 129, 250, 600])
@pytest.mark.parametrize("causal", [False, True])
def test_forward_grouped(spec, window, causal):
    """Tiles that fit into shared memory, and more of them: wide windows, or none to the right."""
    cases = [[(700, 1300)] * 2, [(333, 333)] * 3, [(300, 90)], [(65, 1000)]]
    if spec.packed:
        cases = [[(1, 1), (130, 700), (0, 5), (257, 257), (64, 0), (3, 2000), (191, 64), (0, 0), (640, 641)]]
    for lengths in cases:
        check_forward(sink_case(lengths, 8, 2, spec.d, causal=causal, window=window, packed=spec.packed), spec)


@pytest.mark.parametrize("spec", GROUPED, ids=repr)
@pytest.mark.parametrize("ctas", [1, 3, None])
@pytest.mark.parametrize(("h_q", "h_kv"), [(1, 1), (8, 1), (6, 2), (5, 5), (14, 2), (64, 8)])
def test_forward_grouped_ratios(spec, ctas, h_q, h_kv):
    case = sink_case([(200, 330)] * 2, h_q, h_kv, spec.d, window=128, packed=spec.packed, sinks="extreme")
    check_forward(case, spec, ctas, small=True)
    case = sink_case([(200, 330)] * 2, h_q, h_kv, spec.d, window=100, packed=spec.packed, causal=False)
    check_forward(case, spec, ctas)


@pytest.mark.parametrize("ctas", [1, 2, 7])
def test_forward_with_few_ctas(ctas):
    """Many items a CTA: stages, slots and turns go round."""
    check_forward(Case([(400, 900)] * 3, 6, 3, 64), ctas=ctas)
    check_forward(Case([(400, 900)] * 3, 6, 3, 128), ctas=ctas)
    check_forward(Case([(400, 900)] * 3, 6, 3, 64, window=90), ctas=ctas)
    check_forward(Case([(400, 900), (0, 9), (70, 70)], 6, 3, 128, packed=True), ctas=ctas)


@pytest.mark.parametrize("d", [64, 128])
def test_small_sections(d):
    case = sink_case([(400, 900)] * 3, 6, 3, d)
    check_forward(case, ctas=5, small=True)
    for way in WAYS:
        check_backward(case, way, ctas=5, small=True)


def test_forward_long_and_repeated():
    case = Case([(4096, 4096)], 8, 1, 64)
    check_forward(case)
    first = run_forward(case)
    for _ in range(10):
        again = run_forward(case)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


def test_forward_of_large_scores():
    """References of rows move by far more than 2^8."""
    case = Case([(300, 1200)], 4, 2, 64)
    case.k[:, ::7] *= 30
    check_forward(case)


@pytest.mark.parametrize("keys", [False, True])
def test_work_list_has_each_block_once(keys):
    case = Case([(1, 1), (130, 700), (0, 5), (257, 257), (64, 0), (3, 2000)], 1, 1, 64, packed=True)
    listed = case.work_list(keys, 128)
    assert listed is not None
    work = listed.tolist()
    blocks = sorted((b, i) for b, pair in enumerate(case.lengths) for i in range(-(-pair[int(keys)] // 128)))
    assert work[0][0] == len(blocks)
    assert sorted(map(tuple, work[1 : 1 + len(blocks)])) == blocks


# --- backward


def run_backward(
    case: SinkCase, expected: SinkExpectation, way: str, ctas: int | None = None, small: bool = False
) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv, d(sink)) of the kernels from a forward in float64; outputs and scratch memory poisoned before."""
    dtype, packed, window = case.dtype, case.packed, case.window is not None
    keys = SinkBackwardSpec(dtype, case.q.shape[-1], packed, window, **WAYS[way])
    fused = keys.fused
    out, lse = expected.out.exact.to(case.q.dtype), expected.lse.float()
    nan = float("nan")
    rows, batch = sum(s_q for s_q, _ in case.lengths), len(case.lengths)
    positions = -(-(rows + PADDING * batch) // 64) * 64
    stats = torch.full((2, case.h_q, positions), nan, device="cuda")
    sums = torch.full((case.h_q, positions, d), nan, device="cuda")
    parts = torch.full((case.h_q, batch * -(-case.max_q // 128)), nan, device="cuda")
    d_q, d_k, d_v = (
        torch.full((*t.shape[:-1], d + 8), nan, dtype=t.dtype, device="cuda")[..., :d] for t in (case.q, case.k, case.v)
    )
    counters = torch.zeros(4, dtype=torch.int32, device="cuda")
    ctas = ctas or torch.cuda.get_device_properties(0).multi_processor_count
    cu_q, cu_k = (case.cu_q, case.cu_k) if packed else (None, None)
    numbers = (case.scale, case.window or NO_WINDOW, int(case.causal), case.max_q, case.max_k)

    get_kernel(SinkPrepareSpec(dtype, d, packed, fused))(
        out, case.d_out, lse, case.sink, stats, parts, cu_q, sums.data_ptr(), case.max_q
    )
    get_kernel(keys)(
        case.q, case.k, case.v, case.d_out, stats, d_k, d_v, cu_q, cu_k, case.work_list(True, keys.keys),
        sums.data_ptr(), *numbers, case.section(case.h_kv), ctas, counters.data_ptr(),
    )  # fmt: skip
    if fused:
        get_kernel(SinkFinishSpec(dtype, d, packed))(d_q, cu_q, sums.data_ptr(), positions, case.scale, case.max_q)
    else:
        queries = query_grad_spec(dtype, d, packed, window, way)
        get_kernel(queries)(
            case.q, case.k, case.v, case.d_out, stats, d_q, cu_q, cu_k, case.work_list(False, queries.rows),
            *numbers, case.section(case.h_q), ctas, counters.data_ptr() + 8,
        )  # fmt: skip
    torch.cuda.synchronize()
    assert not counters.any()
    return d_q, d_k, d_v, parts.sum(-1)


def check_backward(case: SinkCase, way: str, ctas: int | None = None, small: bool = False) -> None:
    if SinkBackwardSpec(case.dtype, case.q.shape[-1], **WAYS[way]).can_implement():
        return  # there is no such kernel
    expected = SinkExpectation.of(case)
    expected.require_gradients(*run_backward(case, expected, way, ctas, small))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("s", [1, 64, 128, 192, 384])
def test_backward_of_one_head(way, d, causal, s):
    check_backward(sink_case([(s, s)], 1, 1, d, causal=causal, sinks="none"), way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    ("s_q", "s_k"),
    [(63, 65), (65, 129), (127, 255), (129, 257), (191, 193), (193, 191), (1, 1000), (300, 1), (500, 130)],
)
@pytest.mark.parametrize("causal", [False, True])
def test_backward_around_tiles(way, d, s_q, s_k, causal):
    check_backward(sink_case([(s_q, s_k)] * 2, 4, 2, d, causal=causal, seed=s_q), way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("window", [1, 2, 64, 65, 127, 128, 129, 300, 5000])
@pytest.mark.parametrize("causal", [False, True])
def test_backward_windows(way, d, window, causal):
    check_backward(sink_case([(777, 900)], 4, 1, d, causal=causal, window=window, seed=window), way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("h_q", "h_kv"), [(8, 1), (6, 2), (5, 5), (14, 2)])
def test_backward_ratios(way, h_q, h_kv):
    check_backward(sink_case([(200, 330)], h_q, h_kv, 64), way)
    check_backward(sink_case([(200, 330)], h_q, h_kv, 128, window=100), way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("window", [None, 100])
def test_backward_packed(way, d, window):
    lengths = [(1, 1), (130, 700), (0, 5), (257, 257), (64, 0), (3, 2000), (191, 64), (0, 0), (640, 641)]
    check_backward(sink_case(lengths, 4, 2, d, window=window, packed=True), way)
    check_backward(sink_case(lengths, 4, 2, d, window=window, packed=True, causal=False), way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("d", [64, 128])
def test_backward_float16_and_sinks(way, d):
    check_backward(sink_case([(300, 300)], 4, 2, d, torch.float16), way)
    check_backward(sink_case([(150, 150)] * 2, 8, 2, d, sinks="extreme"), way)
    check_backward(sink_case([(150, 100)] * 2, 8, 2, d, sinks="extreme"), way)  # the first rows see no key


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ctas", [1, 2, 7])
def test_backward_with_few_ctas(way, ctas):
    check_backward(sink_case([(400, 900)] * 3, 6, 3, 64), way, ctas)
    check_backward(sink_case([(400, 900)] * 3, 6, 3, 128), way, ctas)
    check_backward(sink_case([(400, 900), (0, 9), (70, 70)], 6, 3, 64, packed=True), way, ctas)


def test_backward_apart_gives_the_same_bits():
    case = sink_case([(1000, 1000)] * 2, 8, 2, 64)
    expected = SinkExpectation.of(case)
    first = run_backward(case, expected, "apart")
    for _ in range(10):
        again = run_backward(case, expected, "apart")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
