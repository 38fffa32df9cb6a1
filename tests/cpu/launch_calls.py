"""A request of each operator on the CPU, and changes to it that each ask for another prepared launch."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels.gqa import append_op as kv_append_op
from cute_kernels.gqa import blocks_op
from cute_kernels.gqa import launch as gqa_launch
from cute_kernels.gqa import request as gqa_request
from cute_kernels.indexer import append_op as index_append_op
from cute_kernels.indexer import decode_op as index_op
from cute_kernels.indexer import request as indexer_request
from cute_kernels.indexer import topk_op
from cute_kernels.merge import op as merge_op
from cute_kernels.mla import append_op
from cute_kernels.mla import launch as mla_launch
from cute_kernels.mla.request import DECODE

BF16, I32, U32, U8 = torch.bfloat16, torch.int32, torch.uint32, torch.uint8
Call = dict[str, Any]
ROWS = torch.ones(2, 2, 16)
GQA: Call = {
    **gqa_request.DECODE.defaults,
    "q": torch.zeros(2, 1, 4, 64, dtype=BF16),
    "k_cache": torch.zeros(2, 2, 16, 64, dtype=torch.int8),
    "v_cache": torch.zeros(2, 2, 16, 64, dtype=torch.int8),
    "k_scale": ROWS,
    "v_scale": ROWS,
    "layout": "BNSH",
    "causal": True,
    "cache_seqlens": torch.ones(2, dtype=I32),
    "alibi_slopes": torch.ones(2, 4),
    "out": torch.zeros(2, 1, 4, 64, dtype=BF16),
    "lse": torch.zeros(2, 1, 4),
    "return_lse": False,
}
BLOCKS: Call = {
    **GQA,
    "k_cache": torch.zeros(3, 2, 128, 64, dtype=BF16),
    "v_cache": torch.zeros(3, 2, 128, 64, dtype=BF16),
    "layout": "paged_HND",
    "cache_seqlens": torch.ones(2, dtype=I32),
    "block_table": torch.zeros(2, 5, dtype=I32),
    "indices": torch.zeros(2, 1, 2, 3, dtype=I32),
    **dict.fromkeys(("k_scale", "v_scale", "alibi_slopes")),
}
PAGED: Call = {**BLOCKS, "indices": None, "cache_starts": torch.zeros(2, dtype=I32)}
MLA: Call = {
    **DECODE.defaults,
    "q": torch.zeros(2, 1, 4, 576, dtype=BF16),
    "kv_cache": torch.zeros(3, 8, 656, dtype=U8),
    "indices": torch.zeros(2, 1, 5, dtype=I32),
    "causal": True,
    "inf_if_empty": False,
    "out": torch.zeros(2, 1, 4, 512, dtype=BF16),
    "lse": torch.zeros(2, 1, 4),
    "return_lse": True,
}
DENSE: Call = {
    **MLA,
    "indices": None,
    "block_table": torch.zeros(2, 5, dtype=I32),
    "cache_seqlens": torch.ones(2, dtype=I32),
}
LATENT: Call = {**MLA, "q": torch.zeros(2, 1, 4, 512, dtype=BF16), "kv_cache": torch.zeros(4, 8, 584, dtype=U8)}
TWO: Call = {
    **LATENT,
    "extra_kv_cache": LATENT["kv_cache"],
    "extra_indices": MLA["indices"],
    **dict.fromkeys(("topk_length", "extra_topk_length"), torch.ones(2, dtype=I32)),
}
PAGES = torch.zeros(8 * 8 * 584 + 999, dtype=U8)
MLA_APPEND: Call = {
    "kv": torch.zeros(2, 512, dtype=BF16),
    "kv_cache": PAGES.as_strided((4, 8, 584), (8 * 584, 584, 1)),
    "slot_mapping": torch.zeros(2, dtype=torch.int64),
    "cache_format": "v4",
    "cache_layout": None,
}
APPEND_V3_2: Call = {
    **MLA_APPEND,
    "kv": torch.zeros(2, 576, dtype=BF16),
    "kv_cache": torch.zeros(4, 8, 656, dtype=U8),
    "cache_format": None,
}
KV_APPEND: Call = {
    "k": torch.zeros(3, 2, 64, dtype=BF16),
    "v": torch.zeros(3, 2, 64, dtype=BF16),
    "k_cache": torch.zeros(2, 2, 16, 64, dtype=torch.int8),
    "v_cache": torch.zeros(2, 2, 16, 64, dtype=torch.int8),
    "k_scale": torch.ones(2, 2, 16),
    "v_scale": torch.ones(2, 2, 16),
    "slot_mapping": torch.zeros(3, dtype=torch.int64),
    "kind": "int8",
    "layout": "BNSH",
}
MERGED: Call = {
    "outs": torch.zeros(2, 3, 4, 64),
    "lses": torch.zeros(2, 3, 4),
    "s_aux": None,
    "out": torch.zeros(3, 4, 64),
    "lse": torch.zeros(3, 4),
    "headers": False,
}
KEY_PAGES = torch.zeros(4 * 16 * 132 * 2 + 999, dtype=U8)
INDEX_APPEND: Call = {
    "k": torch.zeros(2, 128, dtype=BF16),
    "k_cache": KEY_PAGES.as_strided((4, 16, 132), (16 * 132, 132, 1)),
    "slot_mapping": torch.zeros(2, dtype=torch.int64),
    "scale": "float32",
}
INDEX: Call = {
    **indexer_request.DECODE.defaults,
    "q": torch.zeros(2, 3, 16, 128, dtype=U8),
    "weights": torch.complex(torch.zeros(2, 3, 16), torch.zeros(2, 3, 16)).imag,
    "k_cache": INDEX_APPEND["k_cache"],
    "block_table": torch.zeros(2, 5, dtype=I32),
    "cache_seqlens": torch.ones(2, dtype=I32),
    "topk": 4,
    "slot_table": torch.zeros(2, 5, dtype=I32),
    "slot_page_size": 16,
    "out": torch.zeros(2, 3, 4, dtype=I32),
    "logits": torch.zeros(2, 3, 80),
}
TOPK: Call = {
    "logits": torch.complex(torch.zeros(4, 80), torch.zeros(4, 80)).imag,
    "lengths": torch.ones(4, dtype=I32),
    "topk": 4,
    "block_table": torch.zeros(2, 5, dtype=I32),
    "page_size": 16,
    "row_starts": torch.zeros(4, dtype=I32),
    "out": torch.zeros(4, 4, dtype=I32),
}
CALLS: dict[str, tuple[Any, Call]] = {
    "gqa": (gqa_launch, GQA),
    "pages": (gqa_launch, PAGED),
    "blocks": (blocks_op, BLOCKS),
    "mla": (mla_launch, MLA),
    "dense": (mla_launch, DENSE),
    "latent": (mla_launch, LATENT),
    "two caches": (mla_launch, TWO),
    "append": (append_op, MLA_APPEND),
    "append, v3.2": (append_op, APPEND_V3_2),
    "kv append": (kv_append_op, KV_APPEND),
    "merge": (merge_op, MERGED),
    "index append": (index_append_op, INDEX_APPEND),
    "index": (index_op, INDEX),
    "topk": (topk_op, TOPK),
}


def apart(t: torch.Tensor) -> torch.Tensor:
    """A tensor of these sizes that has every second row of the first dimension of a larger tensor."""
    return t.new_zeros((2 * t.shape[0], *t.shape[1:]))[::2]


def imaginary(t: torch.Tensor) -> torch.Tensor:
    """A tensor with these values that is the imaginary part of complex numbers: a view with a last stride of 2."""
    return torch.complex(torch.zeros_like(t), t).imag


def negated(t: torch.Tensor) -> torch.Tensor:
    """A view with its neg bit set and a last stride of 2, as torch makes it."""
    view = torch.complex(torch.zeros_like(t), t).conj().imag
    assert view.is_neg() and view.stride() == imaginary(t).stride()
    return view


def turned(t: torch.Tensor) -> torch.Tensor:
    """A tensor with these values whose last two dimensions are swapped in memory."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def unsigned(call: Call, *names: str) -> dict[str, Call]:
    """For each name, a change that views the argument as unsigned integers."""
    return {f"unsigned {name}": {name: call[name].view(U32)} for name in names}


CHANGES: dict[str, dict[str, Call]] = {
    "gqa": {
        "num_splits": {"num_splits": 2},
        "a softcap": {"softcap": 2.0},
        "no slopes": {"alibi_slopes": None},
        "strides of slopes": {"alibi_slopes": torch.ones(2, 8)[:, :4]},
        "strides of k_scale": {"k_scale": turned(ROWS)},
        "strides of v_scale": {"v_scale": turned(ROWS)},
        "dtype of scales": {"k_scale": ROWS.half()},
        "sign of k_scale": {"k_scale": negated(ROWS)},
        "sign of v_scale": {"v_scale": negated(ROWS)},
        "another granularity": {"v_scale": torch.ones(2)},
        "size of k_scale": {"k_scale": ROWS[:, :, :8]},
        "more tokens of q": {"q": torch.zeros(2, 2, 4, 64, dtype=BF16)},
        "dtype of q": {"q": GQA["q"].half()},
        "dtype of keys": {"k_cache": GQA["k_cache"].view(torch.float8_e4m3fn)},
        "dtype of values": {"v_cache": GQA["v_cache"].view(torch.float8_e4m3fn)},
        "fewer tokens": {"k_cache": GQA["k_cache"][:, :, :8]},
        "no lengths": {"cache_seqlens": None},
        "a table": {"block_table": torch.zeros(2, 5, dtype=I32)},
        "strides of out": {"out": apart(GQA["out"])},
        "strides of lse": {"lse": apart(GQA["lse"])},
    },
    "pages": {
        "pages of a sequence": {"block_table": PAGED["block_table"][:, :4]},
        "no table": {"block_table": None},
        "no starts": {"cache_starts": None},
        **unsigned(PAGED, "block_table", "cache_seqlens", "cache_starts"),
    },
    "blocks": {
        **unsigned(BLOCKS, "block_table", "cache_seqlens", "indices"),
        "more tokens of q": {"q": torch.zeros(2, 2, 4, 64, dtype=BF16)},
        "dtype of q": {"q": BLOCKS["q"].half()},
        "fewer blocks": {"indices": BLOCKS["indices"][..., :2]},
        "one list for all heads": {"indices": BLOCKS["indices"][:, :, :1]},
        "another block": {"index_block": 64},
        "strides of k_cache": {"k_cache": apart(BLOCKS["k_cache"])},
        "strides of v_cache": {"v_cache": apart(BLOCKS["v_cache"])},
        "a scale": {"k_scale": torch.ones(1), "v_scale": torch.ones(1)},
        "pages of a sequence": {"block_table": BLOCKS["block_table"][:, :4]},
        "a sink": {"s_aux": torch.zeros(4)},
        "slopes": {"alibi_slopes": torch.zeros(4)},
        "starts": {"cache_starts": torch.zeros(2, dtype=I32)},
        "a window": {"window": 9},
        "heads of out and tokens": {"out": torch.zeros(2, 4, 1, 64, dtype=BF16)},
        "dtype of lse": {"lse": torch.zeros(2, 1, 4, dtype=torch.float64)},
    },
    "two caches": {
        **unsigned(TWO, "indices", "topk_length", "extra_indices", "extra_topk_length"),
        "pages of the second": {"extra_kv_cache": LATENT["kv_cache"][:2]},
        "distance of its pages": {"extra_kv_cache": apart(LATENT["kv_cache"])},
        "its topk": {"extra_indices": MLA["indices"][..., :4]},
    },
    "mla": {
        "more tokens of q": {"q": torch.zeros(2, 2, 4, 576, dtype=BF16)},
        "lengths": {"topk_length": torch.ones(2, dtype=I32)},
        "num_splits": {"num_splits": 2},
        "exchange": {"exchange": "none"},
        "inf_if_empty": {"inf_if_empty": True},
        "no page": {"kv_cache": MLA["kv_cache"][:0]},
        "page size": {"kv_cache": MLA["kv_cache"][:, :4]},
        "topk": {"indices": MLA["indices"][..., :4]},
        "strides of out": {"out": apart(MLA["out"])},
        "strides of lse": {"lse": apart(MLA["lse"])},
    },
    "dense": {
        **unsigned(DENSE, "block_table", "cache_seqlens"),
        "sparse": {
            **dict.fromkeys(("block_table", "cache_seqlens")),
            "indices": MLA["indices"],
            "topk_length": DENSE["cache_seqlens"],
        },
        "pages of a sequence": {"block_table": DENSE["block_table"][:, :4]},
        "num_splits": {"num_splits": 2},
    },
    "latent": {
        "one page": {"kv_cache": LATENT["kv_cache"][:1]},  # the stride of a single page is not checked
        "no page": {"kv_cache": LATENT["kv_cache"][:0]},
        "distance of pages": {"kv_cache": apart(LATENT["kv_cache"])},
        "lengths": {"topk_length": torch.ones(2, dtype=I32)},
        "num_splits": {"num_splits": 2},
        "inf_if_empty": {"inf_if_empty": True},
        "strides of out": {"out": apart(LATENT["out"])},
        "strides of lse": {"lse": apart(LATENT["lse"])},
        "a second cache": {"extra_kv_cache": LATENT["kv_cache"], "extra_indices": MLA["indices"]},
    },
    "append": {
        # the append writes its last scale rows there
        "memory after the last page": {"kv_cache": MLA_APPEND["kv_cache"].clone()},
        "distance of pages": {"kv_cache": PAGES.as_strided((4, 8, 584), (2 * 8 * 584, 584, 1))},
        "page size": {"kv_cache": MLA_APPEND["kv_cache"][:, :4]},
        "dtype of the cache": {"kv_cache": MLA_APPEND["kv_cache"].view(torch.int8)},
        "layout of pages": {"cache_layout": "planar"},
        "more tokens": {"kv": torch.zeros(3, 512, dtype=BF16)},
        "unsigned slots": {"slot_mapping": MLA_APPEND["slot_mapping"].view(torch.uint64)},
    },
    "append, v3.2": {"distance of pages": {"kv_cache": apart(APPEND_V3_2["kv_cache"])}},
    "kv append": {
        **{f"strides of {name}": {name: apart(KV_APPEND[name])} for name in ("k_cache", "v_cache")},
        **{f"strides of {name}": {name: turned(KV_APPEND[name])} for name in ("k_scale", "v_scale")},
        **{
            f"size of {name}": {name: KV_APPEND[name][:, :, :8]}
            for name in ("k_cache", "v_cache", "k_scale", "v_scale")
        },
        **{f"dtype of {name}": {name: KV_APPEND[name].view(U8)} for name in ("k_cache", "v_cache")},
        "dtype of scales": {"k_scale": KV_APPEND["k_scale"].half()},
        "more tokens": {"k": torch.zeros(4, 2, 64, dtype=BF16)},
        "dtype of k": {"k": KV_APPEND["k"].half()},
        "unsigned slots": {"slot_mapping": KV_APPEND["slot_mapping"].view(torch.uint64)},
        "layout": {"layout": "BSNH"},
        "kind": {"kind": "fp8_per_token_head"},
    },
    "merge": {
        "a sink": {"s_aux": torch.zeros(4)},
        "dtype of states": {"outs": MERGED["outs"].half()},
        "dtype of out": {"out": MERGED["out"].half()},
        "strides of out": {"out": apart(MERGED["out"])},
        "strides of lse": {"lse": apart(MERGED["lse"])},
    },
    "index append": {
        "memory after the last page": {"k_cache": INDEX_APPEND["k_cache"].clone()},
        "distance of pages": {"k_cache": KEY_PAGES.as_strided((4, 16, 132), (2 * 16 * 132, 132, 1))},
        "another scale": {"scale": "ue8m0"},
        "more tokens": {"k": torch.zeros(3, 128, dtype=BF16)},
        "dtype of k": {"k": torch.zeros(2, 128)},
        "unsigned slots": {"slot_mapping": INDEX_APPEND["slot_mapping"].view(torch.uint64)},
        "fewer pages": {"k_cache": INDEX_APPEND["k_cache"][:2]},
        "dtype of the cache": {"k_cache": INDEX_APPEND["k_cache"].view(torch.int8)},
    },
    "index": {
        **unsigned(INDEX, "block_table", "cache_seqlens", "slot_table", "out"),
        "memory after the last page": {"k_cache": INDEX["k_cache"].clone()},
        "distance of pages": {"k_cache": KEY_PAGES.as_strided((4, 16, 132), (2 * 16 * 132, 132, 1))},
        "fewer pages": {"k_cache": INDEX["k_cache"][:2]},
        "dtype of the cache": {"k_cache": INDEX["k_cache"].view(torch.int8)},
        "more heads": {"q": torch.zeros(2, 3, 32, 128, dtype=U8)},
        "dtype of q": {"q": INDEX["q"].view(torch.int8)},
        "pages of a sequence": {"block_table": INDEX["block_table"][:, :4]},
        "a length of each query": {"cache_seqlens": torch.ones(2, 3, dtype=I32)},
        "sign of weights": {"weights": negated(INDEX["weights"])},
        "another k": {"topk": 3},
        "first": {"first": 1},
        "last": {"last": 1},
        "positions": {"return_positions": True},
        "pages of the other cache": {"slot_page_size": 32},
        "no other table": {"slot_table": None, "slot_page_size": None},
        "strides of out": {"out": apart(INDEX["out"])},
        "pages of another table": {"slot_table": INDEX["slot_table"][:, :4]},
        "strides of another table": {"slot_table": torch.zeros(2, 10, dtype=I32)[:, ::2]},
        "shape of out": {"out": INDEX["out"].view(3, 2, 4)},
        "shape of logits": {"logits": INDEX["logits"].view(3, 2, 80)},
        "dtype of logits": {"logits": INDEX["logits"].view(I32)},
        "strides of logits": {"logits": apart(INDEX["logits"])},
        "sign of logits": {"logits": negated(INDEX["logits"])},
        "no logits": {"logits": None},
    },
    "topk": {
        **unsigned(TOPK, "lengths", "block_table", "row_starts", "out"),
        "no table": {"block_table": None, "page_size": None},
        "no starts": {"row_starts": None},
        "page size": {"page_size": 32},
        "pages of a request": {"block_table": TOPK["block_table"][:, :4]},
        "shape of out": {"out": torch.zeros(4, 3, dtype=I32)},
        "fewer logits": {"logits": TOPK["logits"][:, :64]},
        "sign of logits": {"logits": negated(TOPK["logits"])},
        "strides of out": {"out": apart(TOPK["out"])},
    },
}
