"""`mla_fp8_append` on the GPU: the bytes of `fp8_mla.pack` on the CPU, and not a byte elsewhere."""

import pytest
import torch

from cute_kernels import mla_fp8_append
from fp8_mla import FP8_MAX, NOPE_DIM, QK_DIM, QUANT_TILE, TOKEN_BYTES, pack
from tests.kit.mla_cases import generator, strided

PAGE_SIZES = (1, 2, 61, 64, 576)


def slots_for(tokens: int, num_slots: int, seed: int) -> torch.Tensor:
    """Different slots in random order; every seventh token is skipped by a negative slot or one beyond the cache."""
    gen = generator(seed)
    slots = torch.randperm(num_slots, generator=gen)[:tokens]
    skip = torch.tensor([-1, -(2**63), num_slots, 2**40, -(2**32)])
    slots[::7] = skip[torch.arange(len(slots[::7])) % len(skip)]
    return slots


def expected_cache(cache: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """What the cache (pages, page_size, 656) must become, computed on the CPU."""
    result = cache.cpu().clone()
    keep = (slots >= 0) & (slots < result.shape[0] * result.shape[1])
    pages, offsets = slots[keep] // result.shape[1], slots[keep] % result.shape[1]
    result[pages, offsets] = pack(kv.cpu()[keep])
    return result


def random_cache(num_pages: int, page_size: int, seed: int = 0) -> torch.Tensor:
    shape = (num_pages, page_size, TOKEN_BYTES)
    return torch.randint(256, shape, dtype=torch.uint8, generator=generator(seed, "cuda"), device="cuda")


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 63, 64, 65, 1000, 5000])
def test_bytes_equal_pack(tokens, page_size):
    kv = torch.randn((tokens, QK_DIM), generator=generator(tokens)).bfloat16()
    cache = random_cache(-(-(tokens + 40) // page_size), page_size)
    slots = slots_for(tokens, cache.shape[0] * page_size, seed=tokens)
    expected = expected_cache(cache, kv, slots)
    mla_fp8_append(kv.cuda(), cache, slots.cuda())
    assert torch.equal(cache.cpu(), expected)


def special_rows() -> torch.Tensor:
    """Rows that every rule of the quantization touches, bfloat16 (n, 576)."""
    gen = generator(11)
    largest, smallest = torch.finfo(torch.bfloat16).max, 2.0**-133
    rows = [torch.zeros(QK_DIM), -torch.zeros(QK_DIM), torch.full((QK_DIM,), largest), torch.full((QK_DIM,), smallest)]
    for exponent in range(-140, 128, 3):  # absmax from below the smallest scale to the top, subnormals in between
        rows.append(torch.randn(QK_DIM, generator=gen) * 2.0 ** min(exponent, 124))
    for value in (float("nan"), float("inf"), -float("inf")):
        one = torch.randn(QK_DIM, generator=gen)
        one[[0, 130, 300, 511, 512, 575]] = value
        rows += [one, torch.full((QK_DIM,), value)]
    mixed = torch.randn(QK_DIM, generator=gen)
    mixed[QUANT_TILE : 2 * QUANT_TILE] = 0
    mixed[2 * QUANT_TILE] = largest
    rows.append(mixed)
    # ties of the rounding: with absmax 448 the scale is 1, and what lies halfway between two codes is exact in bfloat16
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halfway = (codes[:-1] + codes[1:]) / 2
    ties = torch.zeros(QK_DIM)
    ties[: len(halfway)] = halfway
    ties[127] = FP8_MAX
    rows += [ties, -ties]
    return torch.stack(rows).bfloat16()


def test_special_values_equal_pack():
    kv = special_rows()
    cache = random_cache(4, 64)
    slots = torch.randperm(256, generator=generator(1))[: len(kv)]
    expected = expected_cache(cache, kv, slots)
    mla_fp8_append(kv.cuda(), cache, slots.cuda())
    assert torch.equal(cache.cpu(), expected)


def test_every_bfloat16_bit_pattern():
    """All 65,536, in tiles of equal exponent (so that codes use their range) and in tiles of everything."""
    patterns = torch.arange(65536, dtype=torch.int32).short().view(torch.bfloat16)
    shuffled = patterns[torch.randperm(65536, generator=generator(2))]
    kv = torch.zeros((256, QK_DIM), dtype=torch.bfloat16)
    kv[:128, :NOPE_DIM] = patterns.view(128, NOPE_DIM)
    kv[128:, :NOPE_DIM] = shuffled.view(128, NOPE_DIM)
    kv[:, NOPE_DIM:] = shuffled[: 256 * (QK_DIM - NOPE_DIM)].view(256, -1)
    cache = random_cache(4, 64)
    slots = torch.arange(256)
    mla_fp8_append(kv.cuda(), cache, slots.cuda())
    assert torch.equal(cache.cpu().view(256, -1), pack(kv))


@pytest.mark.parametrize("tokens", [5, 3000, 20_000])
def test_strided_rows_pages_and_views(tokens):
    kv = torch.randn((tokens, QK_DIM), generator=generator(3)).bfloat16()
    page_size = 61
    wide = random_cache(-(-(tokens + 100) // page_size), page_size + 3)
    cache = wide[:, :page_size]
    slots = slots_for(tokens, cache.shape[0] * page_size, seed=4)
    expected = wide.cpu().clone()
    expected[:, :page_size] = expected_cache(cache, kv, slots)
    before = wide.clone()
    spread = torch.empty((2 * tokens,), dtype=torch.int64, device="cuda")[::2]
    spread.copy_(slots)
    for view in (cache, cache.unsqueeze(2), cache.view(torch.float8_e4m3fn)):
        wide.copy_(before)
        mla_fp8_append(strided(kv.cuda()), view, spread)
        assert torch.equal(wide.cpu(), expected)


def test_all_tokens_skipped():
    cache = random_cache(2, 64)
    before = cache.clone()
    mla_fp8_append(
        torch.randn((50, QK_DIM), device="cuda").bfloat16(),
        cache,
        torch.full((50,), -1, device="cuda", dtype=torch.int64),
    )
    assert torch.equal(cache, before)


def test_slots_beyond_4_gib():
    num_pages = (2**32 + 2**28) // (64 * TOKEN_BYTES)
    cache = torch.zeros((num_pages, 64, TOKEN_BYTES), dtype=torch.uint8, device="cuda")
    kv = torch.randn((100, QK_DIM), generator=generator(6)).bfloat16()
    slots = num_pages * 64 - 1 - torch.arange(100)
    mla_fp8_append(kv.cuda(), cache, slots.cuda())
    assert torch.equal(cache.view(-1, TOKEN_BYTES)[-100:].flip(0).cpu(), pack(kv))
    assert not cache.view(-1, TOKEN_BYTES)[:-100].any()


def test_captures_into_a_graph():
    kv = torch.zeros((64, QK_DIM), dtype=torch.bfloat16, device="cuda")
    slots = torch.full((64,), -1, dtype=torch.int64, device="cuda")
    cache = random_cache(4, 64)
    mla_fp8_append(kv, cache, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mla_fp8_append(kv, cache, slots)
    for seed in (1, 2):
        new, where = torch.randn((64, QK_DIM), generator=generator(seed)).bfloat16(), slots_for(64, 256, seed)
        expected = expected_cache(cache, new, where)
        kv.copy_(new)
        slots.copy_(where)
        graph.replay()
        assert torch.equal(cache.cpu(), expected)
