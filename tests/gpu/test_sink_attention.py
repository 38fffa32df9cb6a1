"""`sink_attention` on the GPU, forward and gradients, against the float64 oracle of `tests.kit.sink_cases`.

Every result is written over NaN. `covering_cases` makes few combinations in which every pair of values of two factors
occurs; `kernel_specs` lists the kernels that these need in addition to those that ship.
"""

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch

from cute_kernels import sink_attention, sink_attention_backward
from cute_kernels.sink import backward_spec, launch, spec
from cute_kernels.sink.reference import reference_sink_attention, reference_sink_attention_backward
from tests.gpu.alone import alone
from tests.kit.bits import require_same_bits
from tests.kit.graphs import capture
from tests.kit.mla_cases import covering_cases, generator, strided
from tests.kit.sink_calls import change_results, leaves, run
from tests.kit.sink_cases import SINKS, SinkCase, SinkExpectation, sink_case

pytestmark = pytest.mark.usefixtures("poisoned_sink")
LENGTHS = (
    (1, 1), (63, 65), (64, 127), (65, 129), (128, 128), (127, 255), (129, 257), (191, 193), (193, 191), (1, 1000),
    (300, 1), (500, 130), (384, 576), (9, 640),
)  # fmt: skip
RAGGED = [(1, 1), (130, 700), (0, 5), (257, 257), (64, 0), (3, 2000), (191, 64), (0, 0), (640, 641)]
CASES = covering_cases(
    {
        "lengths": LENGTHS,
        "window": (None, 1, 64, 128, 600, 4096),
        "sinks": SINKS,
        "ratio": (1, 4, 7, 8, 16),
        "d": (64, 128),
        "dtype": (torch.bfloat16, torch.float16),
        "h_kv": (1, 2, 3),
        "causal": (True, False),
        "padded": (True, False),
        "packed": (False, True),
        "deterministic": (False, True),
        "batch": (1, 3),
    },
    seed=5,
)


def kernel_specs() -> list[Any]:
    """Kernels that do not ship: those of float16, and the first step of a backward that gets delta from its caller."""
    specs: list[Any] = [*spec.launched_specs("float16"), *backward_spec.launched_specs("float16")]
    kinds = itertools.product(("bfloat16",), (64, 128), (True, False), (True, False))
    return specs + [backward_spec.SinkPrepareSpec(*kind, given=True) for kind in kinds]


def hold(case: SinkCase, deterministic: bool = False) -> None:
    """Applies the tolerance rule to the output and the gradients."""
    expected = SinkExpectation.of(case)
    out, lse, gradients = run(case, deterministic)
    expected.check_forward(out, lse).require()
    expected.require_gradients(*gradients)
    assert out.is_contiguous() and all(t is None or t.is_contiguous() for t in gradients)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("d", [64, 128])
def test_gradients_by_hand(d, packed, deterministic):
    """`sink_attention_backward` gets sinks apart or folded into lse, and out or delta."""
    case = sink_case(RAGGED if packed else [(300, 700)] * 2, 8, 2, d, packed=packed, sinks="some")
    expected = SinkExpectation.of(case)
    out, lse = expected.out.exact.to(case.q.dtype), expected.lse.float()
    delta = (out.double() * case.d_out.double()).sum(-1).float()
    folded = torch.logaddexp(lse, case.s_aux)
    for change in ({}, {"delta": delta, "out": torch.full_like(out, math.nan)}, {"lse": folded, "s_aux": None}):
        arguments = {"dout": case.d_out, "out": out, "lse": lse, **case.arguments(), **change}
        gradients = sink_attention_backward(**arguments, deterministic=deterministic)
        expected.require_gradients(*gradients)
        assert (gradients[3] is None) == ("s_aux" in change)


@pytest.mark.parametrize("d", [64, 128])
def test_gradients_of_parts_of_the_keys_add_up(d):
    """In two steps of a ring, queries see earlier keys whole and their own causally."""
    case = sink_case([(256, 768)], 8, 2, d)
    expected = SinkExpectation.of(case)
    out, lse = expected.out.exact.to(case.q.dtype), expected.lse.float()
    first, last = (
        sink_attention_backward(
            case.d_out, case.q, case.k[:, keys], case.v[:, keys], out, lse, case.s_aux, causal=causal,
            softmax_scale=case.softmax_scale,
        )
        for keys, causal in ((slice(0, 512), False), (slice(512, 768), True))
    )  # fmt: skip
    dk, dv = torch.cat([first[1], last[1]], 1), torch.cat([first[2], last[2]], 1)
    expected.require_gradients(None, dk, dv, first[3])
    expected.require_gradients(None, None, None, last[3])
    dq = first[0].float() + last[0].float()
    torch.testing.assert_close(dq, expected.gradients[0].exact.float(), rtol=2e-2, atol=2e-2)


def test_queries_with_an_infinite_lse_have_no_gradient():
    case = sink_case([(100, 200)], padded=False, sinks="absent")
    out, lse = sink_attention(**case.arguments(), return_lse=True)
    lse[:, 3], lse[:, 90] = math.inf, -math.inf
    dq, dk, dv, _ = sink_attention_backward(case.d_out, case.q, case.k, case.v, out, lse)
    assert (dq[:, [3, 90]] == 0).all() and all(t.isfinite().all() for t in (dq, dk, dv))


def label(sizes: dict[str, Any]) -> str:
    return "-".join(f"{name}={value}" for name, value in sizes.items())


@pytest.mark.parametrize("sizes", CASES, ids=label)
def test_output_and_gradients(sizes):
    sizes = dict(sizes)
    s_q, s_k = sizes.pop("lengths")
    batch, h_kv, deterministic = sizes.pop("batch"), sizes["h_kv"], sizes.pop("deterministic")
    lengths = [(s_q, s_k)] * batch
    if sizes["packed"]:
        lengths = [(s_q, s_k), (0, 3), (s_q // 2, s_k), (7, 0), (1 + s_q // 3, 1 + s_k // 3)][: 2 * batch]
    hold(sink_case(lengths, h_kv * sizes.pop("ratio"), **sizes, seed=s_q + s_k), deterministic)


@pytest.mark.parametrize("window", [None, 100, 600])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("deterministic", [True, False])
def test_packed_sequences_of_all_lengths(d, window, causal, deterministic):
    hold(sink_case(RAGGED, 4, 2, d, window=window, causal=causal, packed=True), deterministic)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("s_q", "s_k"), [(4500, 4500), (600, 5000)])
def test_window_of_4096(d, s_q, s_k):
    hold(sink_case([(s_q, s_k)], 2, 1, d, window=4096))


def test_gpt_oss_heads():
    """gpt-oss has 64 heads over 8, with and without a window."""
    hold(sink_case([(700, 700)], 64, 8, 64))
    hold(sink_case([(700, 700)], 64, 8, 64, window=128))


def test_large_scores():
    """The running maximum rises far, and weights are nearly one-hot."""
    case = sink_case([(300, 700)], padded=False)
    case.k[:, ::7] *= 30
    hold(case)


@pytest.mark.parametrize("packed", [False, True])
def test_without_queries_or_keys(packed):
    for lengths in ([(5, 0)] * 2, [(0, 5)] * 2, [(0, 0)]):
        hold(sink_case(lengths, packed=packed))
    if not packed:
        case = dataclasses.replace(sink_case([(5, 7)]), lengths=[])
        case.q, case.k, case.v, case.d_out = (t[:0] for t in (case.q, case.k, case.v, case.d_out))
        hold(case)


def test_queries_before_the_first_key():
    case = sink_case([(300, 100)] * 2, sinks="extreme")
    out, lse, (dq, dk, dv, ds_aux) = run(case)
    assert (out[:, :200] == 0).all() and (lse[:, :200] == -math.inf).all() and (dq[:, :200] == 0).all()
    assert lse[:, 200:].isfinite().all() and dk.isfinite().all() and dv.isfinite().all() and ds_aux.isfinite().all()
    assert (out[:, :, 1] == 0).all() and (ds_aux[:2] == 0).all()  # sinks at -inf and +inf


def test_other_sequences_may_hold_anything():
    case = sink_case([(100, 200), (64, 64), (130, 131)], packed=True, padded=False)
    expected = run(case)
    for t in (case.q, case.d_out):
        case.of_queries(t, 1).fill_(math.nan)
    for t in (case.k, case.v):
        case.of_keys(t, 1).fill_(math.inf)
    got = run(case)
    for b in (0, 2):
        for rows_of, old, new in (
            (case.of_queries, expected[0], got[0]),
            (case.of_keys, expected[2][1], got[2][1]),
            (case.of_keys, expected[2][2], got[2][2]),
        ):
            assert torch.equal(rows_of(old, b), rows_of(new, b))
        assert case.of_queries(got[2][0], b).isfinite().all()


# ---- views


@pytest.mark.parametrize("deterministic", [True, False])
def test_views_give_the_same(deterministic):
    case = sink_case([(200, 200)] * 2, 4, 4, padded=False)
    expected = run(case, deterministic=True)
    apart = dataclasses.replace(case, **{name: strided(getattr(case, name)) for name in ("q", "k", "v", "d_out")})
    heads_first = {
        name: getattr(case, name).transpose(1, 2).contiguous().transpose(1, 2) for name in ("q", "k", "v", "d_out")
    }
    fused = torch.cat([case.q, case.k, case.v], dim=2)
    parts = dict(zip("qkv", fused.split(4, dim=2), strict=True))
    for view in (apart, dataclasses.replace(case, **heads_first), dataclasses.replace(case, **parts)):
        got = run(view, deterministic=True)
        require_same_bits((*got[:2], *got[2]), (*expected[:2], *expected[2]))
        if not deterministic:
            hold(view)


def test_expanded_tensors_and_dimensions_of_one():
    one = sink_case([(70, 90)], 4, 1, padded=False)
    wide = dataclasses.replace(one, k=one.k.expand(-1, -1, 4, -1), v=one.v.expand(-1, -1, 4, -1))
    require_same_bits(run(wide)[:2], run(one)[:2])
    tensors = leaves(one)
    out: Any = sink_attention(**{**one.arguments(), **tensors})
    got = torch.autograd.grad(out.sum(), list(tensors.values()))
    expected = run(dataclasses.replace(one, d_out=torch.ones_like(one.q)), deterministic=False)[2]
    for a, b in zip(got[1:], expected[1:], strict=True):  # the terms of dq are summed in any order
        assert torch.equal(a, b)
    single = sink_case([(1, 1)], 1, 1, padded=False)
    single.q, single.k, single.v, single.d_out = (
        t.as_strided(t.shape, (3, 0, 5, 1)) for t in (single.q, single.k, single.v, single.d_out)
    )
    single.s_aux = torch.zeros(4, device="cuda")[::3][:1]
    hold(single)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("packed", [False, True])
def test_nothing_before_or_after_a_tensor_is_read(packed, deterministic, last, monkeypatch):
    change_results(monkeypatch, lambda t: alone(t, last=last))
    for d, window in ((64, None), (64, 100), (128, None), (128, 100)):
        case = sink_case(RAGGED if packed else [(191, 130)] * 2, 4, 2, d, window=window, packed=packed)
        for name in ("q", "k", "v", "d_out"):
            setattr(case, name, alone(getattr(case, name), last=last))
        hold(case, deterministic)


# ---- the same bits


REPEATED = {
    "full": {"lengths": [(2000, 2000)] * 2, "h_q": 8},
    "window": {"lengths": [(2000, 2000)] * 2, "h_q": 8, "window": 128},
    "packed": {"lengths": RAGGED * 2, "packed": True, "d": 128},
}


@pytest.mark.parametrize("options", REPEATED.values(), ids=REPEATED)
def test_output_has_the_same_bits_in_20_runs(options):
    case = sink_case(**options)
    arguments = case.arguments()
    with torch.no_grad():
        first = sink_attention(**arguments, return_lse=True)
        for _ in range(20):
            require_same_bits(sink_attention(**arguments, return_lse=True), first)


@pytest.mark.parametrize("options", REPEATED.values(), ids=REPEATED)
def test_deterministic_gradients_have_the_same_bits(options):
    case = sink_case(**options)
    first = run(case, deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        for asked in (True, False) * 5:
            require_same_bits(run(case, deterministic=asked)[2], first[2])
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("options", REPEATED.values(), ids=REPEATED)
def test_only_dq_may_differ_by_default(options):
    """The gradients of k, v and sinks must be equal in every call. dq may differ by float32 sums in another order."""
    case = sink_case(**options)
    first, largest = run(case)[2], 0.0
    for _ in range(10):
        dq, *others = run(case)[2]
        require_same_bits(others, first[1:])
        largest = max(largest, ((dq - first[0]).float().norm() / first[0].float().norm()).item())
    print(f"dq differs by {largest:.1e} of its norm from run to run")
    assert largest < 1e-3


# ---- what kernels do not take, and wrong arguments


@pytest.mark.parametrize("scale", [0.0, -0.2])
def test_scales_that_are_not_positive(scale):
    case = dataclasses.replace(sink_case([(70, 90)]), softmax_scale=scale)
    arguments = case.arguments()
    out, lse, gradients = run(case)
    expected, expected_lse = reference_sink_attention(**arguments)
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    wanted = reference_sink_attention_backward(case.d_out, out=out, lse=lse, **arguments)
    for got, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("packed", [False, True])
def test_more_sequences_than_a_grid_holds(packed):
    """Each sequence has one token, whose only rival in the softmax is the sink."""
    count = launch.MAX_GRID + 10
    s_aux: Any = sink_case([(1, 1)], 1, 1).s_aux
    gen = generator(0, "cuda")
    q, k, v = torch.randn((3, count, 1, 1, 64), generator=gen, device="cuda").bfloat16()
    cu_seqlens = None
    if packed:
        q, k, v = (t.squeeze(1) for t in (q, k, v))
        cu_seqlens = torch.arange(count + 1, dtype=torch.int32, device="cuda")
    out: Any = sink_attention(
        q.requires_grad_(not packed), k, v, s_aux, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens
    )  # fmt: skip
    score = (q.detach().double() * k.double()).sum(-1, keepdim=True) / 8
    expected = torch.sigmoid(score - s_aux.double()) * v.double()
    torch.testing.assert_close(out.detach().double(), expected, rtol=1e-2, atol=1e-6)
    if not packed:
        (dq,) = torch.autograd.grad(out, q, torch.ones_like(out))
        delta = out.detach().double().sum(-1, keepdim=True)  # from the rounded out, as in every backward
        wanted = torch.sigmoid(score - s_aux.double()) * (v.double().sum(-1, keepdim=True) - delta) * k.double() / 8
        torch.testing.assert_close(dq.double(), wanted, rtol=2e-2, atol=1e-3)


def with_padding(case: Any) -> Any:
    """The case with rows of NaN after the last sequence, in every tensor that has rows."""
    for name, rows in (("q", 100), ("d_out", 100), ("k", 70), ("v", 70)):
        t = getattr(case, name)
        more = torch.full((rows, *t.shape[1:]), torch.nan, dtype=t.dtype, device="cuda")
        setattr(case, name, torch.cat([t, more]))
    return case


def poison_free_memory() -> None:
    """Makes the allocator's free memory hold NaN."""
    blocks = [torch.full((1 << n,), torch.nan, device="cuda") for n in range(8, 23) for _ in range(4)]
    del blocks


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_rows_past_the_last_sequence_are_padding(d, known, graph):
    """Padding rows become 0, and -inf in lse. With `max_seqlen_q` the host does not read lengths."""
    lengths = [(20, 30), (0, 0), (140, 300)]
    call = {**sink_case(lengths, 8, 2, d, packed=True).arguments(), "return_lse": True}
    expected = sink_attention(**call)
    call = {**with_padding(sink_case(lengths, 8, 2, d, packed=True)).arguments(), "return_lse": True}
    if known:
        call["max_seqlen_q"] = 140
    poison_free_memory()
    out, lse = sink_attention(**call)
    if graph:
        captured, (out, lse) = capture(lambda: sink_attention(**call))
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        captured.replay()
    own, rest = slice(160), slice(160, None)
    assert torch.equal(out[own], expected[0]) and torch.equal(lse[own], expected[1])
    assert out.shape[0] == 260 and (out[rest] == 0).all() and (lse[rest] == -torch.inf).all()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("d", [64, 128])
def test_gradients_of_padding_rows_are_0(d, window, deterministic):
    """The output's gradient may be NaN in padding rows, and all rows may be padding."""
    names = ("q", "k", "v", "s_aux")
    for lengths in ([(20, 30), (0, 0), (140, 300)], [(0, 0)]):
        plain = sink_case(lengths, 8, 2, d, packed=True, window=window)
        longer = with_padding(sink_case(lengths, 8, 2, d, packed=True, window=window))
        gradients = []
        for case in (plain, longer):
            leaves = [getattr(case, name).detach().requires_grad_() for name in names]
            call = {**case.arguments(), **dict(zip(names, leaves, strict=True))}
            poison_free_memory()
            out = sink_attention(**call, deterministic=deterministic)
            gradients.append(torch.autograd.grad(out, leaves, case.d_out))
        for want, got in zip(*gradients, strict=True):
            rows = want.shape[0]
            assert (got[rows:] == 0).all() and got.isfinite().all()
            if deterministic or want is not gradients[0][0]:
                assert torch.equal(got[:rows], want)
            else:
                torch.testing.assert_close(got[:rows], want, rtol=1e-2, atol=1e-2)
