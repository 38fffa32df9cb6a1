"""What a launch tries, which error the caller sees, and which launches stay prepared."""

import gc
import weakref
from collections.abc import Callable
from typing import Annotated, Any, NoReturn, TypedDict

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cute_kernels import mla_fp8_decode
from cute_kernels.runtime import launch
from cute_kernels.runtime.launch import PreparedLaunches, by_name, launch_or_explain
from cute_kernels.runtime.ops import Operator, Option

CPU = torch.device("cpu")


class Inputs(TypedDict):
    q: torch.Tensor


class Options(TypedDict, total=False):
    s_aux: torch.Tensor | None
    number: Annotated[int | None, Option(planned=True)]
    alpha: Annotated[float | None, Option()]


class Request(Inputs, Options):
    pass


OP = Operator("test_launch", Inputs, Options, Request)


@pytest.mark.parametrize("refusal", [ValueError, TypeError, AttributeError, RuntimeError])
def test_the_checks_word_the_error(refusal: type[Exception]) -> None:
    def refuse(request: Any) -> None:
        raise refusal("Mismatched")

    def check(request: Any) -> None:
        raise ValueError(f"number: got {request['number']}; needs another")

    with pytest.raises(ValueError, match="number: got 3") as raised:
        launch_or_explain(OP, refuse, check)(OP.request(number=3))
    assert raised.value.__context__ is None, "the user would read two errors"


def test_an_error_of_the_kernel_itself_is_seen() -> None:
    checked: list[Any] = []

    def kernel(request: Any) -> NoReturn:
        raise RuntimeError("CUDA error: launch failed")

    with pytest.raises(RuntimeError, match="launch failed") as raised:
        launch_or_explain(OP, kernel, checked.append)(OP.request(number=3))
    assert checked == [OP.request(number=3)] and raised.value.__context__ is None


def test_an_interrupt_is_not_swallowed() -> None:
    def interrupted(request: Any) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch_or_explain(OP, interrupted, pytest.fail)(OP.request())


@pytest.mark.parametrize("explained", [False, True])
def test_a_refusal_keeps_no_argument_alive(explained: bool) -> None:
    """The traceback holds frames, and frames hold tensors: a cycle would keep gigabytes until the next collection."""

    def refuse(request: Any) -> None:
        raise RuntimeError("Mismatched")

    def check(request: Any) -> None:
        if explained:
            raise ValueError("tensor: got one; needs another")

    tensor = torch.empty(1)
    seen = weakref.ref(tensor)
    gc.disable()
    try:
        try:
            launch_or_explain(OP, refuse, check)(OP.request(q=tensor))
        except (RuntimeError, ValueError):
            pass
        del tensor
        assert seen() is None
    finally:
        gc.enable()


def test_a_kernel_is_launched_by_name() -> None:
    """Arguments are in the order of the kernel's `__call__`. Unknown names are left out; constants replace None."""
    launched: list[Any] = []

    def kernel(*arguments: Any) -> None:
        launched.append(arguments)

    tiny = by_name(OP, kernel, "tests.cpu.tiny_kernel:TinyKernel", mY=2, other=3, alpha=1.0)
    for request in (OP.request(), OP.request(alpha=0.5), OP.request(alpha=True)):
        tiny(request, mX=1)
    assert launched == [(1, 2, 1.0), (1, 2, 0.5), (1, 2, True)]
    with pytest.raises(TypeError, match="mX"):
        tiny(OP.request())


def test_prepared_launches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MAX_PREPARED", 3)
    prepared: PreparedLaunches[int, str] = PreparedLaunches()
    for key in range(10):
        assert prepared.keep(key, str(key), CPU) == str(key)
        assert len(prepared) <= 3 and prepared[key] == str(key)


def test_nothing_is_kept_under_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.memory, "is_capturing", lambda device: True)
    prepared: PreparedLaunches[int, str] = PreparedLaunches()
    assert prepared.keep(1, "one", CPU) == "one" and not prepared


class _Wrapper(torch.Tensor):
    """A tensor without memory, like a DTensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "_Wrapper":
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(func)


def fake_tensor() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(3, device="cpu")


@pytest.mark.parametrize("make", [lambda: _Wrapper(torch.zeros(3)), fake_tensor], ids=["wrapper", "fake"])
def test_a_tensor_without_memory_is_refused_before_the_launch(make: Callable[[], torch.Tensor]) -> None:
    """The tensor's address is 0, which a kernel would take."""
    launched: list[Any] = []
    run = launch_or_explain(OP, launched.append, pytest.fail)
    plain = torch.zeros(3)
    with pytest.raises(TypeError, match=r"s_aux: got \w+ without memory of its own; needs a plain tensor"):
        run(OP.request(q=plain, s_aux=make(), number=3))
    assert not launched
    for argument in (torch.nn.Parameter(plain), plain.as_subclass(_Plain), torch.zeros(0).as_subclass(_Plain)):
        run(OP.request(q=plain, s_aux=argument, number=["a list"]))
    assert len(launched) == 3


class _Plain(torch.Tensor):
    """A subclass with memory."""


def test_a_dispatch_mode_sees_the_operator() -> None:
    """Shapes are computed without memory, and the implementation is not called."""
    with FakeTensorMode():
        q = torch.zeros((1, 1, 8, 576), dtype=torch.bfloat16, device="cpu")
        cache = torch.zeros((2, 64, 656), dtype=torch.uint8, device="cpu")
        indices = torch.zeros((1, 1, 5), dtype=torch.int32, device="cpu")
        out, lse = mla_fp8_decode(q, cache, indices=indices, return_lse=True)
    assert type(out) is type(q) and out.shape == (1, 1, 8, 512) and lse.shape == (1, 1, 8)
