"""Keys of prepared launches: what a compiled kernel does not check makes another key, and addresses are compared.

A key is made before a kernel is looked up, so none of this needs a GPU. Most mutants of a key would write past memory.
"""

from typing import Any, NoReturn

import pytest
import torch

from cute_kernels.gqa import append_op as kv_append_op
from cute_kernels.gqa import blocks_op
from cute_kernels.gqa import launch as gqa_launch
from cute_kernels.gqa import op as gqa_op
from cute_kernels.gqa import request as gqa_request
from cute_kernels.indexer import append_op as index_append_op
from cute_kernels.indexer import decode_op as index_op
from cute_kernels.indexer import request as indexer_request
from cute_kernels.indexer import topk_op
from cute_kernels.merge import op as merge_op
from cute_kernels.mla import append_op
from cute_kernels.mla import launch as mla_launch
from cute_kernels.mla import op as mla_op
from cute_kernels.mla.request import DECODE
from cute_kernels.runtime import ops, workspace
from cute_kernels.sink import op as sink_op
from cute_kernels.sink.request import FORWARD
from tests.kit.bad_input import TABLES
from tests.kit.prepared import launch_of, prepare

BF16, I32, U32, U8 = torch.bfloat16, torch.int32, torch.uint32, torch.uint8
CPU = torch.device("cpu")
Call = dict[str, Any]


class Found(Exception):
    """Holds the key that was looked up."""


class Keys(dict[Any, Any]):
    def get(self, key: Any, default: Any = None) -> NoReturn:
        raise Found(key)


def key_of(module: Any, request: Call) -> Any:
    """The key under which a launch looks for what is prepared in a module."""
    known, module._prepared = module._prepared, Keys()
    try:
        launch_of(module)(request)
    except Found as found:
        return found.args[0]
    finally:
        module._prepared = known
    raise AssertionError("nothing was looked up")


# ---- calls by argument, and keys of them

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
    """The same sizes with every second row of the first dimension of a larger tensor."""
    return t.new_zeros((2 * t.shape[0], *t.shape[1:]))[::2]


def imaginary(t: torch.Tensor) -> torch.Tensor:
    """The same as a part of complex numbers: a view with a last stride of 2."""
    return torch.complex(torch.zeros_like(t), t).imag


def negated(t: torch.Tensor) -> torch.Tensor:
    """A view with its neg bit set, as torch makes them: with a last stride of 2."""
    view = torch.complex(torch.zeros_like(t), t).conj().imag
    assert view.is_neg() and view.stride() == imaginary(t).stride()
    return view


def turned(t: torch.Tensor) -> torch.Tensor:
    """The same sizes with the last two dimensions in the other order."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def unsigned(call: Call, *names: str) -> dict[str, Call]:
    """The same bits as integers without a sign."""
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
        "one page": {"kv_cache": LATENT["kv_cache"][:1]},  # of one page the stride is not checked
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
        # its last scale rows are written there
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


@pytest.mark.parametrize(("name", "what"), [(name, what) for name, changes in CHANGES.items() for what in changes])
def test_another_key_for(name: str, what: str) -> None:
    module, call = CALLS[name]
    changed = {**call, **CHANGES[name][what]}
    keys = [key_of(module, request) for request in (call, changed, dict(call))]
    assert keys[0] == keys[2] and hash(keys[0]) == hash(keys[2])
    assert keys[0] != keys[1]


@pytest.mark.parametrize(("name", "output"), [("gqa", "out"), ("gqa", "lse"), ("mla", "out"), ("merge", "out")])
def test_each_distance_of_rows_of_an_output_has_a_key(name: str, output: str) -> None:
    module, call = CALLS[name]
    rows = call[output].new_zeros(9, *call[output].shape[1:])
    outputs = (call[output], rows[::2][: len(call[output])], rows[::3][: len(call[output])])
    assert len({key_of(module, {**call, output: each}) for each in outputs}) == len({t.stride() for t in outputs})


# ---- what is compared in each call


class Kernel:
    """Stands for a compiled kernel that takes everything."""

    def __init__(self) -> None:
        self.launches = 0

    def __call__(self, *arguments: Any, **named: Any) -> None:
        self.launches += 1


NEED = workspace.Need(CPU, 0, 0, None)
NONE, LENGTH, LSE = torch.zeros(4), torch.ones(2, dtype=I32), torch.zeros(2, 1, 4)


def prepared_of(name: str, kernel: Kernel) -> Any:
    if name == "blocks":
        views = (blocks_op.Strided("k_cache", "pthd", (6, 128, 1, 64), (8192, 64, 64, 1)),)
        rows = torch.zeros(4, 3, dtype=I32)
        return blocks_op.PreparedLaunch(kernel, "paged_NHD", views, 4, rows, rows[:, 0], LENGTH, set())
    if name == "gqa":
        return gqa_launch.PreparedLaunch(kernel, NEED, NONE, LENGTH, LSE, set())
    if name in ("mla", "latent"):
        out = CALLS[name][1]["out"]
        return mla_launch.PreparedLaunch(kernel, (0,), False, NEED, NONE, LENGTH.unsqueeze(1), out, LSE, set())
    if name == "merge":
        return merge_op.PreparedLaunch(kernel, MERGED["out"], MERGED["lse"], set())
    if name == "kv append":
        return kv_append_op.PreparedLaunch(kernel, None, set())
    return kernel


RUN = {
    "gqa": gqa_op._decode_on_gpu,
    "blocks": gqa_op._decode_blocks_on_gpu,
    "mla": mla_op._decode_on_gpu,
    "latent": mla_op._decode_on_gpu,
    "merge": merge_op._merge_or_explain,
    "append, v3.2": append_op._append,
    "kv append": kv_append_op._append,
}


def same_bytes(like: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The last elements of another tensor's memory, with the shape and dtype of the first one."""
    flat = other.flatten().view(U8)
    return flat[-like.nbytes :].view(like.dtype).view(like.shape)


def inside(name: str, one: str, other: str) -> Call:
    """The smaller of two arguments in the memory of the larger one, of which it is a part."""
    call = CALLS[name][1]
    small, large = sorted((one, other), key=lambda argument: call[argument].nbytes)
    return {small: same_bytes(call[small], call[large])}


PAIRS = {
    "blocks": [("out", "lse"), ("out", "k_cache"), ("lse", "indices"), ("lse", "cache_seqlens")],
    "gqa": [("out", "lse"), *(("out", name) for name in ("k_cache", "v_cache")), ("lse", "alibi_slopes")],
    "mla": [("out", "lse"), ("out", "q"), ("out", "kv_cache"), ("lse", "indices")],
    "latent": [("out", "lse"), ("out", "kv_cache"), ("lse", "indices")],
    "merge": [("out", "lse"), ("out", "outs"), ("lse", "lses")],
    "append, v3.2": [("kv_cache", "kv"), ("kv_cache", "slot_mapping")],
    "kv append": [("k_cache", "v_cache"), ("k_scale", "v_scale"), ("k_cache", "v"), ("v_scale", "slot_mapping")],
}


@pytest.mark.parametrize(("name", "pair"), [(name, pair) for name, pairs in PAIRS.items() for pair in pairs])
def test_a_prepared_launch_compares_addresses(
    name: str, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same shapes and strides, so that the key is the same."""
    module, call = CALLS[name]
    kernel = Kernel()
    monkeypatch.setattr(blocks_op, "decode", lambda request: (request["out"], request["lse"]))
    prepare(monkeypatch, module, prepared_of(name, kernel), call)
    RUN[name](call)
    assert kernel.launches == 2
    with pytest.raises(ValueError, match=rf"^{pair[0]}: got memory that is also {pair[1]}'s; needs memory of its own"):
        RUN[name]({**call, **inside(name, *pair)})
    assert kernel.launches == 2
    assert len(module._prepared) == 1


@pytest.mark.parametrize("name", ["gqa", "latent"])
def test_a_prepared_launch_takes_q_as_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, call = CALLS[name]
    kernel = Kernel()
    launch = prepared_of(name, kernel)
    prepare(monkeypatch, module, launch, call)
    for out in (call["q"], call["q"].view(call["q"].shape)):
        RUN[name]({**call, "out": out})
    assert kernel.launches == 3
    rows = call["q"].new_zeros(4, *call["q"].shape[1:])
    out = rows[:2]
    launch.apart.clear()
    RUN[name]({**call, "q": out, "out": out})
    assert launch.apart, "the next call is not compared"
    with pytest.raises(ValueError, match="^out: got memory that is also q's"):
        RUN[name]({**call, "q": rows[::2], "out": out})  # it begins where that q did
    assert kernel.launches == 4
    RUN[name]({**call, "q": out, "out": rows[2:]})
    with pytest.raises(ValueError, match="^out: got memory that is also q's"):
        RUN[name]({**call, "q": rows[::2], "out": rows[2:]})  # both begin where they did
    assert kernel.launches == 5


def test_addresses_of_several_storages_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, looked = Kernel(), []

    def look(written: Any, addresses: Any) -> bool:
        looked.append(addresses)
        return False

    monkeypatch.setattr(ops, "_KEPT", 2)
    monkeypatch.setattr(ops, "share_storage", look)
    launch = prepared_of("merge", kernel)
    prepare(monkeypatch, merge_op, launch, MERGED)
    outputs = [torch.zeros_like(MERGED["out"]) for _ in range(3)]
    for out in (*outputs, outputs[2]):
        RUN["merge"]({**MERGED, "out": out})
        assert len(launch.apart) <= 2
    assert len(looked) == 1 + len(outputs)


@pytest.mark.parametrize(
    ("name", "argument"),
    [("gqa", "lse"), ("gqa", "k_scale"), ("gqa", "v_scale"), ("mla", "lse"), ("latent", "lse"), ("merge", "lses"),
     ("merge", "lse"), ("merge", "s_aux"), ("kv append", "k_scale"), ("kv append", "v_scale")],
)  # fmt: skip
def test_a_prepared_launch_sees_a_sign(name: str, argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, call = CALLS[name]
    call = {**call, argument: imaginary(torch.zeros(4) if call[argument] is None else call[argument])}
    kernel = Kernel()
    prepare(monkeypatch, module, prepared_of(name, kernel), call)
    with pytest.raises(ValueError, match=rf"^{argument}: got a view with its neg bit set"):
        RUN[name]({**call, argument: negated(call[argument])})
    assert kernel.launches == 1


ONE_HEAD: dict[str, Call] = {
    "gqa": {
        **dict.fromkeys(("q", "out"), torch.zeros(1, 1, 1, 64, dtype=BF16)),
        **dict.fromkeys(("k_cache", "v_cache"), torch.zeros(1, 1, 16, 64, dtype=torch.int8)),
        **dict.fromkeys(("k_scale", "v_scale"), torch.ones(1, 1, 16)),
        "cache_seqlens": torch.ones(1, dtype=I32),
        "alibi_slopes": None,
    },
    "mla": {
        "q": torch.zeros(1, 1, 1, 576, dtype=BF16),
        "indices": torch.zeros(1, 1, 5, dtype=I32),
        "out": torch.zeros(1, 1, 1, 512, dtype=BF16),
    },
    "merge": {"outs": torch.zeros(2, 1, 1, 64), "lses": torch.zeros(2, 1, 1), "out": torch.zeros(1, 1, 64)},
}


@pytest.mark.parametrize("argument", ["lse", "s_aux"])
@pytest.mark.parametrize("name", list(ONE_HEAD))
def test_a_prepared_launch_sees_the_sign_of_one_number(
    name: str, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is contiguous, as torch says, and kernels do not check the stride of a size of 1."""
    module, call = CALLS[name]
    call = {**call, **ONE_HEAD[name]}
    call |= {"lse": torch.zeros(call["out"].shape[:-1]), "s_aux": torch.zeros(1)}
    kernel = Kernel()
    prepare(monkeypatch, module, prepared_of(name, kernel), call)
    RUN[name](call)
    with pytest.raises(ValueError, match=rf"^{argument}: got a view with its neg bit set"):
        RUN[name]({**call, argument: negated(call[argument])})
    assert kernel.launches == 2


@pytest.mark.parametrize("name", ["gqa", "mla", "latent"])
@pytest.mark.parametrize("option", [{"causal": "no"}, {"softmax_scale": float("nan")}, {"num_splits": True}])
def test_a_prepared_launch_looks_at_options(name: str, option: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    module, call = CALLS[name]
    call, kernel = {**call, "softmax_scale": 0.125, "num_splits": 1}, Kernel()
    prepare(monkeypatch, module, prepared_of(name, kernel), call)
    with pytest.raises((TypeError, ValueError), match=f"^{next(iter(option))}: got"):
        RUN[name]({**call, **option})
    assert kernel.launches == 1


def test_caches_that_lie_in_turn_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of all layers in one tensor: the same distances are not looked at again."""
    kernel, looked = Kernel(), []
    layers = torch.zeros(3, 2, 2, 2, 16, 64, dtype=torch.int8)
    calls = [{**KV_APPEND, "k_cache": layer[0], "v_cache": layer[1]} for layer in layers]
    scales = torch.ones(3, 2, 2, 2, 16)
    for call, pair in zip(calls, scales, strict=True):
        call |= {"k_scale": pair[0], "v_scale": pair[1]}
    prepare(monkeypatch, kv_append_op, prepared_of("kv append", kernel), calls[0])
    monkeypatch.setattr(kv_append_op, "check", lambda request: looked.append(request))
    for call in calls * 2:
        kv_append_op._append(call)
    assert kernel.launches == 7
    assert len(looked) == 2, "scales are as far from the second and the third layer's keys only once each"


# ---- what goes to a kernel without its own checks


def test_only_what_the_prefill_would_take_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """`gqa_decode` takes rows of 8 bytes and codes; `sink_attention` refuses them for any number of tokens."""
    monkeypatch.setattr(sink_op, "_decode", lambda request: "decoded")
    call = TABLES["sink_attention"].right("cpu")
    q, k, v = (call[name] for name in "qkv")

    def decoded(q: torch.Tensor, k: torch.Tensor) -> bool:
        return sink_op._decode_if_few(FORWARD.request(q=q, k=k, v=v, return_lse=False)) == "decoded"

    wide = q.new_zeros((*q.shape[:-1], 80))
    assert decoded(q, k) and decoded(wide[..., :64], k)
    assert wide.data_ptr() % 16 == 0
    assert not decoded(wide[..., 4:68], k)
    assert not decoded(q.new_zeros((*q.shape[:-1], 68))[..., :64], k)
    assert not decoded(q, k.to(torch.int8)) and not decoded(q, k.half())
