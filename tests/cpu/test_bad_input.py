"""Bad input to the public operators: a TypeError or ValueError that names the argument, what it got and what it needs.

The checks come before any work and do not depend on the device, so CPU tensors show them; what only a GPU can show is
in tests/gpu/test_bad_input.py. The outputs of every call are full of NaN before it and must be after it.
"""

from typing import Any

import pytest
import torch

from cute_kernels import merge_states, mla_fp8_append, mla_fp8_decode
from fp8_mla import QK_DIM, TOKEN_BYTES, V_DIM

BATCH, S_Q, HEADS, TOPK, PAGES, PAGE_SIZE = 2, 2, 8, 5, 3, 4


def nans(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def sparse_call() -> dict[str, Any]:
    """A call that is right in everything."""
    return {
        "q": torch.zeros((BATCH, S_Q, HEADS, QK_DIM), dtype=torch.bfloat16),
        "kv_cache": torch.zeros((PAGES, PAGE_SIZE, TOKEN_BYTES), dtype=torch.uint8),
        "indices": ints(BATCH, S_Q, TOPK),
        "topk_length": ints(BATCH),
        "s_aux": torch.zeros(HEADS),
        "out": nans(BATCH, S_Q, HEADS, V_DIM),
        "lse": nans(BATCH, S_Q, HEADS, dtype=torch.float32),
    }


def dense_call() -> dict[str, Any]:
    call = sparse_call()
    del call["indices"], call["topk_length"]
    return {**call, "block_table": ints(BATCH, 2), "cache_seqlens": ints(BATCH)}


def off_by(bytes_: int, like: torch.Tensor) -> torch.Tensor:
    """The same shape and dtype at an address that far beyond a multiple of 16."""
    size = like.numel() * like.element_size()
    storage = torch.zeros(size + 32, dtype=torch.uint8)
    start = (-storage.data_ptr()) % 16 + bytes_
    return storage[start : start + size].view(like.dtype).view(like.shape)


def every_second(like: torch.Tensor) -> torch.Tensor:
    """The same shape and dtype with a last stride of 2."""
    return torch.zeros((*like.shape[:-1], 2 * like.shape[-1]), dtype=like.dtype)[..., ::2]


def decode_q(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


BASE = sparse_call()
ROWS = (BATCH, S_Q, HEADS)
SPARSE = {
    "q of another dtype": ("q", decode_q(*ROWS, QK_DIM, dtype=torch.float16)),
    "q no tensor": ("q", [[0.0]]),
    "q of rank 3": ("q", decode_q(BATCH, HEADS, QK_DIM)),
    "q of another head dimension": ("q", decode_q(*ROWS, V_DIM)),
    "q without heads": ("q", decode_q(BATCH, S_Q, 0, QK_DIM)),
    "q of 129 heads": ("q", decode_q(BATCH, S_Q, 129, QK_DIM)),
    "q without queries": ("q", decode_q(BATCH, 0, HEADS, QK_DIM)),
    "q with a last stride of 2": ("q", every_second(BASE["q"])),
    "q 2 bytes off": ("q", off_by(2, BASE["q"])),
    "q with rows 8 bytes off": ("q", torch.zeros((*ROWS, QK_DIM + 4), dtype=torch.bfloat16)[..., :QK_DIM]),
    "kv_cache of another dtype": ("kv_cache", torch.zeros((PAGES, PAGE_SIZE, TOKEN_BYTES), dtype=torch.int8)),
    "kv_cache no tensor": ("kv_cache", None),
    "kv_cache of rank 2": ("kv_cache", torch.zeros((PAGES * PAGE_SIZE, TOKEN_BYTES), dtype=torch.uint8)),
    "kv_cache of two heads": ("kv_cache", torch.zeros((PAGES, PAGE_SIZE, 2, TOKEN_BYTES), dtype=torch.uint8)),
    "kv_cache of other tokens": ("kv_cache", torch.zeros((PAGES, PAGE_SIZE, 584), dtype=torch.uint8)),
    "kv_cache with a last stride of 2": ("kv_cache", every_second(BASE["kv_cache"])),
    "kv_cache 8 bytes off": ("kv_cache", off_by(8, BASE["kv_cache"])),
    "kv_cache with rows 8 bytes off": (
        "kv_cache",
        torch.zeros((PAGES, PAGE_SIZE, TOKEN_BYTES + 8), dtype=torch.uint8)[..., :TOKEN_BYTES],
    ),
    "kv_cache with pages 4 bytes off": (
        "kv_cache",
        torch.zeros(PAGES * (PAGE_SIZE * TOKEN_BYTES + 4), dtype=torch.uint8).as_strided(
            (PAGES, PAGE_SIZE, TOKEN_BYTES), (PAGE_SIZE * TOKEN_BYTES + 4, TOKEN_BYTES, 1)
        ),
    ),
    "indices of int64": ("indices", ints(BATCH, S_Q, TOPK, dtype=torch.int64)),
    "indices of float32": ("indices", torch.zeros((BATCH, S_Q, TOPK))),
    "indices a list": ("indices", [0, 1]),
    "indices of rank 2": ("indices", ints(BATCH, TOPK)),
    "indices of another batch": ("indices", ints(BATCH + 1, S_Q, TOPK)),
    "indices of another s_q": ("indices", ints(BATCH, S_Q + 1, TOPK)),
    "indices with a last stride of 2": ("indices", every_second(BASE["indices"])),
    "topk_length of int64": ("topk_length", ints(BATCH, dtype=torch.int64)),
    "topk_length of another batch": ("topk_length", ints(BATCH + 1)),
    "topk_length of another s_q": ("topk_length", ints(BATCH, S_Q + 1)),
    "topk_length of rank 3": ("topk_length", ints(BATCH, S_Q, 1)),
    "s_aux of bfloat16": ("s_aux", torch.zeros(HEADS, dtype=torch.bfloat16)),
    "s_aux of another size": ("s_aux", torch.zeros(HEADS + 1)),
    "s_aux of rank 2": ("s_aux", torch.zeros((1, HEADS))),
    "s_aux a number": ("s_aux", 0.0),
    "out of float32": ("out", nans(*ROWS, V_DIM, dtype=torch.float32)),
    "out of another shape": ("out", nans(*ROWS, QK_DIM)),
    "out of rank 3": ("out", nans(BATCH * S_Q, HEADS, V_DIM)),
    "out with a last stride of 2": ("out", every_second(BASE["out"])),
    "out 2 bytes off": ("out", off_by(2, BASE["out"])),
    "lse of bfloat16": ("lse", nans(*ROWS)),
    "lse as other libraries have it": ("lse", nans(BATCH, HEADS, S_Q, dtype=torch.float32)),
    "num_splits 0": ("num_splits", 0),
    "num_splits of another type": ("num_splits", 1.5),
    "exchange unknown": ("exchange", "keys"),
    "exchange of another type": ("exchange", 2),
    "indices on another device": ("indices", ints(BATCH, S_Q, TOPK).to("meta")),
    "topk_length on another device": ("topk_length", ints(BATCH).to("meta")),
    "kv_cache on another device": ("kv_cache", BASE["kv_cache"].to("meta")),
    "s_aux on another device": ("s_aux", torch.zeros(HEADS, device="meta")),
    "out on another device": ("out", BASE["out"].to("meta")),
    "lse on another device": ("lse", BASE["lse"].to("meta")),
}
DENSE = {
    "block_table of int64": ("block_table", ints(BATCH, 2, dtype=torch.int64)),
    "block_table of rank 1": ("block_table", ints(BATCH)),
    "block_table of another batch": ("block_table", ints(BATCH + 1, 2)),
    "block_table with a last stride of 2": ("block_table", every_second(ints(BATCH, 2))),
    "block_table on another device": ("block_table", ints(BATCH, 2).to("meta")),
    "cache_seqlens of int64": ("cache_seqlens", ints(BATCH, dtype=torch.int64)),
    "cache_seqlens of float32": ("cache_seqlens", torch.zeros(BATCH)),
    "cache_seqlens of rank 2": ("cache_seqlens", ints(BATCH, S_Q)),
    "cache_seqlens of another batch": ("cache_seqlens", ints(BATCH - 1)),
    "cache_seqlens on another device": ("cache_seqlens", ints(BATCH).to("meta")),
}
SELECTIONS = {
    "neither": ((), ()),
    "both": (("indices",), ("block_table", "cache_seqlens")),
    "indices and a table": (("indices",), ("block_table",)),
    "indices and lengths": (("indices",), ("cache_seqlens",)),
    "a table alone": ((), ("block_table",)),
    "lengths alone": ((), ("cache_seqlens",)),
    "topk_length alone": (("topk_length",), ()),
    "topk_length of a dense call": (("topk_length",), ("block_table", "cache_seqlens")),
}


def untouched(call: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether the outputs still hold the bits they held before."""
    pairs = [(call[name], before[name]) for name in ("out", "lse") if isinstance(call[name], torch.Tensor)]
    return all(got.device.type == "meta" or torch.equal(got.isnan(), was) for got, was in pairs)


def require_error(call: dict[str, Any], name: str) -> None:
    before = {key: call[key].isnan() for key in ("out", "lse")}
    with pytest.raises((TypeError, ValueError), match=rf"(?s)^[\w, ]*\b{name}\b[\w, ]*: got .+[,;] needs .+"):
        mla_fp8_decode(**call)
    assert untouched(call, before), "an output was written before the arguments were checked"


def test_the_calls_that_the_others_break_are_right():
    for call in (sparse_call(), dense_call()):
        mla_fp8_decode(**call)
        assert call["out"].isfinite().all()


@pytest.mark.parametrize(("name", "value"), SPARSE.values(), ids=SPARSE)
def test_sparse_decode(name, value):
    require_error({**sparse_call(), name: value}, name)


@pytest.mark.parametrize(("name", "value"), DENSE.values(), ids=DENSE)
def test_dense_decode(name, value):
    require_error({**dense_call(), name: value}, name)


@pytest.mark.parametrize(("from_sparse", "from_dense"), SELECTIONS.values(), ids=SELECTIONS)
def test_neither_or_both_ways_of_naming_keys(from_sparse, from_dense):
    call, paged = sparse_call(), dense_call()
    chosen = {name: call[name] for name in from_sparse} | {name: paged[name] for name in from_dense}
    del call["indices"], call["topk_length"]
    require_error({**call, **chosen}, "indices")


def test_a_device_that_is_no_sm90_is_named():
    """Neither a CPU nor an SM90 GPU: the message says what was found."""
    call = {name: value.to("meta") for name, value in sparse_call().items()}
    with pytest.raises(ValueError, match=r"^q: got .*meta.*; needs an SM90 GPU"):
        mla_fp8_decode(**call)


def append_call() -> dict[str, Any]:
    return {
        "kv": torch.zeros((3, QK_DIM), dtype=torch.bfloat16),
        "kv_cache": torch.full((PAGES, PAGE_SIZE, TOKEN_BYTES), 7, dtype=torch.uint8),
        "slot_mapping": torch.arange(3),
    }


APPEND = {
    "kv of float32": ("kv", torch.zeros((3, QK_DIM))),
    "kv of rank 3": ("kv", torch.zeros((3, 1, QK_DIM), dtype=torch.bfloat16)),
    "kv of another width": ("kv", torch.zeros((3, V_DIM), dtype=torch.bfloat16)),
    "kv with a last stride of 2": ("kv", every_second(append_call()["kv"])),
    "kv 2 bytes off": ("kv", off_by(2, append_call()["kv"])),
    "kv no tensor": ("kv", None),
    "kv_cache of bfloat16": ("kv_cache", torch.zeros((PAGES, PAGE_SIZE, TOKEN_BYTES), dtype=torch.bfloat16)),
    "kv_cache of rank 2": ("kv_cache", torch.zeros((PAGES, TOKEN_BYTES), dtype=torch.uint8)),
    "kv_cache of other tokens": ("kv_cache", torch.zeros((PAGES, PAGE_SIZE, 576), dtype=torch.uint8)),
    "kv_cache 8 bytes off": ("kv_cache", off_by(8, append_call()["kv_cache"])),
    "kv_cache with a last stride of 2": ("kv_cache", every_second(append_call()["kv_cache"])),
    "kv_cache on another device": ("kv_cache", append_call()["kv_cache"].to("meta")),
    "slot_mapping of int32": ("slot_mapping", torch.arange(3).int()),
    "slot_mapping of another length": ("slot_mapping", torch.arange(4)),
    "slot_mapping of rank 2": ("slot_mapping", torch.zeros((3, 1), dtype=torch.int64)),
    "slot_mapping on another device": ("slot_mapping", torch.arange(3).to("meta")),
}


@pytest.mark.parametrize(("name", "value"), APPEND.values(), ids=APPEND)
def test_append(name, value):
    call = {**append_call(), name: value}
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: got .+[,;] needs .+"):
        mla_fp8_append(**call)
    if name != "kv_cache":
        assert (call["kv_cache"] == 7).all(), "the cache was written before the arguments were checked"


def merge_call() -> dict[str, Any]:
    return {"outs": torch.zeros((2, 3, 4, 64)), "lses": torch.zeros((2, 3, 4))}


MERGE = {
    "outs of float64": ("outs", torch.zeros((2, 3, 4, 64), dtype=torch.float64)),
    "outs of rank 1": ("outs", torch.zeros(64)),
    "outs without states": ("outs", torch.zeros((0, 3, 4, 64))),
    "outs of a width that is no multiple of 8": ("outs", torch.zeros((2, 3, 4, 60))),
    "outs too wide": ("outs", torch.zeros((2, 3, 4, 1024))),
    "outs with a last stride of 2": ("outs", every_second(merge_call()["outs"])),
    "outs 4 bytes off": ("outs", off_by(4, merge_call()["outs"])),
    "lses of bfloat16": ("lses", torch.zeros((2, 3, 4), dtype=torch.bfloat16)),
    "lses of another shape": ("lses", torch.zeros((2, 4, 3))),
    "lses on another device": ("lses", torch.zeros((2, 3, 4), device="meta")),
    "s_aux of another size": ("s_aux", torch.zeros(3)),
    "s_aux of bfloat16": ("s_aux", torch.zeros(4, dtype=torch.bfloat16)),
    "out of another shape": ("out", torch.zeros((3, 4, 32))),
    "out of float64": ("out", torch.zeros((3, 4, 64), dtype=torch.float64)),
    "lse of another shape": ("lse", torch.zeros((4, 3))),
    "lse of float16": ("lse", torch.zeros((3, 4), dtype=torch.float16)),
}


@pytest.mark.parametrize(("name", "value"), MERGE.values(), ids=MERGE)
def test_merge(name, value):
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: got .+[,;] needs .+"):
        merge_states(**{**merge_call(), name: value})
