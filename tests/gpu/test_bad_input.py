"""Bad input that only a CUDA device can show; all else is in tests/cpu/test_bad_input.py."""

import dataclasses
from typing import Any

import pytest
import torch

from cute_kernels import merge_states, mla_fp8_append, mla_fp8_decode
from cute_kernels.mla import op
from cute_kernels.runtime import arch
from cute_kernels.testing.inputs import DecodeCase, dense_case, sparse_case
from fp8_mla import QK_DIM, TOKEN_BYTES


def decode(case: DecodeCase, **options: Any) -> Any:
    return mla_fp8_decode(case.q, case.kv_cache, **{**case.options(), **options})


def cases() -> list[DecodeCase]:
    sparse = sparse_case(batch=2, h_q=16, lengths="batch", sink="finite", device="cuda")
    return [sparse, dense_case(seqlens=[3, 70], h_q=16, sink="finite", device="cuda")]


@pytest.mark.parametrize("name", ["kv_cache", "indices", "topk_length", "block_table", "cache_seqlens", "s_aux"])
def test_decode_tensors_on_different_devices(name):
    for case in cases():
        tensor = getattr(case, name)
        if tensor is None:
            continue
        out, lse = case.outputs()
        moved = dataclasses.replace(case, **{name: tensor.cpu()})
        with pytest.raises(ValueError, match=rf"^{name}: got .*cpu.*; needs .*cuda"):
            decode(moved, out=out.tensor, lse=lse.tensor)
        torch.cuda.synchronize()
        assert out.tensor.isnan().all(), "something was launched"


@pytest.mark.parametrize("name", ["out", "lse"])
def test_decode_outputs_on_another_device(name):
    case = cases()[0]
    out, lse = case.outputs()
    buffers = {"out": out.tensor, "lse": lse.tensor}
    buffers[name] = buffers[name].cpu()
    with pytest.raises(ValueError, match=rf"^{name}: got .*cpu.*; needs .*cuda"):
        decode(case, **buffers)


def test_append_tensors_on_different_devices():
    kv = torch.zeros((2, QK_DIM), dtype=torch.bfloat16, device="cuda")
    cache = torch.zeros((1, 64, TOKEN_BYTES), dtype=torch.uint8, device="cuda")
    slots = torch.arange(2, device="cuda")
    with pytest.raises(ValueError, match="^kv_cache: got .*cpu"):
        mla_fp8_append(kv, cache.cpu(), slots)
    with pytest.raises(ValueError, match="^slot_mapping: got .*cpu"):
        mla_fp8_append(kv, cache, slots.cpu())


def test_merge_tensors_on_different_devices():
    outs, lses = torch.zeros((2, 1, 1, 4, 64), device="cuda"), torch.zeros((2, 1, 1, 4), device="cuda")
    with pytest.raises(ValueError, match="^lses: got .*cpu"):
        merge_states(outs, lses.cpu())


def test_another_gpu_is_named(monkeypatch):
    monkeypatch.setattr(arch, "device_capability", lambda device: (8, 0))
    monkeypatch.setattr(op, "_prepared", {})  # calls that this GPU was already found fit for
    for case in cases():
        with pytest.raises(ValueError, match=r"^q: got .*compute capability 8\.0.*; needs an SM90 GPU"):
            decode(case)


def test_misaligned_addresses():
    """A view that starts 8 bytes into an aligned allocation."""
    case = sparse_case(batch=1, h_q=16, padded=False, device="cuda")
    size = case.kv_cache.numel()
    storage = torch.zeros(size + 16, dtype=torch.uint8, device="cuda")
    shifted = storage[8 : 8 + size].view(case.kv_cache.shape)
    with pytest.raises(ValueError, match="^kv_cache: got .*; needs 16-byte"):
        decode(dataclasses.replace(case, kv_cache=shifted))
    halves = torch.zeros(case.q.numel() + 8, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ValueError, match="^q: got .*; needs 16-byte"):
        decode(dataclasses.replace(case, q=halves[4 : 4 + case.q.numel()].view(case.q.shape)))
