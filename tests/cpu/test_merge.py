import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_kernels.merge import op as merge_op
from cute_kernels.merge.op import merge_states
from cute_kernels.merge.reference import merge_states_reference
from cute_kernels.merge.request import MERGE
from cute_kernels.merge.spec import ITEMSIZE, MergeSpec
from cute_kernels.runtime.launch import PreparedLaunches, by_name
from tests.kit.bad_input import ERROR, TABLES
from tests.kit.merging import merge_problems
from tests.kit.prepared import DeclaredKernel, prepare
from tests.kit.sass import report as report_of

INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def attention(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the last dimension of scores (..., keys), times values (..., keys, d); natural lse."""
    return (torch.softmax(scores, -1).unsqueeze(-2) @ values).squeeze(-2), torch.logsumexp(scores, -1)


def states_of(scores: torch.Tensor, values: torch.Tensor, edges: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over each of the disjoint ranges of keys; NaN and -inf for an empty range."""
    pairs = []
    for begin, end in itertools.pairwise(edges):
        out, lse = attention(scores[..., begin:end], values[..., begin:end, :])
        if begin == end:
            out, lse = torch.full_like(out, NAN), torch.full_like(lse, -INF)
        pairs.append((out, lse))
    return torch.stack([out for out, _ in pairs]), torch.stack([lse for _, lse in pairs])


@pytest.fixture
def problem() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    scores = 3 * torch.randn(2, 3, 5, 41, dtype=torch.float64, generator=generator)
    return scores, torch.randn(2, 3, 5, 41, 16, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("edges", [[0, 41], [0, 20, 41], [0, 1, 1, 7, 7, 7, 41, 41], list(range(42))])
def test_merging_the_parts_is_attention_over_the_whole(problem, edges):
    scores, values = problem
    out, lse = merge_states_reference(*states_of(scores, values, edges))
    want, want_lse = attention(scores, values)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)


def test_sink_joins_the_denominator_once_and_stays_out_of_the_lse(problem):
    scores, values = problem
    sink = torch.tensor([-INF, -2.0, 0.0, 4.0, INF], dtype=torch.float64)
    out, lse = merge_states_reference(*states_of(scores, values, [0, 10, 10, 41]), sink)
    # a sink is a key with value 0
    with_sink = torch.cat([scores, sink.expand(2, 3, 5).unsqueeze(-1)], -1)
    want, _ = attention(with_sink[..., :4, :], torch.cat([values, torch.zeros(2, 3, 5, 1, 16)], -2)[..., :4, :, :])
    torch.testing.assert_close(out[..., :4, :], want, rtol=1e-12, atol=1e-12)
    assert (out[..., 4, :] == 0).all()
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1), rtol=1e-12, atol=1e-12)


def test_the_rule_allows_what_float32_owes_and_no_lost_weights():
    """The weights are computed as in the kernel. Beside sinks of 80 to 112 they are 2^-115 to 2^-162."""
    generator = torch.Generator().manual_seed(1)
    outs = 2.0**18 * torch.randn(2, 50, 64, 128, generator=generator)
    lses = torch.randn(2, 50, 64, generator=generator)
    sink = torch.linspace(80, 112, 64)
    weights = torch.exp2((lses - sink) * math.log2(math.e))  # their sum is nothing beside the sink's weight of 1
    lse = torch.logsumexp(lses.double(), 0).float()
    assert not merge_problems((weights.unsqueeze(-1) * outs).sum(0), lse, outs, lses, sink)
    weights[weights < 2.0**-126] = 0.0
    lost = merge_problems((weights.unsqueeze(-1) * outs).sum(0), lse, outs, lses, sink)
    assert len(lost) == 1 and "elements are off" in lost[0]


@pytest.mark.parametrize("sink", [None, -INF, 1.0, INF])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_without_keys_is_zero_and_minus_infinity(dtype, sink):
    outs, lses = torch.full((3, 2, 4, 8), NAN, dtype=dtype), torch.full((3, 2, 4), -INF)
    s_aux = None if sink is None else torch.full((4,), sink)
    out, lse = merge_states(outs, lses, s_aux=s_aux)
    assert (out == 0).all() and out.dtype == dtype
    assert (lse == -INF).all() and lse.dtype == torch.float32


@pytest.mark.parametrize("sink", [None, 1.0])
def test_plus_infinity_is_no_keys_as_minus_infinity_is(sink):
    """FlashMLA writes +inf for a query without keys, and so does our adapter of its interface."""
    outs, lses = torch.randn(4, 6, 8), torch.randn(4, 6)
    empty = torch.zeros(4, 6, dtype=torch.bool)
    empty[1, ::2] = empty[3] = empty[:, 5] = True  # some, a whole state, and a row without any key
    outs[empty] = NAN
    s_aux = None if sink is None else torch.full((6,), sink)
    want, want_lse = merge_states(outs, lses.masked_fill(empty, -INF), s_aux=s_aux)
    mixed = lses.masked_fill(empty, INF)
    mixed[3, 5] = -INF
    for marked in (lses.masked_fill(empty, INF), mixed):
        out, lse = merge_states(outs, marked, s_aux=s_aux)
        assert torch.equal(out, want) and torch.equal(lse, want_lse)
        reference, reference_lse = merge_states_reference(outs, marked, s_aux, dtype=torch.float32)
        torch.testing.assert_close(reference, want)
        torch.testing.assert_close(reference_lse, want_lse)
    assert (want[5] == 0).all() and want_lse[5] == -INF and want.isfinite().all()


@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
def test_what_an_empty_state_holds_does_not_leak(garbage):
    outs, lses = torch.randn(4, 6, 8), torch.randn(4, 6)
    lses[1, ::2] = -INF
    lses[3] = -INF
    clean = merge_states(outs, lses)
    outs[lses == -INF] = garbage
    dirty = merge_states(outs, lses)
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1], dirty[1])


def test_far_apart_and_huge_log_sum_exps():
    lses = torch.tensor([[1e30, -200.0, 5e4], [-1e30, 0.0, 5e4]])
    outs = torch.stack([torch.full((3, 8), 2.0), torch.full((3, 8), 4.0)])
    out, lse = merge_states(outs, lses)
    assert out[:, 0].tolist() == [2.0, 4.0, 3.0]
    torch.testing.assert_close(lse, torch.tensor([1e30, 0.0, 5e4 + math.log(2)]))


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3), (2, 3, 1, 5)])
def test_any_leading_dimensions(leading):
    outs, lses = torch.randn(3, *leading, 24), torch.randn(3, *leading)
    out, lse = merge_states(outs, lses)
    flat, flat_lse = merge_states(outs.reshape(3, -1, 24), lses.reshape(3, -1))
    assert out.shape == (*leading, 24) and lse.shape == leading
    assert torch.equal(out.reshape(-1, 24), flat) and torch.equal(lse.reshape(-1), flat_lse)


@pytest.mark.parametrize("out_dtype", DTYPES)
def test_writes_into_given_tensors_and_returns_them(out_dtype):
    outs, lses = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4)
    wide = torch.full((3, 4, 32), NAN, dtype=out_dtype)
    out, lse = wide[..., 8:16], torch.full((4, 3), NAN).T
    got, got_lse = merge_states(outs, lses, out=out, lse=lse)
    assert got is out and got_lse is lse
    want, want_lse = merge_states_reference(outs, lses)
    assert torch.equal(out, want.to(out_dtype)) and torch.equal(lse, want_lse.float())
    assert wide[..., :8].isnan().all() and wide[..., 16:].isnan().all()


def test_no_rows():
    out, lse = merge_states(torch.empty(2, 0, 3, 8), torch.empty(2, 0, 3))
    assert out.shape == (0, 3, 8) and lse.shape == (0, 3)


OUTS, LSES = torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 4)


def merge_by_torch(outs: Any, lses: Any, sink: Any, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Merges as the kernel does."""
    merged, merged_lse = merge_states_reference(outs, lses, sink)
    out.copy_(merged)
    lse.copy_(merged_lse)


def prepared(
    monkeypatch: pytest.MonkeyPatch, outs: torch.Tensor, out_dtype: torch.dtype = torch.float32
) -> DeclaredKernel:
    """A prepared launch for such states, with or without a sink, as an earlier call would leave it."""
    shape = outs.shape
    dtypes = {"in_dtype": "float32", "out_dtype": str(out_dtype).removeprefix("torch.")}
    facts = {"rows": outs[0, ..., 0].numel(), "num_states": len(outs), "d": shape[-1], **dtypes}
    kernel = DeclaredKernel(
        *(MergeSpec.for_launch(**facts, has_sink=sink) for sink in (False, True)), run=merge_by_torch
    )
    out, lse = torch.empty(shape[1:], dtype=out_dtype), torch.empty(shape[1:-1])
    sinks = (None, torch.zeros(shape[-2:-1])) if len(shape) > 2 else (None,)
    launch = merge_op.PreparedLaunch(
        by_name(MERGE, kernel, "cute_kernels.merge.kernels.merge:MergeKernel"), out, lse, set()
    )
    given = {"outs": outs, "lses": torch.zeros(shape[:-1]), "out": out, "lse": lse}
    prepare(monkeypatch, merge_op, launch, *(MERGE.request(**given, s_aux=sink) for sink in sinks))
    kernel.calls.clear()
    return kernel


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("with_sink", [False, True])
def test_a_prepared_launch_checks_nothing_in_python(leading, with_sink, monkeypatch):
    outs, lses = torch.randn(3, *leading, 24), torch.randn(3, *leading)
    sink = torch.randn(leading[-1:]) if with_sink and leading else None
    want, want_lse = merge_states(outs, lses, s_aux=sink, out=torch.empty(*leading, 24).bfloat16())
    kernel = prepared(monkeypatch, outs, torch.bfloat16)
    monkeypatch.setattr(merge_op, "check_tensor", None)
    out, lse = torch.full((*leading, 24), NAN).bfloat16(), torch.full(leading, NAN)
    merge_states(outs, lses, s_aux=sink, out=out, lse=lse)
    assert torch.equal(out, want) and torch.equal(lse, want_lse) and len(kernel.calls) == 1


@pytest.mark.parametrize("given", ["no outputs", "out", "out and lse"])
@pytest.mark.parametrize("label", TABLES["merge_states"].wrong("cpu"))
def test_bad_input_of_a_prepared_launch(label, given, monkeypatch):
    table = TABLES["merge_states"]
    argument, changed = table.wrong("cpu")[label]
    kernel, call = prepared(monkeypatch, table.right("cpu")["outs"]), table.right("cpu")
    call = {name: value for name, value in call.items() if name not in ("out", "lse") or name in given}
    call |= changed if isinstance(changed, dict) else {argument: changed}
    with pytest.raises((TypeError, ValueError), match=ERROR.format(argument)):
        merge_states(**call)
    assert kernel.calls == []


def launch_on_meta(monkeypatch: pytest.MonkeyPatch, launched: Callable[..., None]) -> None:
    """Makes the device "meta" stand for a GPU, and `launched(spec, *arguments)` for its kernels."""
    monkeypatch.setattr(merge_op, "_prepared", PreparedLaunches())
    monkeypatch.setattr(merge_op, "require_sm90", lambda name, device: None)
    monkeypatch.setattr(merge_op, "get_kernel", lambda spec: functools.partial(launched, spec))
    monkeypatch.setattr(merge_op.memory, "template", lambda shape, dtype, device: torch.empty(shape, device=device))


@pytest.mark.parametrize("transposed", [False, True], ids=["views", "copies"])
def test_more_dimensions_than_the_kernel_takes(transposed, monkeypatch):
    """Every call is checked, because the kernel gets views in which different shapes of equal size look alike."""
    seen: list[tuple[torch.Tensor | None, ...]] = []
    launch_on_meta(monkeypatch, lambda spec, *arguments: seen.append(arguments))
    outs, lses = (torch.randn(3, 4, 2, 3, 5, *d, device="meta") for d in ((8,), ()))
    if transposed:
        outs, lses = outs.transpose(1, 2), lses.transpose(1, 2)
    for _ in range(2):
        out, lse = merge_states(outs, lses, s_aux=torch.randn(5, device="meta"))
        assert out.shape == outs.shape[1:] and lse.shape == lses.shape[1:] and not merge_op._prepared
        assert [tuple(t.shape) for t in seen.pop() if t is not None] == [
            (3, 8, 3, 5, 8), (3, 8, 3, 5), (5,), (8, 3, 5, 8), (8, 3, 5),
        ]  # fmt: skip
    with pytest.raises(ValueError, match="lses: got shape"):
        merge_states(outs, lses.transpose(2, 3))
    with pytest.raises(ValueError, match="out: got shape .* strides .*viewed"):
        merge_states(outs, lses, out=torch.empty(outs.shape[2], outs.shape[1], 3, 5, 8, device="meta").transpose(0, 1))
    assert not seen


def test_the_first_launch_prepares_the_others(monkeypatch):
    calls: list[tuple[Any, ...]] = []
    launch_on_meta(monkeypatch, lambda *called: calls.append(called))
    outs, lses = OUTS.to("meta"), LSES.to("meta")  # any device but the CPU
    for launches in (1, 2, 3):
        merge_states(outs, lses)
        assert len(calls) == launches and len(merge_op._prepared) == 1
    merge_states(outs, lses, s_aux=torch.zeros(4, device="meta"))
    merge_states(outs, lses, out=torch.zeros(3, 4, 8, device="meta").bfloat16())
    assert [(spec.has_sink, spec.out_dtype) for spec, *_ in calls[3:]] == [(True, "float32"), (False, "bfloat16")]
    merge_op.merge_request(MERGE.request(outs=outs, lses=lses, headers=True))
    assert [spec.headers for spec, *_ in calls] == [False] * 5 + [True]
    merge_states(outs[:, :0], lses[:, :0])
    assert len(calls) == 6, "there were no rows"


LAUNCHES = list(
    itertools.product(
        (1, 127, 255, 1024, 100_000), (1, 2, 4, 5, 8, 9, 64, 129), (8, 24, 64, 72, 128, 504, 512), ITEMSIZE
    )
)


def test_every_launch_has_a_variant_that_fits_the_machine():
    for rows, num_states, d, dtype in LAUNCHES:
        spec = MergeSpec.for_launch(rows=rows, num_states=num_states, d=d, in_dtype=dtype, out_dtype="bfloat16")
        assert spec.can_implement() == []
        assert spec.threads == spec.rows_per_cta * spec.groups * spec.lanes <= 1024 and spec.threads % 32 == 0
        assert spec.lanes * spec.vectors * spec.vector >= d
        # a chunk is loaded in whole rounds, and each weight lane makes as many of its weights
        assert spec.chunk % (spec.unroll * spec.groups) == 0 and spec.chunk % spec.weight_lanes == 0
        # all weight lanes of a row are in one warp
        assert spec.weight_lanes <= 32 and 32 % spec.weight_lanes == 0


def test_eight_loads_are_in_flight():
    """Eight loads hold 32 registers at once. Without help, ptxas uses 40 in all and waits for every third load."""
    spec = MergeSpec.for_launch(rows=128, num_states=64, d=512, in_dtype="float32", out_dtype="bfloat16")
    (kernel,) = report_of(spec).kernels
    assert kernel.count("LDG.E.128") == 8
    assert kernel.registers >= 64


@pytest.mark.parametrize(
    "facts",
    [
        dict(d=512, in_dtype="float32", out_dtype="float16", has_sink=True, has_lse=False, lanes=128, groups=8),
        dict(d=8, in_dtype="bfloat16", out_dtype="float32", has_sink=False, has_lse=True, lanes=1, groups=8),
        dict(d=504, in_dtype="float16", out_dtype="bfloat16", has_sink=True, has_lse=True, lanes=16),
    ],
    ids=["eight groups of a row's threads", "eight groups of one lane", "four vectors, the last one uneven"],
)
def test_unusual_variants_compile(facts):
    spec = MergeSpec(**facts)
    assert report_of(spec).problems(spec.expected) == []


@pytest.mark.parametrize(
    ("rows", "num_states", "d", "dtype", "fastest"),
    [
        (64, 64, 512, "float32", (128, 1)),
        (128, 16, 512, "float32", (128, 1)),
        (128, 128, 512, "float32", (128, 1)),
        (128, 8, 512, "float32", (128, 1)),
        (256, 16, 512, "float32", (128, 1)),
        (512, 64, 512, "float32", (128, 1)),
        (1023, 8, 512, "float32", (128, 1)),
        (1024, 8, 512, "float32", (32, 1)),
        (2048, 16, 512, "float32", (32, 1)),
        (2048, 17, 512, "float32", (128, 1)),
        (100_000, 64, 512, "bfloat16", (32, 1)),
        (100_000, 8, 128, "bfloat16", (8, 1)),
        (100_000, 9, 128, "bfloat16", (16, 1)),
    ],
)
def test_the_variant_that_was_measured_fastest_of_those_with_the_same_bits(rows, num_states, d, dtype, fastest):
    spec = MergeSpec.for_launch(rows=rows, num_states=num_states, d=d, in_dtype=dtype, out_dtype="bfloat16")
    assert (spec.lanes, spec.groups) == fastest
