"""Registered operators: direct in eager mode, one node without a graph break under torch.compile."""

from collections.abc import Iterator
from typing import Annotated, Any, TypedDict

import pytest
import torch

from cute_kernels.runtime.ops import Operator, Option, Written

calls: list[str] = []


class Scale(TypedDict):
    """x, and where to write it."""

    x: torch.Tensor
    out: Written
    lse: Written


class Factor(TypedDict, total=False):
    """How to scale.

    alpha: the factor.
    """

    alpha: Annotated[float, Option(1.0)]


class ScaleRequest(Scale, Factor):
    pass


class Input(TypedDict):
    x: torch.Tensor


class Power(TypedDict, total=False):
    exponent: Annotated[int, Option(3)]


class PowerRequest(Input, Power):
    pass


class NoOptions(TypedDict):
    pass


def scale_into(request: ScaleRequest) -> None:
    calls.append("implementation")
    request["out"].copy_(request["x"] * request["alpha"])
    request["lse"].copy_(request["x"].sum(-1).float())


def fake_scale_into(request: ScaleRequest) -> None:
    calls.append("fake")


def halved(x: torch.Tensor) -> torch.Tensor:
    # a graph break under torch.compile, were it traced: the value of a tensor decides
    return x / 2 if x.sum() > 0 else x / 2.0


def cubed(request: PowerRequest) -> torch.Tensor:
    calls.append("implementation")
    return request["x"] ** request["exponent"]


def keep_for_cubed(ctx: Any, request: PowerRequest, output: torch.Tensor) -> None:
    ctx.save_for_backward(request["x"])
    ctx.exponent = request["exponent"]


def backward_of_cubed(ctx: Any, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    calls.append("backward")
    (x,) = ctx.saved_tensors
    return {"x": gradient * ctx.exponent * x ** (ctx.exponent - 1)}


SCALE = Operator("test_scale_into", Scale, Factor, ScaleRequest)
HALVED = Operator("test_halved", Input, NoOptions, Input, "Tensor")
CUBED = Operator("test_cubed", Input, Power, PowerRequest, "Tensor")
scale = SCALE.register(scale_into, fake_scale_into)
halve = HALVED.register(lambda request: halved(request["x"]), lambda request: torch.empty_like(request["x"]))
cube = CUBED.register(
    cubed, lambda request: torch.empty_like(request["x"]), backward=backward_of_cubed, setup_context=keep_for_cubed
)


def scale_op(x: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, alpha: float) -> None:
    scale({"x": x, "out": out, "lse": lse, "alpha": alpha})


def halved_op(x: torch.Tensor) -> torch.Tensor:
    return halve({"x": x})


def cubed_op(x: torch.Tensor, exponent: int) -> torch.Tensor:
    return cube({"x": x, "exponent": exponent})


def test_a_table_says_the_schema() -> None:
    assert SCALE.schema == "(Tensor x, Tensor(a!) out, Tensor(b!) lse, float alpha) -> ()"
    assert (SCALE.tensors, SCALE.written) == (("x", "out", "lse"), ("out", "lse"))
    assert SCALE.defaults == {"x": None, "out": None, "lse": None, "alpha": 1.0}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    calls.clear()
    torch._dynamo.reset()
    yield


def scaled(x: torch.Tensor, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full_like(x, torch.nan)
    lse = torch.full(x.shape[:-1], torch.nan)
    scale_op(x + 1, out, lse, alpha)
    return out * 2, lse


def test_eager_calls_the_implementation_and_not_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    x, out = torch.randn(3, 4), torch.full((3, 4), torch.nan)
    with torch.profiler.profile() as profile:
        scale_op(x, out, torch.empty(len(x)), 2.0)
    assert calls == ["implementation"]
    assert torch.equal(out, 2 * x)
    assert not any("test_scale_into" in event.key for event in profile.key_averages())


def test_compiles_without_a_graph_break() -> None:
    compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager")
    for rows in (3, 5, 9):  # the second shape makes the compiler treat it as dynamic
        x = torch.randn(rows, 4)
        calls.clear()
        for got, want in zip(compiled(x, 3.0), scaled(x, 3.0), strict=True):
            assert torch.equal(got, want)
    assert calls.count("implementation") == 2


def test_function_with_a_result_compiles() -> None:
    x = torch.randn(6, 7)
    compiled = torch.compile(lambda t: halved_op(t * 2) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), x + 1)


def test_the_raw_implementation_would_break_the_graph() -> None:
    """A control: the tests above can fail."""
    with pytest.raises(Exception, match="[Dd]ata-dependent"):
        torch.compile(halved, fullgraph=True, backend="aot_eager")(torch.randn(3))


def test_a_call_whose_outputs_nobody_reads_is_kept() -> None:
    """Writing to a caller's tensor is an effect: the compiler may not drop it."""

    def write(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        scale_op(x, out, torch.empty(len(x)), 2.0)
        return x + 1

    x, out = torch.randn(3, 4), torch.full((3, 4), torch.nan)
    torch.compile(write, fullgraph=True, backend="aot_eager")(x, out)
    assert torch.equal(out, 2 * x)


@pytest.mark.parametrize("key", ["CPU", "CUDA"])
def test_registered_for_both_devices(key: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key("cute_kernels::test_scale_into", key)


def test_schema_says_what_is_written() -> None:
    arguments: tuple[Any, ...] = (torch.randn(3, 4), torch.empty(3, 4), torch.empty(3), 0.5)
    utilities = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.cute_kernels.test_scale_into.default, arguments, test_utils=utilities)


@pytest.mark.parametrize("compiles", [False, True])
def test_a_differentiable_operator_has_gradients(compiles: bool) -> None:
    function: Any = torch.compile(cubed_op, fullgraph=True, backend="aot_eager") if compiles else cubed_op
    x = torch.randn(5, requires_grad=True)
    out = function(x, 3)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x), (3 * x.detach() ** 2,))
    assert calls.count("backward") == 1


def test_a_differentiable_operator_goes_through_the_dispatcher_for_gradients_only() -> None:
    x = torch.randn(5, requires_grad=True)
    for wants, arguments in ((True, x), (False, x.detach())):
        with torch.profiler.profile() as profile:
            assert cubed_op(arguments, 3).requires_grad == wants
        assert any("test_cubed" in event.key for event in profile.key_averages()) == wants
    with torch.no_grad(), torch.profiler.profile() as profile:
        assert not cubed_op(x, 3).requires_grad
    assert not any("test_cubed" in event.key for event in profile.key_averages())


def test_a_name_is_taken_once() -> None:
    with pytest.raises(RuntimeError, match="test_halved"):
        HALVED.register(lambda request: None, lambda request: None)
