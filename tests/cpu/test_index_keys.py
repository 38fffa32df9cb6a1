"""Keys of the indexer: bytes against arithmetic written out by hand, pages, and the logits of the reference."""

import math
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch

from cute_kernels import index_append
from fp8_mla import (
    INDEX_KEY,
    pack_index_keys,
    read_pages,
    reference_index_decode,
    reference_index_logits,
    row_views,
    unpack_index_keys,
)
from fp8_mla.indexer import SCALE_RULES
from tests.kit.index_cases import index_cache, index_keys

E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()
BOTH = pytest.mark.parametrize("scale", SCALE_RULES)
LARGEST = 3.3895313892515355e38


def scale_of(values: list[float], rule: str) -> float:
    finite = [min(abs(x), LARGEST) for x in values if not math.isnan(x)]
    largest = max([1e-4, *finite])
    if rule == "float32":
        return float(numpy.float32(largest) / numpy.float32(448))
    exponent = -22
    while Fraction(numpy.float32(largest).item()) > 448 * Fraction(2) ** exponent:
        exponent += 1
    return 2.0**exponent


def code_of(x: float, scale: float, rule: str) -> int:
    if math.isnan(x):
        return 0x7F
    with numpy.errstate(over="ignore"):
        quotient = float(numpy.float32(x) * (numpy.float32(1) / numpy.float32(scale)))
    magnitude = min(abs(quotient), 448.0)
    nearest = min(range(127), key=lambda code: (abs(E4M3[code] - magnitude), code % 2))
    return nearest | (0x80 if math.copysign(1, quotient) < 0 else 0)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_are_what_the_rules_say(scale: str, dtype: torch.dtype) -> None:
    k = index_keys(60, dtype)
    packed = pack_index_keys(k, scale=scale)
    assert packed.shape == (60, 132) and packed.dtype is torch.uint8
    scales = packed[:, 128:].clone().view(torch.float32)[:, 0]
    for row, key, found in zip(packed, k.float().tolist(), scales.tolist(), strict=True):
        factor = scale_of(key, scale)
        assert found == factor
        assert row[:128].tolist() == [code_of(x, factor, scale) for x in key]


def test_numbers_that_others_write() -> None:
    """For a key of ones SGLang writes scale 1 / 448 and codes 448, vLLM 2^-8 and 256."""
    ones = torch.ones(1, 128).bfloat16()
    as_sglang, as_vllm = (pack_index_keys(ones, scale=rule) for rule in ("float32", "ue8m0"))
    assert as_sglang[0, 0] == 0x7E and as_sglang[0, 128:].tolist() == list(numpy.float32(1 / 448).tobytes())
    assert as_vllm[0, 0] == 0x78 and as_vllm[0, 128:].tolist() == list(numpy.float32(2**-8).tobytes())
    assert torch.equal(unpack_index_keys(as_vllm), ones.float())
    assert torch.equal(unpack_index_keys(as_sglang, torch.bfloat16), ones)


@BOTH
@pytest.mark.parametrize(("page_size", "apart"), [(1, 144), (16, 0), (64, 8640), (32, 8704)])
def test_pages_have_codes_then_scales(page_size: int, apart: int, scale: str) -> None:
    k, slots = index_keys(5, torch.bfloat16), torch.tensor([2 * page_size, 0, -1, 4 * page_size, 3 * page_size])
    cache = index_cache(4, page_size, apart)
    whole = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    before = whole.clone()
    index_append(k, cache, slots, scale=scale)
    packed = pack_index_keys(k, scale=scale)
    apart = apart or 132 * page_size
    for row, page in ((packed[0], 2), (packed[1], 0), (packed[4], 3)):
        begin = page * apart
        before[begin : begin + 128] = row[:128]
        before[begin + 128 * page_size : begin + 128 * page_size + 4] = row[128:]
    assert torch.equal(whole, before)
    assert torch.equal(read_pages(cache, slots[:2], token_format=INDEX_KEY), packed[:2])


@pytest.mark.parametrize(
    ("k", "scale", "message"),
    [
        (torch.zeros(3, 64), "float32", "k: got .*needs 128"),
        (torch.zeros(3, 128).half(), "float32", "k: got .*float16"),
        (torch.zeros(3, 128), "e8m0", "scale: got 'e8m0'; needs 'float32' or 'ue8m0'"),
        (torch.zeros(3, 128), None, "scale: got None"),
    ],
)
def test_pack_refuses(k: torch.Tensor, scale: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        pack_index_keys(k, scale=scale)


# ---- logits


def call(heads: int = 16, s_q: int = 3, page_size: int = 16, seed: int = 0) -> dict[str, Any]:
    """A call whose sums are exact: codes are -1, 0 and 1, weights and scales powers of two."""
    gen = torch.Generator().manual_seed(seed)

    def signs(*shape: int) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=gen).float()

    cache = index_cache(9, page_size)
    codes, scales = row_views(cache, INDEX_KEY)
    codes.copy_(signs(9, page_size, 128).to(torch.float8_e4m3fn).view(torch.uint8))
    scales.copy_((torch.randint(-3, 4, (9, page_size, 1), generator=gen).float().exp2()).view(torch.uint8))
    weights = signs(2, s_q, heads) * torch.randint(-4, 5, (2, s_q, heads), generator=gen).float().exp2()
    return {
        "q": signs(2, s_q, heads, 128).to(torch.float8_e4m3fn),
        "weights": weights,
        "k_cache": cache,
        "block_table": torch.tensor([[3, 8, 0, -1, 2], [1, 99, 5, 6, 4]], dtype=torch.int32),
        "cache_seqlens": torch.tensor([5 * page_size, 2 * page_size + 5], dtype=torch.int32),
    }


def written_out(arguments: dict[str, Any], b: int, j: int, position: int) -> float:
    """One logit, key by key and head by head; -inf if there is no key."""
    cache, page_size = arguments["k_cache"], arguments["k_cache"].shape[1]
    page = int(arguments["block_table"][b, position // page_size])
    s_q = arguments["q"].shape[1]
    if position >= int(arguments["cache_seqlens"][b]) - s_q + 1 + j or not 0 <= page < cache.shape[0]:
        return -math.inf
    key = read_pages(cache, torch.tensor([page * page_size + position % page_size]), token_format=INDEX_KEY)[0]
    codes = key[:128].view(torch.float8_e4m3fn).double()
    total = 0.0
    for q, weight in zip(arguments["q"][b, j].double(), arguments["weights"][b, j].tolist(), strict=True):
        total += weight * max(float((q * codes).sum()), 0.0)
    return total * float(key[128:].clone().view(torch.float32)) + 0.0


def test_logits_are_the_formula() -> None:
    arguments = call()
    logits = reference_index_logits(**arguments)
    assert logits.shape == (2, 3, 80) and logits.dtype is torch.float32
    expected = [[[written_out(arguments, b, j, t) for t in range(80)] for j in range(3)] for b in range(2)]
    assert torch.equal(logits, torch.tensor(expected, dtype=torch.float32))
    assert not (logits == 0).logical_and(logits.signbit()).any()
    lengths = torch.tensor([[78, 79, 80], [35, 36, 37]], dtype=torch.int64)
    assert torch.equal(reference_index_logits(**{**arguments, "cache_seqlens": lengths}), logits)


def test_nan_codes_count_as_nothing_and_nan_scales_come_last() -> None:
    arguments = call(s_q=1)
    codes, scales = row_views(arguments["k_cache"], INDEX_KEY)
    codes[3, 2, 7], codes[8] = 0x7F, 0xFF
    scales[3, 4] = torch.tensor([math.nan]).view(torch.uint8)
    logits = reference_index_logits(**arguments)[0, 0]
    assert logits[2] == 0 and (logits[16:32] == 0).all() and logits[4] == -math.inf
    weights = torch.full_like(arguments["weights"], math.nan)
    assert (reference_index_logits(**{**arguments, "weights": weights}) == -math.inf).all()
    _, positions, _ = reference_index_decode(**arguments, topk=80)
    assert positions[0, 0].tolist() == [*range(80)]


def test_the_highest_are_chosen_in_order() -> None:
    arguments = call(heads=64)
    logits = reference_index_logits(**arguments)
    slots, positions, scores = reference_index_decode(**arguments, topk=15)
    table, page_size = arguments["block_table"], 16
    for b in range(2):
        for j in range(3):
            chosen = positions[b, j].tolist()
            assert chosen == sorted(set(chosen))
            order = sorted(range(80), key=lambda t: (-float(logits[b, j, t]), t))
            assert chosen == sorted(order[:15])
            assert scores[b, j].tolist() == logits[b, j, chosen].tolist()
            pages = [int(table[b, t // page_size]) for t in chosen]
            own = [page * page_size + t % page_size for page, t in zip(pages, chosen, strict=True)]
            assert slots[b, j].tolist() == [slot if 0 <= slot < 9 * 16 else -1 for slot in own]


def test_forced_keys_and_another_table() -> None:
    arguments = call(s_q=1)
    slot_table = torch.arange(2 * 40, dtype=torch.int32).view(2, 40)
    options = {"topk": 9, "slot_table": slot_table, "slot_page_size": 2}
    slots, positions, _ = reference_index_decode(**arguments, **options, first=3, last=2)
    assert {0, 1, 2, 78, 79} <= set(positions[0, 0].tolist()) and positions[1, 0, :3].tolist() == [0, 1, 2]
    assert positions[1, 0, -2:].tolist() == [35, 36]
    assert torch.equal(slots[1, 0], 80 + positions[1, 0])  # page p of request 1 is 40 + p
    _, all_forced, _ = reference_index_decode(**arguments, topk=4, first=1, last=3)
    assert all_forced[0, 0].tolist() == [0, 77, 78, 79]
    with pytest.raises(ValueError, match="topk: got 4 with first 3 and last 2"):
        reference_index_decode(**arguments, topk=4, first=3, last=2)
    with pytest.raises(ValueError, match="slot_page_size"):
        reference_index_decode(**arguments, slot_table=slot_table)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(2, 3, 16, 128)}, "q: got"),
        ({"q": torch.zeros(2, 3, 16, 64).to(torch.float8_e4m3fn)}, "q: got"),
        ({"weights": torch.zeros(2, 3, 8)}, "weights: got"),
        ({"weights": torch.zeros(2, 3, 16).bfloat16()}, "weights: got"),
        ({"k_cache": torch.zeros(9, 16, 128, dtype=torch.uint8)}, "k_cache: got"),
        ({"block_table": torch.zeros(3, 5, dtype=torch.int32)}, "block_table: got"),
        ({"cache_seqlens": torch.zeros(3, dtype=torch.int32)}, "cache_seqlens: got"),
    ],
)
def test_the_reference_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        reference_index_logits(**{**call(), **changes})
