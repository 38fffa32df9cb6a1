"""`sink_attention` in torch: values, gradients, compiling, autocast, checkpointing, and what leads to a launch."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cute_kernels import sink_attention
from cute_kernels.gqa.op import gqa_decode
from cute_kernels.sink import op
from cute_kernels.sink.launch import BackwardRows, Gradients, _of_reference
from cute_kernels.sink.reference import reference_sink_attention, reference_sink_attention_backward
from cute_kernels.sink.request import BACKWARD, FORWARD, Request
from tests.kit.mla_cases import generator, strided

INF, NAN = math.inf, math.nan
TENSORS = ("q", "k", "v", "s_aux")
OPS = torch.ops.cute_kernels


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield


def inputs(
    *shape_q: int, s_k: int = 9, h_kv: int = 2, dtype: torch.dtype = torch.bfloat16, seed: int = 0, grad: bool = True
) -> dict[str, Any]:
    """Arguments whose tensors are leaves of autograd."""
    gen = generator(seed)
    *batch, _, h_q, d = shape_q = shape_q or (2, 5, 4, 64)
    q = torch.randn(shape_q, generator=gen).to(dtype)
    k, v = torch.randn(2, *batch, s_k, h_kv, d, generator=gen).to(dtype)
    return {
        name: t.requires_grad_(grad)
        for name, t in zip(TENSORS, (q, k, v, torch.randn(h_q, generator=gen)), strict=True)
    }


def packed(**options: Any) -> dict[str, Any]:
    cu_seqlens = {"cu_seqlens_q": torch.tensor([0, 3, 3, 8]).int(), "cu_seqlens_k": torch.tensor([0, 2, 5, 9]).int()}
    return {**inputs(8, 4, 64, **options), **cu_seqlens}


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (inputs(), {}),
    "window": (inputs(seed=1), {"window": 3}),
    "not causal": (inputs(seed=2), {"causal": False, "window": 4, "softmax_scale": 0.3}),
    "float16, d 128": (inputs(1, 7, 6, 128, dtype=torch.float16, h_kv=1, seed=3), {"softmax_scale": 1}),
    "queries without keys": (inputs(2, 9, 4, 64, s_k=4, seed=4), {}),
    "no sink": ({**inputs(seed=5), "s_aux": None}, {"window": 2}),
    "packed": (packed(seed=6), {}),
    "packed, window": (packed(seed=7), {"window": 2, "deterministic": True}),
    "no keys": (inputs(2, 3, 4, 64, s_k=0, seed=8), {}),
    "no queries": (inputs(2, 0, 4, 64, seed=9), {}),
    "no batch": (inputs(0, 5, 4, 64, seed=10), {}),
}
EVERY = pytest.mark.parametrize(("tensors", "options"), CALLS.values(), ids=CALLS)
UNLIKE = ["not causal", "no sink", "packed, window", "no keys"]
TRACED = pytest.mark.parametrize(("tensors", "options"), [CALLS[name] for name in UNLIKE], ids=UNLIKE)
"""Calls with different graphs: other numbers, other tensors given, sizes of 0."""


def gradients(out: torch.Tensor, tensors: dict[str, Any], dout: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    leaves = [tensors[name] for name in TENSORS if tensors[name] is not None]
    dout = torch.randn(out.shape, generator=generator(50)).to(out.dtype) if dout is None else dout
    return torch.autograd.grad(out, leaves, dout)


def require_same(got: Any, expected: Any) -> None:
    for ours, want in zip(got, expected, strict=True):
        assert ours.dtype == want.dtype
        assert torch.equal(ours, want)


def oracle(tensors: dict[str, Any], options: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The output, lse and gradients, each rounded once from float64."""
    arguments = {name: value for name, value in {**tensors, **options}.items() if name != "deterministic"}
    dtype = tensors["q"].dtype
    wide_out, wide_lse = reference_sink_attention(**arguments)
    out, lse = wide_out.to(dtype), wide_lse.float()
    dout = torch.randn(out.shape, generator=generator(50)).to(dtype)
    wide = reference_sink_attention_backward(dout, out=out, lse=lse, **arguments)
    rounded = [t.to(dtype) for t in wide[:3]] + [t.float() for t in wide[3:] if t is not None]
    return out, lse, rounded


def rounded_reference(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s_aux: Any = None, **options: Any
) -> Any:
    """Gradients in float64 from an output and lse that are rounded as the operator returns them."""
    out, lse = reference_sink_attention(q, k, v, s_aux, **options)
    return reference_sink_attention_backward(dout, q, k, v, out.to(q.dtype), lse.float(), s_aux, **options)


@EVERY
def test_values_and_gradients_are_rounded_once(tensors, options):
    expected, expected_lse, expected_gradients = oracle(tensors, options)
    out, lse = sink_attention(**tensors, **options, return_lse=True)
    require_same((out.detach(), lse), (expected, expected_lse))
    require_same(gradients(out, tensors), expected_gradients)
    assert out.is_contiguous() and lse.is_contiguous()


@EVERY
def test_without_gradients_it_is_the_same_and_not_recorded(tensors, options):
    expected = sink_attention(**tensors, **options)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            out: Any = sink_attention(**tensors, **options)
        assert not out.requires_grad
        assert torch.equal(out, expected)


def test_any_strides():
    """Transformers has heads before tokens; other inputs are parts of a fused projection, or have rows far apart."""
    plain = inputs(grad=False)
    gen, expected = generator(1), sink_attention(**plain)
    heads_first = {name: plain[name].transpose(1, 2).contiguous().transpose(1, 2) for name in TENSORS[:3]}
    assert torch.equal(sink_attention(**heads_first, s_aux=plain["s_aux"]), expected)
    apart = {name: strided(plain[name]) for name in TENSORS[:3]}
    assert torch.equal(sink_attention(**apart, s_aux=plain["s_aux"]), expected)
    fused = torch.randn(2, 5, 8, 64, generator=gen).bfloat16().requires_grad_()
    q, k, v = fused.split([4, 2, 2], dim=2)
    out = sink_attention(q, k, v)
    (got,) = torch.autograd.grad(out, fused, torch.ones_like(out))
    parts = rounded_reference(torch.ones_like(out), q, k, v)[:3]
    assert torch.equal(got, torch.cat(parts, 2).bfloat16())


def test_expanded_gradients_and_keys():
    """The gradient of a sum has strides of 0, and one head of keys may be expanded to all heads."""
    tensors = inputs()
    one = tensors["k"].detach()[:, :, :1].requires_grad_()
    out: Any = sink_attention(tensors["q"], one.expand(-1, -1, 4, -1), one.expand(-1, -1, 4, -1))
    (got,) = torch.autograd.grad(out.sum(), one)
    dk, dv = rounded_reference(torch.ones_like(out), tensors["q"], one, one)[1:3]
    torch.testing.assert_close(got.double(), dk + dv, rtol=2**-6, atol=2**-6)


def test_each_gradient_alone():
    for wanted in TENSORS:
        tensors = inputs(grad=False)
        tensors[wanted].requires_grad_()
        out = sink_attention(**tensors)
        (got,) = torch.autograd.grad(out, tensors[wanted], torch.ones_like(out))
        everything = rounded_reference(torch.ones_like(out), **tensors)
        expected: Any = everything[TENSORS.index(wanted)]
        assert torch.equal(got, expected.to(got.dtype))


def test_second_derivatives_are_refused():
    tensors = inputs()
    out: Any = sink_attention(**tensors)
    (dq,) = torch.autograd.grad(out.float().square().sum(), tensors["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="sink_attention: it is differentiable once"):
        dq.sum().backward()


def test_only_calls_with_gradients_go_through_torchs_dispatcher():
    for grad, enabled in ((True, True), (True, False), (False, True)):
        with torch.set_grad_enabled(enabled), torch.profiler.profile() as profile:
            sink_attention(**inputs(grad=grad))
        events = {event.key for event in profile.key_averages()}
        assert any("cute_kernels::sink_attention" in event for event in events) == (grad and enabled)


# ---- torch.compile, autocast, checkpointing


@TRACED
def test_compiles_without_a_graph_break(tensors, options):
    compiled = torch.compile(sink_attention, fullgraph=True, backend="aot_eager")
    expected = sink_attention(**tensors, **options, return_lse=True)
    out, lse = compiled(**tensors, **options, return_lse=True)
    require_same((out, lse), expected)
    require_same(gradients(out, tensors), gradients(expected[0], tensors))
    assert not lse.requires_grad
    with torch.no_grad():
        require_same((compiled(**tensors, **options),), expected[:1])


def test_compiles_for_sizes_that_change():
    compiled = torch.compile(sink_attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for s_q, s_k in ((4, 9), (7, 7), (11, 6)):
        tensors = inputs(2, s_q, 4, 64, s_k=s_k)
        out, expected = compiled(**tensors, window=3), sink_attention(**tensors, window=3)
        require_same((out,), (expected,))
        require_same(gradients(out, tensors), gradients(expected, tensors))


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, compiles):
    """q, k and v are cast to autocast's dtype, the sink is always float32, and gradients have the dtypes of the leaves.

    The sink has more digits than that dtype, so that a cast would show.
    """
    tensors: dict[str, Any] = {name: t.detach().float().requires_grad_() for name, t in inputs().items()}
    attend = torch.compile(sink_attention, fullgraph=True, backend="aot_eager") if compiles else sink_attention
    with torch.autocast("cpu", dtype=dtype):
        out = attend(**tensors, window=4)
    cast: dict[str, Any] = {name: t.detach().to(dtype) for name, t in tensors.items()}
    cast["s_aux"] = tensors["s_aux"].detach()
    dout = torch.ones_like(out)
    require_same((out,), (sink_attention(**cast, window=4),))
    expected: Any = rounded_reference(dout, **cast, window=4)
    for got, want, rounded in zip(
        gradients(out, tensors, dout), expected, (dtype, dtype, dtype, torch.float32), strict=True
    ):
        assert got.dtype == torch.float32
        assert torch.equal(got, want.to(rounded).float())
    half = tensors["s_aux"].to(dtype)
    with torch.autocast("cpu", dtype=dtype):
        require_same((attend(**{**cast, "s_aux": half}),), (sink_attention(**{**cast, "s_aux": half.float()}),))


def test_autocast_leaves_codes_and_float64_to_the_checks():
    tensors = inputs(grad=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for name, dtype in itertools.product(("q", "k", "v"), (torch.float64, torch.int8, torch.float8_e4m3fn)):
            with pytest.raises(TypeError, match=f"^{name}: got dtype {dtype}"):
                sink_attention(**{**tensors, name: tensors[name].to(dtype)})


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant, monkeypatch):
    runs = []

    def counted(*arguments: Any, **options: Any) -> Any:
        runs.append(1)
        return reference_sink_attention(*arguments, **options)

    def block(q: Any, k: Any, v: Any, s_aux: Any) -> torch.Tensor:
        out: Any = sink_attention(q * 2, k * 2, v, s_aux, window=4)
        return out * 3

    monkeypatch.setattr(op, "reference_sink_attention", counted)
    tensors = inputs()

    expected = block(*tensors.values())
    wanted = gradients(expected, tensors)
    runs.clear()
    out: Any = checkpoint(block, *tensors.values(), use_reentrant=reentrant)
    assert runs == [1]
    for t in tensors.values():
        t.grad = None
    out.backward(
        torch.randn(out.shape, generator=generator(50)).to(out.dtype)
    )  # reentrant checkpoints do not support autograd.grad
    assert runs == [1, 1]
    require_same((out, *(t.grad for t in tensors.values())), (expected, *wanted))


@TRACED
def test_operators_are_registered_as_torch_wants_it(tensors, options):
    names = ("cu_seqlens_q", "cu_seqlens_k")
    numbers = {"causal": True, "window": None, "softmax_scale": None, "deterministic": False, **options}
    arguments = (*(tensors.get(name) for name in (*TENSORS, *names)), *numbers.values())
    torch.library.opcheck(OPS.sink_attention.default, (*arguments, True))
    with torch.no_grad():
        detached = [t.detach() if isinstance(t, torch.Tensor) else t for t in arguments]
        out, lse = OPS.sink_attention.default(*detached, False)
        torch.library.opcheck(OPS.sink_attention_backward.default, (torch.ones_like(out), out, lse, *detached, None))


def test_operators_check_what_they_get():
    """The operators can be called directly; a compiled graph does so."""
    tensors = inputs(grad=False)
    rest = (None, None, True, None, None, False)
    out, lse = OPS.sink_attention(*tensors.values(), *rest, False)
    with pytest.raises(ValueError, match="^k: got shape"):
        OPS.sink_attention(tensors["q"], tensors["k"][:1], tensors["v"], None, *rest, False)
    for name, wrong in {"dout": (out[:1], out, lse), "out": (out, out.float(), lse), "lse": (out, out, lse[0])}.items():
        with pytest.raises((TypeError, ValueError), match=f"^{name}: got"):
            OPS.sink_attention_backward(*wrong, *tensors.values(), *rest, None)


# ---- the way to a launch, with what will run on a GPU replaced


class OnGpu(torch.Tensor):
    """A CPU tensor whose `is_cuda` is true."""

    is_cuda = True


def elsewhere(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: t.detach().as_subclass(OnGpu) for name, t in tensors.items()}


def backward(dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, call: Any) -> Gradients:
    """The gradients that a GPU's launches would compute, over tensors of a CPU."""
    given = {name: call[name] for name in BACKWARD.names if name in call}
    given["q"] = given["q"].as_subclass(OnGpu)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(op, "check", lambda request: None)
        patched.setattr(op, "check_tensor", lambda *arguments, **options: None)
        patched.setattr(op, "_launchable", lambda request: launchable(FORWARD.request(**{**request, "q": call["q"]})))
        return op._run_backward(BACKWARD.request(**given, dout=dout, out=out, lse=lse))


launchable = op._launchable


class Launches:
    """Stands for the kernels: records its arguments and returns the reference's results."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[Request] = []
        self.decoded: list[dict[str, Any]] = []
        self.douts: list[torch.Tensor] = []
        monkeypatch.setattr(op, "launch_forward", self.forward)
        monkeypatch.setattr(op, "launch_backward", self.backward)
        monkeypatch.setattr(op, "gqa_decode", self.decode)

    def forward(self, request: Request, out: torch.Tensor, lse: torch.Tensor) -> None:
        self.requests.append(request)
        assert out.is_contiguous() and lse.is_contiguous() and lse.dtype == torch.float32
        arguments = _of_reference(request)
        for buffer, result in zip((out, lse), reference_sink_attention(**arguments), strict=True):
            buffer.copy_(result)

    def backward(self, request: Request, rows: BackwardRows, gradients: Gradients) -> None:
        self.requests.append(request)
        self.douts.append(rows.dout)
        arguments, (dout, out, lse, delta) = _of_reference(request), rows
        expected_out, expected_lse = reference_sink_attention(**arguments)
        assert torch.equal(out, expected_out.to(out.dtype)) and torch.equal(lse, expected_lse.float())
        results = reference_sink_attention_backward(dout, out=out, lse=lse, delta=delta, **arguments)
        for buffer, result in zip(gradients, results, strict=True):
            assert (buffer.numel() == 0) == (result is None or result.numel() == 0)
            if result is not None:
                buffer.copy_(result)

    def decode(self, *arguments: Any, **options: Any) -> Any:
        self.decoded.append(options)
        plain = [t.as_subclass(torch.Tensor) if isinstance(t, torch.Tensor) else t for t in arguments]
        if options["s_aux"] is not None:
            options["s_aux"] = options["s_aux"].as_subclass(torch.Tensor)
        return gqa_decode(*plain, **options)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(monkeypatch)


@EVERY
def test_launches_get_what_they_need_and_nothing_more(tensors, options, launches):
    call = FORWARD.request(**{**tensors, **options}, differentiable=True)
    expected, expected_lse, expected_gradients = oracle(tensors, options)
    with torch.no_grad():
        out, lse = op._forward_on_gpu(call)
        require_same((out, lse), (expected, expected_lse))
        dout = torch.randn(out.shape, generator=generator(50)).to(out.dtype)
        got = backward(dout, out, lse, call)
    assert got[3].numel() == (0 if tensors["s_aux"] is None else 4 if tensors["q"].shape[-1] == 64 else 6)
    require_same(got[: len(expected_gradients)], expected_gradients)
    assert not launches.decoded
    if tensors["q"].numel() == 0 or tensors["k"].numel() == 0:
        assert not launches.requests
        return
    assert len(launches.requests) == 2
    for request in launches.requests:
        d = tensors["q"].shape[-1]
        assert request["softmax_scale"] == (options.get("softmax_scale") or d**-0.5)
        assert isinstance(request["softmax_scale"], float)
        assert request["deterministic"] == options.get("deterministic", False)
        assert request["window"] == options.get("window")
        assert request["q"] is tensors["q"] and request["k"] is tensors["k"] and request["s_aux"] is tensors["s_aux"]


def test_launches_get_rows_that_can_be_copied(launches):
    """Expanded or misaligned tensors are copied, others are not."""
    tensors = inputs(grad=False)
    one = tensors["k"][:, :, :1]
    k, v = one.expand(-1, -1, 4, -1), strided(tensors["v"][:, :, :1].expand(-1, -1, 4, -1))
    shown = FORWARD.request(q=tensors["q"], k=k, v=v, window=2**40, differentiable=True)
    out, lse = op._forward_on_gpu(shown)
    wide = torch.ones(2, 5, 4, 68, dtype=torch.bfloat16)
    for dout in (torch.ones(()).bfloat16().expand(out.shape), wide[..., :64], wide[..., 4:], wide[..., ::2][..., :1]):
        backward(dout.expand(out.shape), out, lse, shown)
    for request in launches.requests:
        assert request["k"].is_contiguous() and torch.equal(request["k"], k)
        assert request["v"] is v and request["q"] is tensors["q"]
        assert request["window"] is None
    for dout in launches.douts:
        assert dout.is_contiguous() and dout.data_ptr() % 16 == 0 and (dout == 1).all()
    backward(out, out, lse, shown)
    assert launches.douts[-1] is out


@pytest.mark.parametrize("return_lse", [False, True])
def test_few_queries_without_gradients_are_decoded(launches, return_lse):
    tensors = inputs(2, 1, 4, 64, s_k=300)
    options: dict[str, Any] = {"causal": False, "window": 40, "softmax_scale": 0.2}
    result = sink_attention(**elsewhere(tensors), **options, return_lse=return_lse)
    (decoded,) = launches.decoded
    assert {name: decoded[name] for name in options} == options
    assert decoded["layout"] == "BSNH" and decoded["return_lse"] == return_lse
    expected = sink_attention(**tensors, **options, return_lse=True)
    got = result if return_lse else (result,)
    for ours, want in zip(got, expected, strict=False):
        torch.testing.assert_close(ours, want.detach(), rtol=2**-7, atol=1e-6)


def test_the_operator_decodes_as_well(launches):
    """Compiled inference calls the operator directly."""
    tensors = inputs(2, 1, 4, 64, s_k=300, grad=False)
    call = FORWARD.request(**tensors)
    out, lse = op._forward_on_gpu(call)
    assert launches.decoded and not launches.requests
    expected, expected_lse, _ = oracle(tensors, {})
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse)
    op._forward_on_gpu(FORWARD.request(**{**call, "differentiable": True}))
    assert len(launches.requests) == len(launches.decoded) == 1


def test_what_decoding_refuses_is_said_in_our_words(launches):
    tensors = elsewhere(inputs(2, 1, 4, 64, s_k=300))
    for name, wrong in {"k": tensors["k"][:1], "v": tensors["v"].half(), "s_aux": tensors["s_aux"][:2]}.items():
        with pytest.raises((TypeError, ValueError), match=f"^{name}: got"):
            sink_attention(**{**tensors, name: wrong})
    for option in ({"window": 0}, {"causal": None}, {"window": "all"}):
        with pytest.raises((TypeError, ValueError), match=f"^{next(iter(option))}: got"):
            sink_attention(**tensors, **option)


def test_an_error_of_decoding_itself_comes_up(monkeypatch):
    def broken(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(op, "gqa_decode", broken)
    with pytest.raises(RuntimeError, match="^out of memory$"):
        sink_attention(**elsewhere(inputs(2, 1, 4, 64)))


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("everywhere", [False, True])
def test_torch_can_ask_for_deterministic_gradients(asked, everywhere, monkeypatch):
    seen: list[Any] = []

    def forward(request: Any) -> tuple[None, None]:
        seen.append(request)
        return None, None

    monkeypatch.setattr(op, "_forward", forward)
    torch.use_deterministic_algorithms(everywhere)
    try:
        sink_attention(**inputs(), deterministic=asked)
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen[0]["deterministic"] == (asked or everywhere)


def test_lengths_are_read_once(monkeypatch):
    """Reading waits for the GPU, and all layers of a model share their lengths."""
    arguments = packed()
    reads = []
    tolist = torch.Tensor.tolist

    def counted(t: torch.Tensor) -> Any:
        reads.append(1)
        return tolist(t)

    monkeypatch.setattr(op, "reference_sink_attention", lambda q, *a, **k: (q.double(), q[..., 0].double()))
    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    for _ in range(3):
        sink_attention(**arguments)
    assert len(reads) == 2
    arguments["cu_seqlens_q"].add_(0)
    sink_attention(**arguments)
    assert len(reads) == 3


# ---- callers who know their lengths


def padded(grad: bool = False, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A packed call, and a copy with three more rows of q and two of k and v that hold NaN."""
    call = packed(grad=grad, **options)
    more = {
        name: torch.cat([call[name].detach(), torch.full((rows, *call[name].shape[1:]), NAN).bfloat16()])
        for name, rows in (("q", 3), ("k", 2), ("v", 2))
    }
    return call, {**call, **{name: t.requires_grad_(grad) for name, t in more.items()}, "max_seqlen_q": 5}


@pytest.mark.parametrize("longest", [5, None])
@pytest.mark.parametrize("compiles", [False, True])
def test_rows_past_the_last_sequence_are_padding(compiles: bool, longest: int | None) -> None:
    call, longer = padded()
    longer["max_seqlen_q"] = longest
    function: Any = torch.compile(sink_attention, fullgraph=True, backend="eager") if compiles else sink_attention
    expected, expected_lse = sink_attention(**call, return_lse=True)
    out, lse = function(**longer, return_lse=True)
    assert out.shape == longer["q"].shape
    assert torch.equal(out[:8], expected) and torch.equal(lse[:8], expected_lse)
    assert (out[8:] == 0).all() and (lse[8:] == -torch.inf).all()


@pytest.mark.parametrize("longest", [5, None])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("options", [{}, {"window": 2}], ids=str)
def test_gradients_of_padding_rows_are_0(
    options: dict[str, Any], deterministic: bool, longest: int | None, launches: Launches
) -> None:
    """Padding rows of the inputs and of the output's gradient may hold anything, also on the way to a launch."""
    call, longer = padded(grad=True)
    longer["max_seqlen_q"] = longest
    dout = torch.randn(11, 4, 64, generator=generator(7)).bfloat16()
    dout[8:] = NAN
    expected = gradients(sink_attention(**call, **options), call, dout[:8])
    out = sink_attention(**longer, **options, deterministic=deterministic)
    request = FORWARD.request(**longer, **options, deterministic=deterministic, differentiable=True)
    with torch.no_grad():
        launched = backward(dout, *op._forward_on_gpu(request), request)
    assert len(launches.requests) == 2
    for found in (gradients(out, longer, dout), launched):
        for got, want, rows in zip(found, expected, (8, 9, 9, None), strict=True):
            assert torch.equal(got[:rows], want)
            assert rows is None or (got[rows:] == 0).all()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("borders", [[0], [0, 0, 0]])
def test_all_tokens_may_be_padding(borders: list[int], grad: bool, launches: Launches) -> None:
    cu = torch.tensor(borders).int()
    tensors = {**inputs(8, 4, 64, grad=grad), "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    out, lse = sink_attention(**tensors, return_lse=True)
    assert (out == 0).all() and (lse == -torch.inf).all()
    request = FORWARD.request(**tensors, differentiable=True)
    with torch.no_grad():
        out, lse = op._forward_on_gpu(request)
        launched = backward(out, out, lse, request)
    assert (out == 0).all() and (lse == -torch.inf).all() and all((t == 0).all() for t in launched)
    assert len(launches.requests) == (0 if len(borders) == 1 else 2)
    assert not grad or all((t == 0).all() for t in gradients(sink_attention(**tensors), tensors))


def test_the_host_does_not_read_what_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading would wait for a GPU. A CPU waits for nobody, so there the lengths are checked."""
    call, longer = padded()
    read: list[str] = []
    monkeypatch.setattr(op, "_check_lengths", lambda name, *rest: read.append(name))
    monkeypatch.setattr(op, "require_sm90", lambda *a: None)
    request = FORWARD.request(**{**longer, "s_aux": None})
    op.check(request)
    assert read == ["cu_seqlens_q", "cu_seqlens_k"]
    on_gpu = {name: t.to("meta") if isinstance(t, torch.Tensor) else t for name, t in request.items()}
    monkeypatch.setattr(op, "check_tensor", lambda *a, **options: None)
    op.check(on_gpu)
    assert len(read) == 2
    op.check(FORWARD.request(**{**on_gpu, "max_seqlen_q": None}))
    assert len(read) == 4
    op.check(FORWARD.request(**{**on_gpu, "differentiable": True}))
    assert len(read) == 6, "the backward is not told, and would read them"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"max_seqlen_q": True}, "max_seqlen_q: got bool; needs an int"),
        ({"max_seqlen_q": 2.0}, "max_seqlen_q: got float; needs an int"),
        ({"max_seqlen_q": -1}, "max_seqlen_q: got -1; needs at least 0"),
        ({"cu_seqlens_q": torch.tensor([0, 3, 3, 12]).int()}, "cu_seqlens_q: got 12 last; needs .* at most the number"),
        ({"cu_seqlens_k": torch.tensor([0, 5, 3, 9]).int()}, "cu_seqlens_k: got 3 after 5 at index 2"),
    ],
)
def test_wrong_lengths_of_such_callers(changes: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        sink_attention(**{**padded()[1], **changes})


def test_lengths_that_are_known_are_for_packed_calls() -> None:
    with pytest.raises(ValueError, match="max_seqlen_q: got 5 without cu_seqlens_q"):
        sink_attention(**inputs(grad=False), max_seqlen_q=5)
