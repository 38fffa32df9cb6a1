"""`sink_attention_backward` computes gradients from a given out and lse, so that parts of the keys add up."""

import math
from typing import Any

import pytest
import torch

from cute_kernels import sink_attention, sink_attention_backward
from cute_kernels.sink.reference import reference_sink_attention, reference_sink_attention_backward
from tests.kit.mla_cases import covering_cases, generator
from tests.kit.sink_cases import SINKS, SinkCase, SinkExpectation, reference_gradients, sink_case

CASES = covering_cases(
    {
        "lengths": (((9, 9),) * 2, ((5, 12),) * 2, ((12, 5),) * 2, ((1, 1),), ((0, 3),), ((7, 0),)),
        "window": (None, 1, 4),
        "sinks": SINKS,
        "h_q": (2, 6),
        "d": (64, 128),
        "dtype": (torch.bfloat16, torch.float16),
        "causal": (True, False),
        "packed": (False, True),
        "padded": (True, False),
    }
)


def call(case: SinkCase, **changes: Any) -> Any:
    """The gradients of a case, from the oracle's output and lse."""
    expected = SinkExpectation.of(case)
    rows = {"out": expected.out.exact.to(case.q.dtype), "lse": expected.lse.float()}
    return sink_attention_backward(**{"dout": case.d_out, **rows, **case.arguments(), **changes})


def label(sizes: dict[str, Any]) -> str:
    return "-".join(f"{name}={value}" for name, value in sizes.items())


@pytest.mark.parametrize("sizes", CASES, ids=label)
def test_against_the_oracle(sizes):
    case = sink_case(**sizes, h_kv=2, device="cpu", seed=3)
    gradients = call(case)
    SinkExpectation.of(case).require_gradients(*gradients)
    assert (gradients[3] is None) == (case.s_aux is None)
    for got, want in zip(gradients, (case.q, case.k, case.v, case.s_aux), strict=True):
        assert got is None or want is None or (got.shape, got.dtype) == (want.shape, want.dtype)
        assert got is None or got.is_contiguous()


@pytest.mark.parametrize("packed", [False, True])
def test_it_is_what_autograd_calls(packed):
    case = sink_case([(9, 14)] * 2, packed=packed, window=5, device="cpu")
    leaves = [t.detach().requires_grad_() for t in (case.q, case.k, case.v, case.s_aux)]  # type: ignore[union-attr]
    options = {name: value for name, value in case.arguments().items() if name not in ("q", "k", "v", "s_aux")}
    out, lse = sink_attention(*leaves, **options, return_lse=True)
    expected = torch.autograd.grad(out, leaves, case.d_out)
    q, k, v, s_aux = leaves
    got = sink_attention_backward(case.d_out, q, k, v, out.detach(), lse, s_aux, **options)
    for ours, want in zip(got, expected, strict=True):
        assert torch.equal(ours, want)
    (again, *_) = torch.compile(sink_attention_backward, fullgraph=True, backend="aot_eager")(
        case.d_out, q.detach(), k.detach(), v.detach(), out.detach(), lse, s_aux.detach(), **options
    )
    assert torch.equal(again, expected[0])


def wide(s: int = 12, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q, k, v, s_aux and dout in float64."""
    gen = generator(seed)
    shapes = ((1, s, 4, 8), (1, s, 2, 8), (1, s, 2, 8), (4,), (1, s, 4, 8))
    return tuple(torch.randn(shape, generator=gen, dtype=torch.float64) for shape in shapes)


@pytest.mark.parametrize("folded", [False, True])
def test_parts_of_the_keys_add_up(folded):
    """In the last step of a ring, queries see earlier keys whole and their own causally. Sinks count once."""
    q, k, v, s_aux, dout = wide()
    own = slice(8, 12)
    expected = reference_gradients(dout[:, own], q[:, own], k, v, s_aux)
    out, lse = reference_sink_attention(q[:, own], k, v, s_aux)
    sink: Any = s_aux
    if folded:
        lse, sink = torch.logaddexp(lse, s_aux), None
    dq, parts = torch.zeros_like(q[:, own]), []
    for keys, causal in ((slice(0, 3), False), (slice(3, 8), False), (own, True)):
        part = reference_sink_attention_backward(
            dout[:, own], q[:, own], k[:, keys], v[:, keys], out, lse, sink, causal=causal
        )
        dq += part[0]
        parts.append(part)
        if not folded:
            torch.testing.assert_close(part[3], expected[3], rtol=1e-11, atol=1e-12)
    dk, dv = (torch.cat([part[i] for part in parts], 1) for i in (1, 2))
    for got, want in zip((dq, dk, dv), expected, strict=False):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def test_parts_of_the_keys_add_up_in_the_operator():
    """In bfloat16 the sum of two rounded parts is within two roundings of the whole."""
    case = sink_case([(32, 96)], padded=False, device="cpu")
    out, lse = sink_attention(**case.arguments(), return_lse=True)
    options = {"s_aux": case.s_aux, "softmax_scale": case.softmax_scale}
    first, last = (
        sink_attention_backward(
            case.d_out, case.q, case.k[:, keys], case.v[:, keys], out, lse, causal=causal, **options
        )
        for keys, causal in ((slice(0, 64), False), (slice(64, 96), True))
    )
    whole = sink_attention_backward(case.d_out, case.q, case.k, case.v, out, lse, **options)
    torch.testing.assert_close(first[0].float() + last[0].float(), whole[0].float(), rtol=2**-7, atol=2**-6)
    assert torch.equal(torch.cat([first[1], last[1]], 1), whole[1])
    assert torch.equal(torch.cat([first[2], last[2]], 1), whole[2])
    for part in (first[3], last[3]):
        assert part is not None and whole[3] is not None and torch.equal(part, whole[3])


def test_the_lse_is_the_one_given():
    """With lse larger by log 2, weights and dv halve. Nothing would change if lse were computed again."""
    case = sink_case([(9, 9)], sinks="absent", device="cpu")
    dv = call(case)[2]
    halved = call(case, lse=SinkExpectation.of(case).lse.float() + math.log(2))[2]
    torch.testing.assert_close(halved.float(), dv.float() / 2, rtol=2**-7, atol=2**-9)


def test_delta_stands_for_out():
    case = sink_case([(9, 9)], device="cpu")
    out = SinkExpectation.of(case).out.exact.to(case.q.dtype)
    delta = (out.double() * case.d_out.double()).sum(-1).float()
    for got, want in zip(call(case, delta=delta, out=torch.full_like(out, math.nan)), call(case), strict=True):
        torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-9)


def test_a_loss_of_lse_by_delta():
    """Gradients of a loss of out and of the lse with the sink must agree with autograd."""
    q, k, v, s_aux, dout = wide(seed=1)
    dlse = torch.randn(1, 12, 4, generator=generator(2), dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (q, k, v, s_aux)]
    scores = torch.einsum("bsgrd,btgd->bgrst", q.unflatten(2, (2, 2)), k).flatten(1, 2) * 8**-0.5
    scores = scores.masked_fill(torch.ones(12, 12).triu(1).bool(), -math.inf)
    total = torch.logaddexp(scores.logsumexp(-1), s_aux[:, None])  # (1, 4, 12)
    weights = torch.exp(scores - total[..., None])
    out = torch.einsum("bhst,bthd->bshd", weights, v.repeat_interleave(2, 2))
    total = total.transpose(1, 2)
    expected = torch.autograd.grad((out, total), leaves, (dout, dlse))
    out, lse = out.detach(), total.detach()
    delta = (dout * out).sum(-1) - dlse
    tensors = [t.detach() for t in (q, k, v)]
    got = reference_sink_attention_backward(dout, *tensors, out, lse, delta=delta)
    for ours, want in zip(got, expected[:3], strict=False):
        torch.testing.assert_close(ours, want, rtol=1e-10, atol=1e-11)
    own = -(torch.exp(s_aux.detach() - lse) * delta).sum((0, 1))
    torch.testing.assert_close(own, expected[3], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("value", [-math.inf, math.inf])
def test_queries_with_an_infinite_lse_have_no_gradient(value):
    """A sink of +inf that is folded into lse leaves +inf."""
    case = sink_case([(9, 9)], padded=False, sinks="absent", device="cpu")
    out, lse = sink_attention(**case.arguments(), return_lse=True)
    lse[:, 3] = value
    dq, dk, dv, _ = sink_attention_backward(case.d_out, case.q, case.k, case.v, out, lse)
    assert (dq[:, 3] == 0).all() and all(t.isfinite().all() for t in (dq, dk, dv))


def test_gradients_have_no_gradients():
    case = sink_case([(3, 3)], device="cpu")
    case.q.requires_grad_()
    with pytest.raises(RuntimeError, match="differentiable once"):
        call(case)[0].sum().backward()


def test_unknown_arguments_are_refused():
    with pytest.raises(TypeError, match=r"^sink_attention_backward\(\) got an unexpected keyword argument 'scale'"):
        call(sink_case([(3, 3)], device="cpu"), scale=1.0)
