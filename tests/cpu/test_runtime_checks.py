"""Argument errors: raised before any launch, naming the argument, what it got and what it needs."""

import re
from typing import Any

import pytest
import torch

from cute_kernels.runtime import arch
from cute_kernels.runtime.checks import check_tensor, fail, require

EVERYTHING: dict[str, Any] = {
    "dtype": torch.bfloat16,
    "ndim": 3,
    "shape": (2, None, 576),
    "device": torch.device("cpu"),
    "align": 16,
    "unit_last_stride": True,
}


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def misaligned(*shape: int) -> torch.Tensor:
    """The first element is 2 bytes beyond a multiple of 16; all strides are those of a contiguous tensor."""
    flat = torch.zeros(torch.Size(shape).numel() + 8, dtype=torch.bfloat16)
    first = next(i for i in range(8) if flat[i:].data_ptr() % 16 == 2)
    return flat[first : first + torch.Size(shape).numel()].view(shape)


GOOD = {
    "contiguous": bf16(2, 5, 576),
    "rows apart": bf16(2, 5, 584)[:, :, :576],
    "batches apart": bf16(4, 5, 576)[::2],
    "expanded": bf16(1, 5, 576).expand(2, 5, 576),
    "no rows": bf16(2, 0, 576),
    "row stride of a single row": bf16(2, 584).as_strided((2, 1, 576), (584, 577, 1)),
}

BAD = {
    "no tensor": ([[1.0]], TypeError, "q: got list; needs a torch.Tensor"),
    "None": (None, TypeError, "q: got NoneType; needs a torch.Tensor"),
    "dtype": (bf16(2, 5, 576).half(), TypeError, "q: got dtype torch.float16; needs torch.bfloat16"),
    "rank": (bf16(2, 576), ValueError, "q: got 2 dimensions, shape (2, 576); needs 3 dimensions"),
    "last size": (bf16(2, 5, 575), ValueError, "q: got shape (2, 5, 575); needs (2, any, 576)"),
    "first size": (bf16(3, 5, 576), ValueError, "q: got shape (3, 5, 576); needs (2, any, 576)"),
    "device": (bf16(2, 5, 576).to("meta"), ValueError, "q: got a tensor on meta; needs one on cpu"),
    "last stride": (bf16(2, 5, 1152)[:, :, ::2], ValueError, "q: got last stride 2; needs 1"),
    "transposed": (bf16(2, 576, 5).transpose(1, 2), ValueError, "q: got last stride 5; needs 1"),
    "row stride": (bf16(2, 5, 577)[:, :, :576], ValueError, "q: got stride(0) of 5770 bytes; needs 16-byte aligned"),
    "odd rows": (bf16(2, 8, 577)[:, :, :576], ValueError, "q: got stride(1) of 1154 bytes; needs 16-byte aligned rows"),
    "address": (misaligned(2, 5, 576), ValueError, "q: got an address 2 bytes beyond a multiple of 16; needs 16-byte"),
}


@pytest.mark.parametrize("case", GOOD)
def test_good_tensors_pass(case: str) -> None:
    check_tensor("q", GOOD[case], **EVERYTHING)


@pytest.mark.parametrize("case", BAD)
def test_bad_tensors_are_named(case: str) -> None:
    t, error, message = BAD[case]
    with pytest.raises(error, match="^" + re.escape(message)):
        check_tensor("q", t, **EVERYTHING)


@pytest.mark.parametrize("condition", EVERYTHING)
def test_each_condition_is_looked_at_alone(condition: str) -> None:
    """A tensor that breaks every requirement passes without any, and fails each one alone."""
    t = torch.zeros(3, 9, dtype=torch.int64, device="meta")[:, ::2]
    check_tensor("q", t)
    if condition != "align":  # its address is 0
        with pytest.raises((TypeError, ValueError)):
            check_tensor("q", t, **{condition: EVERYTHING[condition]})


def test_one_of_several_dtypes() -> None:
    either = (torch.uint8, torch.float8_e4m3fn)
    for dtype in either:
        check_tensor("kv_cache", torch.empty(4, dtype=dtype), dtype=either)
    with pytest.raises(TypeError, match=r"got dtype torch.int8; needs torch.uint8 or torch.float8_e4m3fn"):
        check_tensor("kv_cache", torch.empty(4, dtype=torch.int8), dtype=either)


def test_shape_of_another_rank() -> None:
    with pytest.raises(ValueError, match=re.escape("lse: got shape (2, 5); needs (2, 5, any)")):
        check_tensor("lse", bf16(2, 5), shape=(2, 5, None))


def test_scalars_and_vectors_have_no_rows_to_align() -> None:
    check_tensor("scale", torch.tensor(1.0), ndim=0, align=4, unit_last_stride=True)
    check_tensor("lengths", torch.zeros(7, dtype=torch.int32), ndim=1, align=4, unit_last_stride=True)


def test_require() -> None:
    require(True, "h_q", 129, "1 to 128")
    with pytest.raises(ValueError, match="^h_q: got 129; needs 1 to 128$"):
        require(False, "h_q", 129, "1 to 128")
    with pytest.raises(TypeError, match="^causal: got 1; needs a bool$"):
        require(False, "causal", 1, "a bool", TypeError)
    with pytest.raises(ValueError, match="^indices: got None; needs a tensor$"):
        fail("indices", None, "a tensor")


def test_passing_checks_format_nothing() -> None:
    class Loud:
        def __str__(self) -> str:
            raise AssertionError("formatted")

    require(True, "x", Loud(), Loud())


# --- devices


def test_cpu_is_not_sm90() -> None:
    assert not arch.is_sm90(torch.device("cpu"))
    with pytest.raises(ValueError, match="^q: got a tensor on cpu; needs an SM90 GPU"):
        arch.require_sm90("q", torch.device("cpu"))


@pytest.mark.parametrize(
    "name, capability", [("NVIDIA A100", (8, 0)), ("NVIDIA B200", (10, 0)), ("NVIDIA L4", (8, 9)), ("next", (9, 1))]
)
def test_other_gpus_are_named(name: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {1: (name, capability)})
    assert arch.device_capability(1) == capability
    assert not arch.is_sm90(torch.device("cuda:1"))
    found = f"{name} with compute capability {capability[0]}.{capability[1]}"
    with pytest.raises(ValueError, match=f"^kv_cache: got a tensor on cuda:1, {found}; needs an SM90 GPU"):
        arch.require_sm90("kv_cache", torch.device("cuda:1"))


def test_each_device_is_asked_once_and_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pretend(monkeypatch, {0: ("NVIDIA H200", (9, 0)), 1: ("NVIDIA A100", (8, 0))})
    for _ in range(3):
        arch.require_sm90("q", torch.device("cuda:0"))
        assert not arch.is_sm90(torch.device("cuda:1"))
    assert sorted(asked) == [0, 1]


def test_a_device_without_index_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {0: ("NVIDIA H200", (9, 0)), 1: ("NVIDIA A100", (8, 0))})
    for current, expected in ((0, True), (1, False), (0, True)):
        monkeypatch.setattr(torch.cuda, "current_device", lambda index=current: index)
        assert arch.is_sm90(torch.device("cuda")) == expected


def pretend(monkeypatch: pytest.MonkeyPatch, gpus: dict[int, tuple[str, tuple[int, int]]]) -> list[int]:
    """Makes torch report these GPUs; returns the list of indices that it was asked about."""
    asked: list[int] = []

    def capability(index: int) -> tuple[int, int]:
        asked.append(index)
        return gpus[index][1]

    arch._capability.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpus[device.index][0])
    return asked


@pytest.fixture(autouse=True)
def forget_devices() -> Any:
    yield
    arch._capability.cache_clear()
