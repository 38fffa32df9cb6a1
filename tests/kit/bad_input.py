"""Valid calls, and changes that make each of them wrong: one table for CPU and GPU tests.

The tables are functions of a device, since the same arguments are refused in the same words on every device. Nothing in
them follows torch's defaults. "Another device" is meta, which both a CPU and a GPU process have.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy
import torch

from cute_kernels import gqa_decode, kv_int8_append, merge_states, mla_fp8_append, mla_fp8_decode, sink_attention
from cute_kernels.compat.flash_mla import flash_mla_with_kvcache
from fp8_mla import QK_DIM, TOKEN_BYTES, V_DIM
from tests.kit import bad_input_gqa as gqa
from tests.kit import bad_input_latent as latent
from tests.kit.bad_tensors import (
    BF16,
    F32,
    F64,
    FP16,
    I8,
    I64,
    U8,
    Call,
    Wrong,
    all_elsewhere,
    elsewhere,
    every_second,
    floats,
    ints,
    nans,
    numbers,
    off_by,
    overlapping,
    rows_apart,
    sevens,
    sharing,
    zeros,
)  # fmt: skip

ERROR = r"(?s)^[\w, ]*\b{}\b[\w, ]*: got .+[,;] (needs|known are|layout .+ needs) .+"
"""What an error that names an argument looks like."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A public function, a valid call of it on a device, and changes that make the call wrong there.

    outputs  arguments that hold NaN, or the number 7, before a call and must hold it after a refused one
    """

    function: Callable[..., Any]
    right: Callable[[str], Call]
    wrong: Callable[[str], Wrong]
    outputs: tuple[str, ...] = ("out", "lse")

    def call(self, label: str, device: str) -> tuple[str, Call]:
        """The argument that the error of a wrong call names, and that call."""
        name, value = self.wrong(device)[label]
        return name, self.right(device) | (value if isinstance(value, dict) else {name: value})

    def refusal(self, label: str, device: str) -> Exception:
        """The error that a wrong call raises.

        Raises:
            AssertionError: it raises nothing, or something else than a TypeError or ValueError, or writes an output.
        """
        name, arguments = self.call(label, device)
        kept = {key: _bits(arguments[key]) for key in self.outputs if isinstance(arguments.get(key), torch.Tensor)}
        try:
            self.function(**arguments)
        except (TypeError, ValueError) as error:
            if any(not torch.equal(_bits(arguments[key]), original) for key, original in kept.items()):
                raise AssertionError(f"{label}: an output was written before the arguments were checked") from error
            return error
        raise AssertionError(f"{label}: {name} was not refused")


def _bits(t: torch.Tensor) -> torch.Tensor:
    """A copy of all bytes of its storage, whatever the strides; empty where there are none."""
    if t.device.type == "meta":
        return torch.empty(0, dtype=U8, device="cpu")
    return torch.empty(0, dtype=U8, device=t.device).set_(t.untyped_storage()).clone()


# ---- mla_fp8_decode

BATCH, S_Q, HEADS, TOPK, PAGES, PAGE_SIZE = 2, 2, 8, 5, 3, 4
ROWS = (BATCH, S_Q, HEADS)


def sparse_call(device: str) -> Call:
    return {
        "q": zeros(device, *ROWS, QK_DIM),
        "kv_cache": zeros(device, PAGES, PAGE_SIZE, TOKEN_BYTES, dtype=U8),
        "indices": ints(device, BATCH, S_Q, TOPK),
        "topk_length": ints(device, BATCH),
        "s_aux": floats(device, HEADS),
        "out": nans(device, *ROWS, V_DIM),
        "lse": nans(device, *ROWS, dtype=F32),
    }


def dense_call(device: str) -> Call:
    call = sparse_call(device)
    del call["indices"], call["topk_length"]
    return {**call, "block_table": ints(device, BATCH, 2), "cache_seqlens": ints(device, BATCH)}


def sparse_wrong(device: str) -> Wrong:
    call, new = sparse_call(device), functools.partial(zeros, device)
    pages_apart = PAGE_SIZE * TOKEN_BYTES + 4
    strided_pages = zeros(device, PAGES * pages_apart, dtype=U8).as_strided(
        (PAGES, PAGE_SIZE, TOKEN_BYTES), (pages_apart, TOKEN_BYTES, 1)
    )
    many_slots = zeros(device, TOKEN_BYTES, dtype=U8).as_strided((2**16, 2**15, TOKEN_BYTES), (0, 0, 1))
    return {
        "q of another dtype": ("q", new(*ROWS, QK_DIM, dtype=FP16)),
        "q no tensor": ("q", [[0.0]]),
        "q None": ("q", None),
        "q of rank 3": ("q", new(BATCH, HEADS, QK_DIM)),
        "q of another head dimension": ("q", new(*ROWS, 544)),
        "q without heads": ("q", new(BATCH, S_Q, 0, QK_DIM)),
        "q of 129 heads": ("q", new(BATCH, S_Q, 129, QK_DIM)),
        "q without queries": ("q", new(BATCH, 0, HEADS, QK_DIM)),
        "q with a last stride of 2": ("q", every_second(call["q"])),
        "q 2 bytes off": ("q", off_by(2, call["q"])),
        "q with rows 8 bytes off": ("q", rows_apart(call["q"], 4)),
        "kv_cache of another dtype": ("kv_cache", new(PAGES, PAGE_SIZE, TOKEN_BYTES, dtype=I8)),
        "kv_cache no tensor": ("kv_cache", None),
        "kv_cache of rank 2": ("kv_cache", new(PAGES * PAGE_SIZE, TOKEN_BYTES, dtype=U8)),
        "kv_cache of two heads": ("kv_cache", new(PAGES, PAGE_SIZE, 2, TOKEN_BYTES, dtype=U8)),
        "kv_cache of other tokens": ("kv_cache", new(PAGES, PAGE_SIZE, 592, dtype=U8)),
        "kv_cache of empty pages": ("kv_cache", new(PAGES, 0, TOKEN_BYTES, dtype=U8)),
        "kv_cache of more slots than 31 bits count": ("kv_cache", many_slots),
        "kv_cache with a last stride of 2": ("kv_cache", every_second(call["kv_cache"])),
        "kv_cache 8 bytes off": ("kv_cache", off_by(8, call["kv_cache"])),
        "kv_cache with rows 8 bytes off": ("kv_cache", rows_apart(call["kv_cache"], 8)),
        "kv_cache with pages 4 bytes off": ("kv_cache", strided_pages),
        "indices of int64": ("indices", ints(device, BATCH, S_Q, TOPK, dtype=I64)),
        "indices of uint32": ("indices", call["indices"].view(torch.uint32)),
        "indices of float32": ("indices", floats(device, BATCH, S_Q, TOPK)),
        "indices a list": ("indices", [0, 1]),
        "indices of rank 2": ("indices", ints(device, BATCH, TOPK)),
        "indices of another batch": ("indices", ints(device, BATCH + 1, S_Q, TOPK)),
        "indices of another s_q": ("indices", ints(device, BATCH, S_Q + 1, TOPK)),
        "indices with a last stride of 2": ("indices", every_second(call["indices"])),
        "topk_length of int64": ("topk_length", ints(device, BATCH, dtype=I64)),
        "topk_length of another batch": ("topk_length", ints(device, BATCH + 1)),
        "topk_length of another s_q": ("topk_length", ints(device, BATCH, S_Q + 1)),
        "topk_length of rank 3": ("topk_length", ints(device, BATCH, S_Q, 1)),
        "topk_length a list": ("topk_length", [1, 1]),
        "s_aux of bfloat16": ("s_aux", new(HEADS)),
        "s_aux of float64": ("s_aux", floats(device, HEADS, dtype=F64)),
        "s_aux of another size": ("s_aux", floats(device, HEADS + 1)),
        "s_aux of rank 2": ("s_aux", floats(device, 1, HEADS)),
        "s_aux with a stride of 2": ("s_aux", every_second(call["s_aux"])),
        "s_aux a number": ("s_aux", 0.0),
        "out of float32": ("out", nans(device, *ROWS, V_DIM, dtype=F32)),
        "out of another shape": ("out", nans(device, *ROWS, QK_DIM)),
        "out of rank 3": ("out", nans(device, BATCH * S_Q, HEADS, V_DIM)),
        "out with a last stride of 2": ("out", every_second(call["out"])),
        "out 2 bytes off": ("out", off_by(2, call["out"])),
        "lse of bfloat16": ("lse", nans(device, *ROWS)),
        "lse of float64": ("lse", nans(device, *ROWS, dtype=F64)),
        "lse as other libraries have it": ("lse", nans(device, BATCH, HEADS, S_Q, dtype=F32)),
        "num_splits 0": ("num_splits", 0),
        "num_splits of another type": ("num_splits", 1.5),
        "num_splits a whole float": ("num_splits", 1.0),
        "num_splits a bool": ("num_splits", True),
        "softmax_scale no number": ("softmax_scale", "1"),
        "softmax_scale a bool": ("softmax_scale", True),
        "softmax_scale a tensor": ("softmax_scale", floats(device)),
        "exchange unknown": ("exchange", "keys"),
        "exchange of another type": ("exchange", 2),
        "scores unknown": ("scores", "bf16"),
        "scores of another type": ("scores", 8),
        "cache_layout unknown": ("cache_layout", "rows"),
        "cache_layout of another type": ("cache_layout", 1),
        "cache_layout that V3.2 lacks": ("cache_layout", "planar"),
        "cache_format unknown": ("cache_format", "v3"),
        "fp8 scores": ("scores", "fp8"),
        "causal no flag": ("causal", "no"),
        "softmax_scale NaN": ("softmax_scale", math.nan),
        "softmax_scale huge": ("softmax_scale", 2**2000),
        "num_splits huge": ("num_splits", 2**70),
        "num_splits of numpy": ("num_splits", numpy.int64(2)),
        **overlapping(call, "out", "lse"),
        "out and lse in one memory": ("out", sharing(call, "out", "lse")),
        **{f"out in the memory of {name}": ("out", sharing(call, "out", name)) for name in ("q", "kv_cache")},
        **{f"lse in the memory of {name}": ("lse", sharing(call, "lse", name))
           for name in ("indices", "topk_length", "s_aux")},
        **elsewhere(call, "kv_cache", "indices", "topk_length", "s_aux", "out", "lse"),
        "everything on another device": ("q", all_elsewhere(call)),
        "neither kind of keys": ("indices", {"indices": None, "topk_length": None}),
        "topk_length alone": ("indices", {"indices": None}),
        "indices and a table": ("indices", {"topk_length": None, "block_table": ints(device, BATCH, 2)}),
        "indices and lengths": ("indices", {"topk_length": None, "cache_seqlens": ints(device, BATCH)}),
    }  # fmt: skip


def dense_wrong(device: str) -> Wrong:
    call = dense_call(device)
    return {
        "block_table of int64": ("block_table", ints(device, BATCH, 2, dtype=I64)),
        "block_table of uint32": ("block_table", call["block_table"].view(torch.uint32)),
        "block_table of rank 1": ("block_table", ints(device, BATCH)),
        "block_table of another batch": ("block_table", ints(device, BATCH + 1, 2)),
        "block_table with a last stride of 2": ("block_table", every_second(call["block_table"])),
        "cache_seqlens of int64": ("cache_seqlens", ints(device, BATCH, dtype=I64)),
        "cache_seqlens of float32": ("cache_seqlens", floats(device, BATCH)),
        "cache_seqlens of rank 2": ("cache_seqlens", ints(device, BATCH, S_Q)),
        "cache_seqlens of another batch": ("cache_seqlens", ints(device, BATCH - 1)),
        **elsewhere(call, "block_table", "cache_seqlens"),
        "both kinds of keys": ("indices", {"indices": ints(device, BATCH, S_Q, TOPK)}),
        "a table alone": ("indices", {"cache_seqlens": None}),
        "lengths alone": ("indices", {"block_table": None}),
        "topk_length of a dense call": ("indices", {"topk_length": ints(device, BATCH)}),
    }


# ---- mla_fp8_append


def append_call(device: str) -> Call:
    return {
        "kv": zeros(device, 3, QK_DIM),
        "kv_cache": sevens(device, PAGES, PAGE_SIZE, TOKEN_BYTES, dtype=U8),
        "slot_mapping": numbers(device, 1, 2, 3, dtype=I64),
    }


def append_wrong(device: str) -> Wrong:
    call, new = append_call(device), functools.partial(zeros, device)
    many_slots = zeros(device, TOKEN_BYTES, dtype=U8).as_strided((2**16, 2**15, TOKEN_BYTES), (0, 0, 1))
    return {
        "kv of float32": ("kv", floats(device, 3, QK_DIM)),
        "kv of rank 3": ("kv", new(3, 1, QK_DIM)),
        "kv of another width": ("kv", new(3, 544)),
        "kv with a last stride of 2": ("kv", every_second(call["kv"])),
        "kv 2 bytes off": ("kv", off_by(2, call["kv"])),
        "kv with rows 8 bytes off": ("kv", rows_apart(call["kv"], 4)),
        "kv no tensor": ("kv", None),
        "kv_cache of bfloat16": ("kv_cache", new(PAGES, PAGE_SIZE, TOKEN_BYTES)),
        "kv_cache of int8": ("kv_cache", call["kv_cache"].view(I8)),
        "kv_cache of rank 2": ("kv_cache", new(PAGES, TOKEN_BYTES, dtype=U8)),
        "kv_cache of other tokens": ("kv_cache", new(PAGES, PAGE_SIZE, 576, dtype=U8)),
        "kv_cache of empty pages": ("kv_cache", new(PAGES, 0, TOKEN_BYTES, dtype=U8)),
        "kv_cache 8 bytes off": ("kv_cache", off_by(8, call["kv_cache"])),
        "kv_cache with rows 8 bytes off": ("kv_cache", rows_apart(call["kv_cache"], 8)),
        "kv_cache with a last stride of 2": ("kv_cache", every_second(call["kv_cache"])),
        "kv_cache of more slots than 31 bits count": ("kv_cache", many_slots),
        "slot_mapping of int16": ("slot_mapping", call["slot_mapping"].short()),
        "slot_mapping of uint64": ("slot_mapping", call["slot_mapping"].view(torch.uint64)),
        "slot_mapping of another length": ("slot_mapping", ints(device, 4, dtype=I64)),
        "slot_mapping of rank 2": ("slot_mapping", ints(device, 3, 1, dtype=I64)),
        **overlapping(call, "kv_cache"),
        "slot_mapping in the memory of the cache": (
            "kv_cache", sharing(call, "kv_cache", "slot_mapping"),
        ),
        "kv in the memory of the cache": ("kv_cache", sharing(call, "kv_cache", "kv")),
        **elsewhere(call, "kv_cache", "slot_mapping"),
        "everything on another device": ("kv", all_elsewhere(call)),
    }  # fmt: skip


# ---- merge_states


def merge_call(device: str) -> Call:
    return {
        "outs": floats(device, 2, 3, 4, 64),
        "lses": floats(device, 2, 3, 4),
        "s_aux": floats(device, 4),
        "out": nans(device, 3, 4, 64, dtype=F32),
        "lse": nans(device, 3, 4, dtype=F32),
    }


def merge_wrong(device: str) -> Wrong:
    call, new = merge_call(device), functools.partial(floats, device)
    six = {"outs": new(2, 2, 3, 2, 4, 64), "lses": new(2, 2, 3, 2, 4), "lse": nans(device, 2, 3, 2, 4, dtype=F32)}
    return {
        "outs of float64": ("outs", new(2, 3, 4, 64, dtype=F64)),
        "outs of rank 1": ("outs", new(64)),
        "outs without states": ("outs", new(0, 3, 4, 64)),
        "outs of a width that is no multiple of 8": ("outs", new(2, 3, 4, 60)),
        "outs too wide": ("outs", new(2, 3, 4, 1024)),
        "outs with a last stride of 2": ("outs", every_second(call["outs"])),
        "outs 4 bytes off": ("outs", off_by(4, call["outs"])),
        "outs with rows 8 bytes off": ("outs", rows_apart(call["outs"], 2)),
        "outs no tensor": ("outs", [1.0]),
        "lses of bfloat16": ("lses", new(2, 3, 4, dtype=BF16)),
        "lses of float64": ("lses", new(2, 3, 4, dtype=F64)),
        "lses of another shape": ("lses", new(2, 4, 3)),
        "lses None": ("lses", None),
        "s_aux of another size": ("s_aux", new(3)),
        "s_aux of bfloat16": ("s_aux", new(4, dtype=BF16)),
        "s_aux of states without heads": (
            "s_aux",
            {"outs": new(2, 64), "lses": new(2), "out": nans(device, 64, dtype=F32), "lse": nans(device, dtype=F32)},
        ),
        "out of another shape": ("out", nans(device, 3, 4, 32, dtype=F32)),
        "out of float64": ("out", nans(device, 3, 4, 64, dtype=F64)),
        "out 8 bytes off": ("out", off_by(8, call["out"])),
        "out that cannot be viewed": ("out", {**six, "out": nans(device, 3, 2, 2, 4, 64, dtype=F32).transpose(0, 1)}),
        "lse of another shape": ("lse", nans(device, 4, 3, dtype=F32)),
        "lse of float16": ("lse", nans(device, 3, 4, dtype=FP16)),
        **overlapping(call, "out", "lse"),
        "out and lse in one memory": ("out", sharing(call, "out", "lse")),
        "out the first of outs": ("out", {"outs": (outs := nans(device, 2, 3, 4, 64, dtype=F32)), "out": outs[0]}),
        "lse the first of lses": ("lse", {"lses": (lses := nans(device, 2, 3, 4, dtype=F32)), "lse": lses[0]}),
        **elsewhere(call, "lses", "s_aux", "out", "lse"),
        "everything on another device": ("outs", all_elsewhere(call)),
    }


# ---- compat.flash_mla


def flash_call(device: str) -> Call:
    call = sparse_call(device)
    return {
        "q": call["q"],
        "k_cache": call["kv_cache"].unsqueeze(2),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": V_DIM,
        "tile_scheduler_metadata": None,
        "is_fp8_kvcache": True,
        "indices": call["indices"],
        "attn_sink": call["s_aux"],
        "topk_length": call["topk_length"],
        "out": call["out"],
    }


def flash_wrong(device: str) -> Wrong:
    """What the interface refuses itself, and samples of what `mla_fp8_decode` refuses for it, under its own names."""
    call = flash_call(device)
    k_cache = call["k_cache"]
    return {
        "q of float16": ("q", call["q"].half()),
        "q of rank 3": ("q", call["q"][0]),
        "k_cache of bfloat16": ("k_cache", zeros(device, PAGES, PAGE_SIZE, 1, QK_DIM)),
        "k_cache None": ("k_cache", None),
        "k_cache of other tokens": ("kv_cache", {"k_cache": k_cache[..., :592]}),
        "k_cache 8 bytes off": ("kv_cache", {"k_cache": off_by(8, k_cache)}),
        "k_cache on another device": ("kv_cache", {"k_cache": k_cache.to("meta")}),
        "is_fp8_kvcache left out": ("is_fp8_kvcache", False),
        "head_dim_v 576": ("head_dim_v", QK_DIM),
        "causal with indices": ("causal", True),
        "a second cache without indices": ("extra_indices", {"extra_k_cache": k_cache}),
        "a second cache of V4": ("extra_kv_cache", {"extra_k_cache": zeros(device, 2, 2, 1, 584, dtype=U8)}),
        "indices of a second cache": ("extra_indices", {"extra_indices_in_kvcache": call["indices"]}),
        "lengths of a second cache": ("extra_topk_length", call["topk_length"]),
        "kv_format unknown": ("kv_format", "V5"),
        "kv_format of another type": ("kv_format", 4),
        "kv_format of other bytes": ("k_cache", {"kv_format": "MODEL1"}),
        "descale_q": ("descale_q", floats(device, 1)),
        "descale_k": ("descale_k", floats(device, 1)),
        "indices of int64": ("indices", call["indices"].long()),
        "indices missing": ("indices", None),
        "attn_sink of bfloat16": ("s_aux", {"attn_sink": call["attn_sink"].bfloat16()}),
        "attn_sink on another device": ("s_aux", {"attn_sink": call["attn_sink"].to("meta")}),
        "softmax_scale no number": ("softmax_scale", "1"),
        "softmax_scale infinite": ("softmax_scale", -math.inf),
        "causal no flag": ("causal", {"causal": "no", "indices": None, "topk_length": None,
                                      "block_table": ints(device, BATCH, 2), "cache_seqlens": ints(device, BATCH)}),
        "out of float32": ("out", call["out"].float()),
        **overlapping(call, "out"),
        **elsewhere(call, "indices", "topk_length", "out"),
        "everything on another device": ("q", all_elsewhere(call)),
    }  # fmt: skip


CACHES = ("k_cache", "v_cache", "k_scale", "v_scale")
TABLES = {
    "mla_fp8_decode, sparse": Table(mla_fp8_decode, sparse_call, sparse_wrong),
    "mla_fp8_decode, dense": Table(mla_fp8_decode, dense_call, dense_wrong),
    "mla_fp8_decode, planar pages": Table(mla_fp8_decode, latent.planar_call, latent.planar_wrong),
    "mla_fp8_decode, two caches": Table(mla_fp8_decode, latent.two_caches_call, latent.two_caches_wrong),
    "mla_fp8_append": Table(mla_fp8_append, append_call, append_wrong, ("kv_cache",)),
    "mla_fp8_append, planar pages": Table(mla_fp8_append, latent.append_call, latent.append_wrong, ("kv_cache",)),
    "merge_states": Table(merge_states, merge_call, merge_wrong),
    "gqa_decode": Table(gqa_decode, gqa.gqa_call, gqa.gqa_wrong),
    "gqa_decode, paged": Table(gqa_decode, gqa.gqa_paged_call, gqa.gqa_paged_wrong),
    "kv_int8_append": Table(kv_int8_append, gqa.kv_append_call, gqa.kv_append_wrong, CACHES),
    "sink_attention": Table(sink_attention, gqa.sink_call, gqa.sink_wrong, ()),
    "sink_attention, packed": Table(sink_attention, gqa.sink_packed_call, gqa.sink_packed_wrong, ()),
    "flash_mla_with_kvcache": Table(flash_mla_with_kvcache, flash_call, flash_wrong, ("out",)),
}
