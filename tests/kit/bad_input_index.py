"""Valid calls of the indexer's operators, and changes that make each of them wrong."""

import numpy
import torch

from tests.kit import bad_tensors as bad
from tests.kit.bad_tensors import BF16, F32, F64, FP8, FP16, I8, I32, I64, U8, Call, Wrong

ROWS, WIDTH, TOPK, PAGE_SIZE, PAGES = 4, 32, 8, 16, 3
TOPKS = (-1, 2049, 8.0, True, numpy.int64(TOPK), None)
PAGE_SIZES = (0, 16.0, 2**31)
U32, U64 = torch.uint32, torch.uint64


def topk_call(device: str) -> Call:
    return {
        "logits": bad.floats(device, ROWS, WIDTH),
        "lengths": bad.numbers(device, *range(ROWS)),
        "topk": TOPK,
        "block_table": bad.ints(device, 2, 2),
        "page_size": PAGE_SIZE,
        "row_starts": bad.ints(device, ROWS),
        "out": bad.sevens(device, ROWS, TOPK, dtype=I32),
    }


def topk_wrong(device: str) -> Wrong:
    call = topk_call(device)
    wide = bad.floats(device, 1, 4_718_590).expand(ROWS, -1)
    return {
        **bad.wrong_tensor(call, "logits", (2, 2, WIDTH), dtypes=[BF16, F64], spread=True),
        "logits too wide": ("logits", wide),
        **bad.wrong_tensor(call, "lengths", (ROWS + 1,), (2, 2), dtypes=[I64, U32]),
        **bad.wrong_tensor(call, "block_table", (2,), (3, 2), (0, 2), dtypes=[I64], spread=True),
        **bad.wrong_tensor(call, "row_starts", (ROWS - 1,), dtypes=[I64]),
        **bad.wrong_tensor(call, "out", (ROWS, TOPK + 1), dtypes=[I64], spread=True),
        **bad.wrong_options(topk=(0, *TOPKS), page_size=PAGE_SIZES),
        "page_size without a table": ("page_size", {"block_table": None}),
        "a table without page_size": ("page_size", None),
    }  # fmt: skip


def decode_call(device: str) -> Call:
    return {
        "q": bad.zeros(device, 2, 2, 16, 128, dtype=U8),  # torch supports few operations on FP8 on a CPU
        "weights": bad.floats(device, 2, 2, 16),
        "k_cache": bad.zeros(device, PAGES, PAGE_SIZE, 132, dtype=U8),
        "block_table": bad.ints(device, 2, 4),
        "cache_seqlens": bad.numbers(device, 20, 64),
        "topk": TOPK,
        "slot_table": bad.ints(device, 2, 5),
        "slot_page_size": 16,
        "first": 1,
        "last": 2,
        "return_positions": False,
        "out": bad.sevens(device, 2, 2, TOPK, dtype=I32),
        "logits": bad.sevens(device, 2, 2, 4 * PAGE_SIZE, dtype=F32),
    }


def decode_wrong(device: str) -> Wrong:
    call = decode_call(device)
    small = {"k_cache": bad.zeros(device, PAGES, 8, 132, dtype=U8), "logits": None}
    wide = {"block_table": bad.ints(device, 1, 4_718_592 // PAGE_SIZE).expand(2, -1), "logits": None}
    few = {"q": bad.zeros(device, 2, 2, 8, 128, dtype=FP8), "weights": bad.floats(device, 2, 2, 8)}
    none = {name: call[name][:, :0] for name in ("q", "weights", "out", "logits")}
    nothing = dict.fromkeys(("slot_table", "slot_page_size", "out", "logits"))
    nine = {"q": bad.zeros(device, 2, 9, 16, 128, dtype=U8), "weights": bad.floats(device, 2, 9, 16), **nothing}
    much = {
        "q": bad.zeros(device, 30, 8, 16, 128, dtype=U8),
        "weights": bad.floats(device, 30, 8, 16),
        "block_table": bad.ints(device, 1, 4_718_576 // PAGE_SIZE).expand(30, -1),
        "cache_seqlens": bad.ints(device, 30),
        **nothing,
    }
    many = bad.zeros(device, 132, dtype=U8).as_strided((2**16, 2**15, 132), (0, 0, 1))
    return {
        **bad.wrong_tensor(call, "q", (2, 16, 128), (2, 2, 16, 64), dtypes=[BF16, I8], off=8),
        "q with rows 8 bytes off": ("q", bad.rows_apart(call["q"], 8)),
        "q of 8 heads": ("q", few),
        "q of no queries": ("q", none),
        "q of nine queries": ("q", nine),
        **bad.wrong_tensor(call, "weights", (2, 2, 16, 1), (2, 2, 8), dtypes=[BF16], spread=True),
        **bad.wrong_tensor(call, "k_cache", (3, 16, 68), (0, PAGE_SIZE, 132), dtypes=[I8], off=8),
        "k_cache of pages of 8": ("k_cache", small),
        "k_cache of more slots than 31 bits count": ("k_cache", many),
        **bad.wrong_tensor(call, "block_table", (3, 4), dtypes=[I64], spread=True),
        **bad.wrong_options(block_table=(None,), cache_seqlens=(None,)),
        "block_table without pages": ("block_table", {"block_table": bad.ints(device, 2, 0), "logits": None}),
        "block_table too wide": ("block_table", wide),
        "a block_table of more logits than a call may have": ("block_table", much),
        **bad.wrong_tensor(call, "cache_seqlens", (3,), (2, 3), (2, 2, 1), dtypes=[I64]),
        **bad.wrong_tensor(call, "slot_table", (3, 5), dtypes=[I64], spread=True),
        **bad.wrong_options(
            topk=TOPKS, slot_page_size=PAGE_SIZES, first=(-1, 7, 1.0), last=(-1, 9, True), return_positions=bad.FLAGS
        ),
        "neither a choice nor logits": ("topk", {"topk": 0, "first": 0, "last": 0, "out": None, "logits": None}),
        "slot_table without a page size": ("slot_page_size", None),
        "slot_page_size without a table": ("slot_page_size", {"slot_table": None}),
        **bad.wrong_tensor(call, "out", (4, TOPK), dtypes=[I64], rows=4),
        **bad.wrong_tensor(call, "logits", (2, 2, 3 * PAGE_SIZE), dtypes=[F64], spread=True),
    }  # fmt: skip


def append_call(device: str) -> Call:
    return {
        "k": bad.floats(device, 3, 128, dtype=BF16),
        "k_cache": bad.sevens(device, PAGES, PAGE_SIZE, 132, dtype=U8),
        "slot_mapping": bad.numbers(device, 1, 2, 3, dtype=I64),
        "scale": "ue8m0",
    }


def append_wrong(device: str) -> Wrong:
    call = append_call(device)
    whole, apart = PAGE_SIZE * 132, PAGE_SIZE * 132 + 8
    pages = bad.zeros(device, PAGES * apart, dtype=U8).as_strided((PAGES, PAGE_SIZE, 132), (apart, 132, 1))
    crowded = bad.zeros(device, PAGES * apart, dtype=U8).as_strided((PAGES, PAGE_SIZE, 132), (PAGE_SIZE * 128, 132, 1))
    short = bad.zeros(device, PAGES * whole - 16, dtype=U8).as_strided((PAGES, PAGE_SIZE, 132), (whole, 100, 1))
    many = bad.zeros(device, 132, dtype=U8).as_strided((2**16, 2**15, 132), (0, 0, 1))
    shapes = ((PAGES, PAGE_SIZE * 132), (PAGES, PAGE_SIZE, 68), (PAGES, PAGE_SIZE, 2, 132), (PAGES, 0, 132))
    return {
        **bad.wrong_tensor(call, "k", (3, 1, 128), (3, 64), dtypes=[FP16, F64], off=2, rows=4, spread=True),
        **bad.wrong_tensor(call, "k_cache", *shapes, dtypes=[I8], off=8, spread=True),
        "k_cache with pages 8 bytes off": ("k_cache", pages),
        "k_cache with pages that overlap": ("k_cache", crowded),
        "k_cache that ends before its last page does": ("k_cache", short),
        "k_cache of more slots than 31 bits count": ("k_cache", many),
        **bad.wrong_tensor(call, "slot_mapping", (4,), (3, 1), dtypes=[torch.int16, U64]),
        **bad.wrong_options(scale=("e8m0", None, 1.0)),
    }
