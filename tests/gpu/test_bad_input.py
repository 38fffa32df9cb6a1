"""Bad input on a CUDA device: the tables of tests/kit give the same errors as on a CPU, and nothing is launched."""

from typing import Any

import pytest
import torch

from cute_kernels import mla_fp8_append, mla_fp8_decode
from cute_kernels.gqa import append_op as kv_append_op
from cute_kernels.gqa import launch as gqa_launch
from cute_kernels.merge import op as merge_op
from cute_kernels.mla import append_op
from cute_kernels.mla import launch as mla_launch
from cute_kernels.runtime import arch
from cute_kernels.runtime.launch import PreparedLaunches
from fp8_mla import QK_DIM
from tests.kit import specs
from tests.kit.bad_input import TABLES


def kernel_specs() -> list[Any]:
    return specs.of_tables()


@pytest.fixture(autouse=True)
def nothing_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes each operator forget its launches, and that this GPU has passed the check."""
    for module in (mla_launch, gqa_launch, append_op, kv_append_op, merge_op):
        monkeypatch.setattr(module, "_prepared", PreparedLaunches())


@pytest.mark.parametrize("name", [name for name in TABLES if not name.startswith("sink")])
def test_another_gpu_is_named(name, monkeypatch):
    monkeypatch.setattr(arch, "device_capability", lambda device: (8, 0))
    table, call = TABLES[name], TABLES[name].right("cuda")
    with pytest.raises(ValueError, match=r"^\w+: got .*compute capability 8\.0.*; needs an SM90 GPU"):
        table.function(**call)
    torch.cuda.synchronize()
    expected = table.right("cuda")
    for output in set(table.outputs) & set(call):
        assert torch.equal(call[output].view(torch.uint8), expected[output].view(torch.uint8)), "something was launched"


def words(name: str, label: str, device: str) -> str:
    """Type and message of the error without the device's name, or what happened instead of an error."""
    try:
        error = TABLES[name].refusal(label, device)
    except Exception as other:  # the test fails after it has tried all labels
        return f"not refused, but {type(other).__name__}: {other}"
    return f"{type(error).__name__}: {error}".replace(device, "here")


@pytest.mark.parametrize("prepared", [False, True], ids=["first call", "prepared"])
@pytest.mark.parametrize("name", TABLES)
def test_a_gpu_refuses_in_the_words_of_a_cpu(name, prepared):
    table, device = TABLES[name], f"cuda:{torch.cuda.current_device()}"
    if prepared:
        table.function(**table.right(device))
    different = {}
    for label in table.wrong("cpu"):
        got, expected = words(name, label, device), words(name, label, "cpu")
        if got != expected:
            different[label] = (got, expected)
        torch.cuda.synchronize()  # no launch has failed
    assert different == {}
    table.function(**table.right(device))
    torch.cuda.synchronize()


def test_strides_of_dimensions_of_one_element_are_free():
    """Torch leaves the stride of an axis of size 1 open, and slices of wider tensors have odd ones."""
    call = TABLES["mla_fp8_decode, sparse"].right("cuda")
    one = {name: call[name][:1, :1, :1].clone() for name in ("q", "out", "lse")}
    one["q"] = one["q"].as_strided(one["q"].shape, (577, 577, 577, 1))
    sink = torch.zeros(8, dtype=torch.float32, device="cuda")[::8]
    mla_fp8_decode(**one, kv_cache=call["kv_cache"], indices=call["indices"][:1, :1], s_aux=sink)
    assert one["out"].isfinite().all()
    append = TABLES["mla_fp8_append"].right("cuda")
    kv = append["kv"][:1].as_strided((1, QK_DIM), (QK_DIM + 1, 1))
    mla_fp8_append(kv, append["kv_cache"], append["slot_mapping"][:1])
    assert (append["kv_cache"] != 7).any(-1).sum() == 1
