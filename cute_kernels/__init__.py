"""Attention kernels for NVIDIA Hopper in the CUTLASS CuTe DSL.

    from cute_kernels import mla_fp8_decode   # MLA decoding over FP8 and FP4 token formats
    from cute_kernels import mla_fp8_append   # quantize new tokens and write them to their slots
    from cute_kernels import gqa_decode       # GQA decoding over an INT8, FP8 or 16-bit KV cache
    from cute_kernels import kv_append        # quantize new K and V and write them to their slots: INT8, FP8, 4-bit V
    from cute_kernels import kv_int8_append   # the same for INT8 alone
    from cute_kernels import index_append     # quantize index keys of sparse attention and write them to their slots
    from cute_kernels import index_decode     # the tokens that sparse attention reads, out of a cache of index keys
    from cute_kernels import index_topk       # choose the tokens with the highest logits, in order: positions or slots
    from cute_kernels import sink_attention   # prefill and training with sinks and a sliding window, differentiable
    from cute_kernels import sink_attention_backward  # its gradients, for context parallelism written by hand
    from cute_kernels import merge_states     # combine (out, lse) pairs of disjoint key sets
    from cute_kernels import warm             # compile a model's kernels before it is served

Importing this package needs no GPU, no CUDA library and no cutlass: a name is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cute_kernels.gqa.append_op import kv_append, kv_int8_append
    from cute_kernels.gqa.op import gqa_decode
    from cute_kernels.indexer.append_op import index_append
    from cute_kernels.indexer.decode_op import index_decode
    from cute_kernels.indexer.topk_op import index_topk
    from cute_kernels.merge.op import merge_states
    from cute_kernels.mla.append_op import mla_fp8_append
    from cute_kernels.mla.op import mla_fp8_decode
    from cute_kernels.sink.op import sink_attention, sink_attention_backward
    from cute_kernels.warm import CallableModule

    warm: CallableModule

__all__ = [  # written out: type checkers run nothing
    "gqa_decode",
    "index_append",
    "index_decode",
    "index_topk",
    "kv_append",
    "kv_int8_append",
    "merge_states",
    "mla_fp8_append",
    "mla_fp8_decode",
    "sink_attention",
    "sink_attention_backward",
]
__version__ = "0.2.0"

_MODULES = {
    "gqa_decode": "cute_kernels.gqa.op",
    "index_append": "cute_kernels.indexer.append_op",
    "index_decode": "cute_kernels.indexer.decode_op",
    "index_topk": "cute_kernels.indexer.topk_op",
    "kv_append": "cute_kernels.gqa.append_op",
    "kv_int8_append": "cute_kernels.gqa.append_op",
    "merge_states": "cute_kernels.merge.op",
    "mla_fp8_append": "cute_kernels.mla.append_op",
    "mla_fp8_decode": "cute_kernels.mla.op",
    "sink_attention": "cute_kernels.sink.op",
    "sink_attention_backward": "cute_kernels.sink.op",
}


def __getattr__(name: str) -> Any:
    if name == "warm":  # a module that can be called
        return importlib.import_module("cute_kernels.warm")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "warm"})
