"""The kernels of sink attention, launched one by one, against float64 in plain torch."""

import itertools
from typing import Any

import pytest
import torch

from cute_kernels.runtime.compile import get_kernel
from cute_kernels.sink.backward_spec import (
    PADDING,
    SinkBackwardSpec,
    SinkFinishSpec,
    SinkPrepareSpec,
    SinkQueryGradSpec,
)
from cute_kernels.sink.spec import GROUPED_RATIO, SinkForwardSpec, SinkWorkListSpec
from tests.kit.sink_cases import SinkCase, SinkExpectation, sink_case

NO_WINDOW = 1 << 30
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def kernel_specs() -> list:
    """Specs of this file that do not ship: other tiles, and float16."""
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
    """The variant that is tested with a way. Some ways bring their own, if it exists for d."""
    spec = SinkQueryGradSpec(dtype, d, packed, window, **QUERY_GRADS.get(way, {}))
    return SinkQueryGradSpec(dtype, d, packed, window) if spec.can_implement() else spec


def forward_spec(dtype: str, d: int, packed: bool, window: int | None, ratio: int = 1) -> SinkForwardSpec:
    return SinkForwardSpec.for_launch(dtype, d, packed=packed, window=window, ratio=ratio)


PLAIN = list(itertools.product((64, 128), (False, True), (None, 100, 600)))
TUNING = [
    SinkForwardSpec("bfloat16", 64, warpgroups=2),
    SinkForwardSpec("bfloat16", 64, turns=False),
    SinkForwardSpec("bfloat16", 128, tile=64),
    SinkForwardSpec("bfloat16", 64, window=True, tile=96, warpgroups=3),
]
LAYOUTS = list(itertools.product((False, True), (False, True)))  # packed, window
GROUPED = [
    forward_spec(dtype, 64, packed, 100, GROUPED_RATIO)
    for dtype, packed in [("bfloat16", False), ("bfloat16", True), ("float16", False)]
]
QUERY_GRADS: dict[str, dict[str, Any]] = {
    "separate skips": {"grouped": True},
}
WAYS: dict[str, dict[str, Any]] = {
    "fused": {},
    "separate": {"fused": False},
    "separate skips": {"fused": False, "skips": True},
}


def section(case: SinkCase, heads: int, small: bool) -> int:
    """Number of (sequence, head) pairs that are processed together: those of one sequence, or of all."""
    return heads if small else heads * len(case.lengths)


def work_list(case: SinkCase, keys: bool, rows: int) -> torch.Tensor | None:
    if case.cu_seqlens_q is None or case.cu_seqlens_k is None:
        return None
    tokens_q, tokens_k = int(case.cu_seqlens_q[-1]), int(case.cu_seqlens_k[-1])
    total, other = (tokens_k, tokens_q) if keys else (tokens_q, tokens_k)
    work = torch.full((total // rows + len(case.lengths) + 1, 2), -7, dtype=torch.int32, device="cuda")
    window = NO_WINDOW if case.window is None else case.window
    get_kernel(SinkWorkListSpec(keys))(
        case.cu_seqlens_q, case.cu_seqlens_k, work, rows, window, int(case.causal), total, other, *(0,) * 7
    )  # fmt: skip
    return work


def some_sink(case: SinkCase) -> torch.Tensor:
    assert case.s_aux is not None  # kernels always get a tensor of sinks
    return case.s_aux


def run_forward(
    case: SinkCase, spec: SinkForwardSpec | None = None, ctas: int | None = None, small: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the kernel, written over poison."""
    d = case.q.shape[-1]
    spec = spec or forward_spec(case.dtype, d, case.packed, case.window, case.q.shape[-2] // case.k.shape[-2])
    out = torch.full((*case.q.shape[:-1], d + 8), float("nan"), dtype=case.q.dtype, device="cuda")[..., :d]
    lse = torch.full(case.q.shape[:-1], float("nan"), device="cuda")
    counters = torch.zeros(2, dtype=torch.int32, device="cuda")
    ctas = ctas or torch.cuda.get_device_properties(0).multi_processor_count
    get_kernel(spec)(
        case.q, case.k, case.v, some_sink(case), out, lse, case.cu_seqlens_q, case.cu_seqlens_k,
        work_list(case, False, spec.rows), case.softmax_scale, case.window or NO_WINDOW, int(case.causal),
        section(case, case.q.shape[-2], small), ctas, counters.data_ptr(),
    )  # fmt: skip
    torch.cuda.synchronize()
    assert not counters.any()
    return out, lse


def check_forward(
    case: SinkCase, spec: SinkForwardSpec | None = None, ctas: int | None = None, small: bool = False
) -> None:
    SinkExpectation.of(case).check_forward(*run_forward(case, spec, ctas, small)).require()


# --- forward, the simplest test first: its failure explains later ones


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("s", [1, 64, 128, 192, 384])
def test_forward_of_one_head(d, causal, s):
    check_forward(sink_case([(s, s)], 1, 1, d, causal=causal, sinks="none"))


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    ("s_q", "s_k"),
    [(63, 65), (64, 127), (65, 129), (127, 255), (129, 257), (191, 193), (193, 191), (1, 1000), (300, 1), (500, 130)],
)
@pytest.mark.parametrize("causal", [False, True])
def test_forward_around_tiles(d, s_q, s_k, causal):
    check_forward(sink_case([(s_q, s_k)] * 2, 4, 2, d, causal=causal, seed=s_q))


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 127, 128, 129, 300, 600, 5000])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("h_kv", [1, 2])
def test_forward_windows(d, window, causal, h_kv):
    check_forward(sink_case([(777, 900)], 4, h_kv, d, causal=causal, window=window, seed=window))


@pytest.mark.parametrize(("h_q", "h_kv"), [(1, 1), (8, 1), (6, 2), (5, 5), (14, 2), (16, 1), (64, 8)])
def test_forward_ratios(h_q, h_kv):
    check_forward(sink_case([(200, 330)], h_q, h_kv, 64))
    check_forward(sink_case([(200, 330)], h_q, h_kv, 128, window=100))


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("window", [None, 100, 600])
def test_forward_packed(d, dtype, window):
    lengths = [(1, 1), (130, 700), (0, 5), (257, 257), (64, 0), (3, 2000), (191, 64), (0, 0), (640, 641)]
    check_forward(sink_case(lengths, 4, 2, d, DTYPES[dtype], window=window, packed=True))
    check_forward(sink_case(lengths, 4, 2, d, DTYPES[dtype], window=window, packed=True, causal=False))


@pytest.mark.parametrize("sinks", ["none", "extreme"])
@pytest.mark.parametrize("d", [64, 128])
def test_forward_sinks(d, sinks):
    check_forward(sink_case([(150, 150)] * 2, 8, 2, d, sinks=sinks))
    check_forward(sink_case([(150, 100)] * 2, 8, 2, d, sinks=sinks))  # the first rows see no key


@pytest.mark.parametrize("spec", TUNING, ids=repr)
def test_forward_other_tiles(spec):
    window = 600 if spec.window else None
    check_forward(sink_case([(700, 1300)] * 2, 4, 2, spec.d, window=window), spec)


@pytest.mark.parametrize("spec", GROUPED, ids=repr)
@pytest.mark.parametrize("window", [1, 64, 127, 128, 129, 250, 600])
@pytest.mark.parametrize("causal", [False, True])
def test_forward_grouped(spec, window, causal):
    """Key tiles of a work tile fit into shared memory, or are more: wide windows, or not causal."""
    cases = [[(700, 1300)] * 2, [(333, 333)] * 3, [(300, 90)], [(65, 1000)]]
    if spec.packed:
        cases = [[(1, 1), (130, 700), (0, 5), (257, 257), (64, 0), (3, 2000), (191, 64), (0, 0), (640, 641)]]
    for lengths in cases:
        options = {"causal": causal, "window": window, "packed": spec.packed}
        check_forward(sink_case(lengths, 8, 2, spec.d, DTYPES[spec.dtype], **options), spec)


@pytest.mark.parametrize("spec", GROUPED, ids=repr)
@pytest.mark.parametrize("ctas", [1, 3, None])
@pytest.mark.parametrize(("h_q", "h_kv"), [(1, 1), (8, 1), (6, 2), (5, 5), (14, 2), (16, 1), (64, 8)])
def test_forward_grouped_ratios(spec, ctas, h_q, h_kv):
    sizes = ([(200, 330)] * 2, h_q, h_kv, spec.d, DTYPES[spec.dtype])
    check_forward(sink_case(*sizes, window=128, packed=spec.packed, sinks="extreme"), spec, ctas, small=True)
    check_forward(sink_case(*sizes, window=100, packed=spec.packed, causal=False), spec, ctas)


@pytest.mark.parametrize("ctas", [1, 2, 7])
def test_forward_with_few_ctas(ctas):
    """A CTA has many work tiles, so that stages, slots and turns wrap around."""
    check_forward(sink_case([(400, 900)] * 3, 6, 3, 64), ctas=ctas)
    check_forward(sink_case([(400, 900)] * 3, 6, 3, 128), ctas=ctas)
    check_forward(sink_case([(400, 900)] * 3, 6, 3, 64, window=90), ctas=ctas)
    check_forward(sink_case([(400, 900), (0, 9), (70, 70)], 6, 3, 128, packed=True), ctas=ctas)


@pytest.mark.parametrize("d", [64, 128])
def test_small_sections(d):
    case = sink_case([(400, 900)] * 3, 6, 3, d)
    check_forward(case, ctas=5, small=True)
    for way in WAYS:
        check_backward(case, way, ctas=5, small=True)


def test_forward_long_and_repeated():
    case = sink_case([(4096, 4096)], 8, 1, 64)
    check_forward(case)
    first = run_forward(case)
    for _ in range(10):
        again = run_forward(case)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


def test_forward_of_large_scores():
    """Running maxima of rows move by far more than 2^8."""
    case = sink_case([(300, 1200)], 4, 2, 64)
    case.k[:, ::7] *= 30
    check_forward(case)


@pytest.mark.parametrize("keys", [False, True])
def test_work_list_has_each_block_once(keys):
    case = sink_case([(1, 1), (130, 700), (0, 5), (257, 257), (64, 0), (3, 2000)], 1, 1, 64, packed=True)
    listed = work_list(case, keys, 128)
    assert listed is not None
    work = listed.tolist()
    blocks = sorted((b, i) for b, pair in enumerate(case.lengths) for i in range(-(-pair[int(keys)] // 128)))
    assert work[0][0] == len(blocks)
    assert sorted(map(tuple, work[1 : 1 + len(blocks)])) == blocks


# --- backward


def run_backward(
    case: SinkCase, expected: SinkExpectation, way: str, ctas: int | None = None, small: bool = False
) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv, d(sink)) of the kernels, from a forward in float64. Outputs and scratch memory start poisoned."""
    dtype, packed, window = case.dtype, case.packed, case.window is not None
    keys = SinkBackwardSpec(dtype, case.q.shape[-1], packed, window, **WAYS[way])
    fused = keys.fused
    out, lse = expected.out.exact.to(case.q.dtype), expected.lse.float()
    nan = float("nan")
    *_, h_q, d = case.q.shape
    batch = len(case.lengths)
    positions = -(-(sum(s_q for s_q, _ in case.lengths) + PADDING * batch) // 64) * 64
    stats = torch.full((2, h_q, positions), nan, device="cuda")
    sums = torch.full((h_q, positions, d), nan, device="cuda")
    blocks = -(-(positions if packed else case.q.shape[1]) // SinkPrepareSpec.rows)
    parts = torch.full((h_q, blocks if packed else batch * blocks), nan, device="cuda")
    d_q, d_k, d_v = (
        torch.full((*t.shape[:-1], d + 8), nan, dtype=t.dtype, device="cuda")[..., :d] for t in (case.q, case.k, case.v)
    )
    counters = torch.zeros(4, dtype=torch.int32, device="cuda")
    ctas = ctas or torch.cuda.get_device_properties(0).multi_processor_count
    cu_q, cu_k = case.cu_seqlens_q, case.cu_seqlens_k
    numbers = (case.softmax_scale, case.window or NO_WINDOW, int(case.causal))

    get_kernel(SinkPrepareSpec(dtype, d, packed, fused))(
        out, case.d_out, lse, None, some_sink(case), stats, parts, cu_q, sums.data_ptr()
    )
    get_kernel(keys)(
        case.q, case.k, case.v, case.d_out, stats, d_k, d_v, cu_q, cu_k, work_list(case, True, keys.keys),
        sums.data_ptr(), *numbers, section(case, case.k.shape[-2], small), ctas, counters.data_ptr(),
    )  # fmt: skip
    if fused:
        get_kernel(SinkFinishSpec(dtype, d, packed))(d_q, cu_q, sums.data_ptr(), positions, case.softmax_scale)
    else:
        queries = query_grad_spec(dtype, d, packed, window, way)
        get_kernel(queries)(
            case.q, case.k, case.v, case.d_out, stats, d_q, cu_q, cu_k, work_list(case, False, queries.rows),
            *numbers, section(case, h_q, small), ctas, counters.data_ptr() + 8,
        )  # fmt: skip
    torch.cuda.synchronize()
    assert not counters.any()
    return d_q, d_k, d_v, parts.sum(-1)


def check_backward(case: SinkCase, way: str, ctas: int | None = None, small: bool = False) -> None:
    if SinkBackwardSpec(case.dtype, case.q.shape[-1], window=case.window is not None, **WAYS[way]).can_implement():
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
@pytest.mark.parametrize(("h_q", "h_kv"), [(8, 1), (6, 2), (5, 5), (14, 2), (16, 1)])
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


def test_separate_backward_gives_the_same_bits():
    case = sink_case([(1000, 1000)] * 2, 8, 2, 64)
    expected = SinkExpectation.of(case)
    first = run_backward(case, expected, "separate")
    for _ in range(10):
        again = run_backward(case, expected, "separate")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
