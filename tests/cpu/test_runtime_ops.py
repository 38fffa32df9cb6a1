"""Registered operators: direct in eager mode, one node without a graph break under torch.compile."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cute_kernels.runtime import ops

calls: list[str] = []


def scale_into(x: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, alpha: float) -> None:
    calls.append("implementation")
    out.copy_(x * alpha)
    if lse is not None:
        lse.copy_(x.sum(-1).float())


def fake_scale_into(x: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, alpha: float) -> None:
    calls.append("fake")


def halved(x: torch.Tensor) -> torch.Tensor:
    # a graph break under torch.compile, were it traced: the value of a tensor decides
    return x / 2 if x.sum() > 0 else x / 2.0


def fake_halved(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def cubed(x: torch.Tensor, exponent: int) -> torch.Tensor:
    calls.append("implementation")
    return x**exponent


def keep_for_cubed(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.exponent = inputs[1]


def backward_of_cubed(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    calls.append("backward")
    (x,) = ctx.saved_tensors
    return gradient * ctx.exponent * x ** (ctx.exponent - 1), None


SCHEMA = "(Tensor x, Tensor(a!) out, Tensor(b!)? lse, float alpha) -> ()"
scale_op = ops.register_op("test_scale_into", SCHEMA, scale_into, fake_scale_into)
halved_op = ops.register_op("test_halved", "(Tensor x) -> Tensor", halved, fake_halved)
cubed_op = ops.register_op(
    "test_cubed",
    "(Tensor x, int exponent) -> Tensor",
    cubed,
    lambda x, exponent: torch.empty_like(x),
    backward=backward_of_cubed,
    setup_context=keep_for_cubed,
)


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
        scale_op(x, out, None, 2.0)
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
        scale_op(x, out, None, 2.0)
        return x + 1

    x, out = torch.randn(3, 4), torch.full((3, 4), torch.nan)
    torch.compile(write, fullgraph=True, backend="aot_eager")(x, out)
    assert torch.equal(out, 2 * x)


@pytest.mark.parametrize("key", ["CPU", "CUDA"])
def test_registered_for_both_devices(key: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key("cute_kernels::test_scale_into", key)


@pytest.mark.parametrize("with_lse", [False, True])
def test_schema_says_what_is_written(with_lse: bool) -> None:
    lse = torch.empty(3) if with_lse else None
    arguments: tuple[Any, ...] = (torch.randn(3, 4), torch.empty(3, 4), lse, 0.5)
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
        ops.register_op("test_halved", "(Tensor x) -> Tensor", halved, fake_halved)
