"""Valid calls, and changes that make each of them wrong: one table for CPU and GPU tests.

The tables are functions of a device, since the same arguments are refused in the same words on every device. Nothing in
them follows torch's defaults. "Another device" is meta, which both a CPU and a GPU process have.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch

import cute_kernels
from cute_kernels.compat.flash_mla import flash_mla_with_kvcache
from cute_kernels.gqa import request as gqa_request
from cute_kernels.indexer import request as index_request
from cute_kernels.merge import request as merge_request
from cute_kernels.mla import request as mla_request
from cute_kernels.runtime.ops import Operator
from cute_kernels.sink import request as sink_request
from fp8_mla import QK_DIM, TOKEN_BYTES, V_DIM
from tests.kit import bad_input_gqa as gqa
from tests.kit import bad_input_index as index
from tests.kit import bad_input_latent as latent
from tests.kit import bad_tensors as bad
from tests.kit.bad_tensors import BF16, F32, F64, FP16, I8, I64, U8, Call, Wrong

ERROR = r"(?s)^[\w, ]*\b{}\b[\w, ]*: got .+[,;] (needs|known are|layout .+ needs) .+"
"""Pattern of an error message that names an argument."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A public function, a valid call of it on a device, and changes that each make the call wrong.

    operator  the operator behind the function; None for an adapter
    special   changes that do not follow from the operator's table
    adapter   the function, unless it is the public function that has the operator's name
    """

    operator: Operator | None
    right: Callable[[str], Call]
    special: Callable[[str], Wrong]
    adapter: Callable[..., Any] | None = None

    @property
    def function(self) -> Callable[..., Any]:
        return self.adapter or getattr(cute_kernels, self.operator.name if self.operator else "")

    @property
    def outputs(self) -> tuple[str, ...]:
        """Output arguments. Filled with NaN or 7 before a call, they must keep that value if the call is refused."""
        return self.operator.written if self.operator else ("out",)

    def wrong(self, device: str) -> Wrong:
        general = bad.wrong_anywhere(self.operator, self.right(device)) if self.operator else {}
        return {**general, **self.special(device)}

    def call(self, label: str, device: str) -> tuple[str, Call]:
        """The name of the wrong argument, which the error must name, and the wrong call."""
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
    """A copy of the bytes of a tensor's whole storage, whatever its strides; empty if there are none."""
    if t.device.type == "meta":
        return torch.empty(0, dtype=U8, device="cpu")
    return torch.empty(0, dtype=U8, device=t.device).set_(t.untyped_storage()).clone()


# ---- mla_fp8_decode

BATCH, S_Q, HEADS, TOPK, PAGES, PAGE_SIZE = 2, 2, 8, 5, 3, 4
ROWS = (BATCH, S_Q, HEADS)


def sparse_call(device: str) -> Call:
    return {
        "q": bad.zeros(device, *ROWS, QK_DIM),
        "kv_cache": bad.zeros(device, PAGES, PAGE_SIZE, TOKEN_BYTES, dtype=U8),
        "indices": bad.ints(device, BATCH, S_Q, TOPK),
        "topk_length": bad.ints(device, BATCH),
        "s_aux": bad.floats(device, HEADS),
        "out": bad.nans(device, *ROWS, V_DIM),
        "lse": bad.nans(device, *ROWS, dtype=F32),
    }


def dense_call(device: str) -> Call:
    call = sparse_call(device)
    del call["indices"], call["topk_length"]
    return {**call, "block_table": bad.ints(device, BATCH, 2), "cache_seqlens": bad.ints(device, BATCH)}


def sparse_wrong(device: str) -> Wrong:
    call = sparse_call(device)
    pages_apart = PAGE_SIZE * TOKEN_BYTES + 4
    strided_pages = bad.zeros(device, PAGES * pages_apart, dtype=U8).as_strided(
        (PAGES, PAGE_SIZE, TOKEN_BYTES), (pages_apart, TOKEN_BYTES, 1)
    )
    table, lengths = bad.ints(device, BATCH, 2), bad.ints(device, BATCH)
    return {
        **bad.wrong_tensor(
            call, "q", (BATCH, HEADS, QK_DIM), (*ROWS, 544), (BATCH, S_Q, 0, QK_DIM), (BATCH, S_Q, 129, QK_DIM),
            (BATCH, 0, HEADS, QK_DIM), dtypes=[FP16], off=2, rows=4, spread=True,
        ),
        **wrong_cache(call, 592),
        "kv_cache with pages 4 bytes off": ("kv_cache", strided_pages),
        **bad.wrong_tensor(
            call, "indices", (BATCH, TOPK), (BATCH + 1, S_Q, TOPK), (BATCH, S_Q + 1, TOPK),
            dtypes=[I64, torch.uint32, F32], spread=True,
        ),
        **bad.wrong_tensor(call, "topk_length", (BATCH + 1,), (BATCH, S_Q + 1), (BATCH, S_Q, 1), dtypes=[I64]),
        **bad.wrong_tensor(call, "s_aux", (HEADS + 1,), (1, HEADS), dtypes=[BF16, F64], spread=True),
        "s_aux a number": ("s_aux", 0.0),
        **bad.wrong_tensor(call, "out", (*ROWS, QK_DIM), (BATCH * S_Q, HEADS, V_DIM), dtypes=[F32], off=2, spread=True),
        **bad.wrong_tensor(call, "lse", (BATCH, HEADS, S_Q), dtypes=[BF16, F64]),
        **bad.wrong_options(
            exchange=("keys", 2), scores=("bf16", 8, "fp8"), cache_layout=("rows", 1, "planar"), cache_format=("v3",)
        ),
        "neither kind of keys": ("indices", {"indices": None, "topk_length": None}),
        "topk_length alone": ("indices", {"indices": None}),
        "indices and a table": ("indices", {"topk_length": None, "block_table": table}),
        "indices and lengths": ("indices", {"topk_length": None, "cache_seqlens": lengths}),
    }  # fmt: skip


def wrong_cache(call: Call, num_bytes: int) -> Wrong:
    """A V3.2 cache that decoding and appending both refuse: no format has tokens of `num_bytes`."""
    many_slots = call["kv_cache"].new_zeros(TOKEN_BYTES).as_strided((2**16, 2**15, TOKEN_BYTES), (0, 0, 1))
    shapes = (
        (PAGES * PAGE_SIZE, TOKEN_BYTES), (PAGES, PAGE_SIZE, 2, TOKEN_BYTES), (PAGES, PAGE_SIZE, num_bytes),
        (PAGES, 0, TOKEN_BYTES),
    )  # fmt: skip
    return {
        **bad.wrong_tensor(call, "kv_cache", *shapes, dtypes=[I8, BF16], off=8, rows=8, spread=True),
        "kv_cache of more slots than 31 bits count": ("kv_cache", many_slots),
    }


def dense_wrong(device: str) -> Wrong:
    call = dense_call(device)
    return {
        **bad.wrong_tensor(call, "block_table", (BATCH,), (BATCH + 1, 2), dtypes=[I64, torch.uint32], spread=True),
        **bad.wrong_tensor(call, "cache_seqlens", (BATCH, S_Q), (BATCH - 1,), dtypes=[I64, F32]),
        "both kinds of keys": ("indices", {"indices": bad.ints(device, BATCH, S_Q, TOPK)}),
        "a table alone": ("indices", {"cache_seqlens": None}),
        "lengths alone": ("indices", {"block_table": None}),
        "topk_length of a dense call": ("indices", {"topk_length": bad.ints(device, BATCH)}),
    }


# ---- mla_fp8_append


def append_call(device: str) -> Call:
    return {
        "kv": bad.zeros(device, 3, QK_DIM),
        "kv_cache": bad.sevens(device, PAGES, PAGE_SIZE, TOKEN_BYTES, dtype=U8),
        "slot_mapping": bad.numbers(device, 1, 2, 3, dtype=I64),
    }


def append_wrong(device: str) -> Wrong:
    call = append_call(device)
    return {
        **bad.wrong_tensor(call, "kv", (3, 1, QK_DIM), (3, 544), dtypes=[F32], off=2, rows=4, spread=True),
        **wrong_cache(call, 576),
        **bad.wrong_tensor(call, "slot_mapping", (4,), (3, 1), dtypes=[torch.int16, torch.uint64]),
    }


# ---- merge_states


def merge_call(device: str) -> Call:
    return {
        "outs": bad.floats(device, 2, 3, 4, 64),
        "lses": bad.floats(device, 2, 3, 4),
        "s_aux": bad.floats(device, 4),
        "out": bad.nans(device, 3, 4, 64, dtype=F32),
        "lse": bad.nans(device, 3, 4, dtype=F32),
    }


def merge_wrong(device: str) -> Wrong:
    call, new = merge_call(device), functools.partial(bad.floats, device)
    six = {"outs": new(2, 2, 3, 2, 4, 64), "lses": new(2, 2, 3, 2, 4), "lse": bad.nans(device, 2, 3, 2, 4, dtype=F32)}
    headless = {
        "outs": new(2, 64),
        "lses": new(2),
        "out": bad.nans(device, 64, dtype=F32),
        "lse": bad.nans(device, dtype=F32),
    }
    return {
        **bad.wrong_tensor(
            call, "outs", (64,), (0, 3, 4, 64), (2, 3, 4, 60), (2, 3, 4, 1024), dtypes=[F64], off=4, rows=2,
            spread=True,
        ),
        **bad.wrong_tensor(call, "lses", (2, 4, 3), dtypes=[BF16, F64]),
        **bad.wrong_tensor(call, "s_aux", (3,), dtypes=[BF16]),
        "s_aux of states without heads": ("s_aux", headless),
        **bad.wrong_tensor(call, "out", (3, 4, 32), dtypes=[F64], off=8, spread=True),
        "out that cannot be viewed": ("out", {**six, "out": new(3, 2, 2, 4, 64).transpose(0, 1)}),
        **bad.wrong_tensor(call, "lse", (4, 3), dtypes=[FP16]),
    }  # fmt: skip


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
    """Calls that the interface itself refuses, and some that `mla_fp8_decode` refuses under the interface's names."""
    call = flash_call(device)
    k_cache = call["k_cache"]
    dense = {"indices": None, "topk_length": None, "block_table": bad.ints(device, BATCH, 2)}
    return {
        **bad.wrong_tensor(call, "q", call["q"].shape[1:], dtypes=[FP16]),
        **bad.wrong_tensor(call, "indices", dtypes=[I64]),
        **bad.wrong_tensor(call, "out", dtypes=[F32]),
        "k_cache of bfloat16": ("k_cache", bad.zeros(device, PAGES, PAGE_SIZE, 1, QK_DIM)),
        **bad.wrong_options(q=([0],), k_cache=(None,), indices=(None, [0]), topk_length=([0],), out=([0],)),
        "k_cache of other tokens": ("kv_cache", {"k_cache": k_cache[..., :592]}),
        "k_cache 8 bytes off": ("kv_cache", {"k_cache": bad.off_by(8, k_cache)}),
        "k_cache on another device": ("kv_cache", {"k_cache": k_cache.to("meta")}),
        "causal with indices": ("causal", True),
        "a second cache without indices": ("extra_indices", {"extra_k_cache": k_cache}),
        "a second cache of V4": ("extra_kv_cache", {"extra_k_cache": bad.zeros(device, 2, 2, 1, 584, dtype=U8)}),
        "indices of a second cache": ("extra_indices", {"extra_indices_in_kvcache": call["indices"]}),
        "lengths of a second cache": ("extra_topk_length", call["topk_length"]),
        "kv_format of other bytes": ("k_cache", {"kv_format": "MODEL1"}),
        **bad.wrong_options(
            is_fp8_kvcache=(False,), head_dim_v=(QK_DIM,), kv_format=("V5", 4), softmax_scale=("1", -math.inf),
            descale_q=(bad.floats(device, 1),), descale_k=(bad.floats(device, 1),),
        ),
        "attn_sink of bfloat16": ("s_aux", {"attn_sink": call["attn_sink"].bfloat16()}),
        "attn_sink on another device": ("s_aux", {"attn_sink": call["attn_sink"].to("meta")}),
        **{f"{name} on another device": (name, call[name].to("meta")) for name in ("indices", "topk_length", "out")},
        "everything on another device": ("q", bad.all_elsewhere(call)),
        **bad.overlapping(call, "out"),
        "causal no flag": ("causal", {**dense, "causal": "no", "cache_seqlens": bad.ints(device, BATCH)}),
    }  # fmt: skip


TABLES = {
    "mla_fp8_decode, sparse": Table(mla_request.DECODE, sparse_call, sparse_wrong),
    "mla_fp8_decode, dense": Table(mla_request.DECODE, dense_call, dense_wrong),
    "mla_fp8_decode, planar pages": Table(mla_request.DECODE, latent.planar_call, latent.planar_wrong),
    "mla_fp8_decode, two caches": Table(mla_request.DECODE, latent.two_caches_call, latent.two_caches_wrong),
    "mla_fp8_append": Table(mla_request.APPEND, append_call, append_wrong),
    "mla_fp8_append, planar pages": Table(mla_request.APPEND, latent.append_call, latent.append_wrong),
    "merge_states": Table(merge_request.MERGE, merge_call, merge_wrong),
    "gqa_decode": Table(gqa_request.DECODE, gqa.gqa_call, gqa.gqa_wrong),
    "gqa_decode, paged": Table(gqa_request.DECODE, gqa.gqa_paged_call, gqa.gqa_paged_wrong),
    "gqa_decode, blocks": Table(gqa_request.DECODE, gqa.gqa_blocks_call, gqa.gqa_blocks_wrong),
    "kv_int8_append": Table(gqa_request.INT8_APPEND, gqa.kv_append_call, gqa.kv_append_wrong),
    "kv_append": Table(gqa_request.APPEND, gqa.kv_kind_call, gqa.kv_kind_wrong),
    "sink_attention": Table(sink_request.FORWARD, gqa.sink_call, gqa.sink_wrong),
    "sink_attention, packed": Table(sink_request.FORWARD, gqa.sink_packed_call, gqa.sink_packed_wrong),
    "sink_attention_backward": Table(sink_request.BACKWARD, gqa.sink_backward_call, gqa.sink_backward_wrong),
    "index_append": Table(index_request.APPEND, index.append_call, index.append_wrong),
    "index_decode": Table(index_request.DECODE, index.decode_call, index.decode_wrong),
    "index_topk": Table(index_request.TOPK, index.topk_call, index.topk_wrong),
    "flash_mla_with_kvcache": Table(None, flash_call, flash_wrong, flash_mla_with_kvcache),
}
