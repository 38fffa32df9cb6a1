"""Formats other than V3.2, bit by bit, against numpy and formulas that share no code with the package."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

import fp8_mla
from cute_kernels import mla_fp8_append, mla_fp8_decode
from fp8_mla.formats import FORMATS, PAIRS, TokenFormat

POISON = 0xFF


def e4m3(code: np.ndarray) -> np.ndarray:
    """Values of e4m3 codes in float64, by the definition of the type: bias 7, three bits of mantissa."""
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    magnitude = np.where(code & 127 == 127, np.nan, magnitude)
    return np.where(code & 128, -magnitude, magnitude)


def e2m1(code: np.ndarray) -> np.ndarray:
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = np.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1.0))
    return np.where(code & 8, -magnitude, magnitude)


def ue8m0(byte: np.ndarray) -> np.ndarray:
    return np.where(byte == 255, np.nan, np.ldexp(1.0, byte - 127))


def assert_same_bits(got: torch.Tensor, expected: np.ndarray) -> None:
    """Requires equal values, signs of zero included; NaN equals NaN."""
    values = got.numpy()
    np.testing.assert_array_equal(np.isnan(values), np.isnan(expected))
    alive = ~np.isnan(expected)
    np.testing.assert_array_equal(values[alive].view(np.int64), expected[alive].astype(np.float64).view(np.int64))


def test_v4_for_all_codes_and_all_scale_bytes() -> None:
    token, element = np.mgrid[0:256, 0:448]
    codes = np.where(element < 256, element, 447 - element)
    scales = (token[:, :7] + 5 * element[:, :7]) % 256
    rope: np.ndarray = (np.arange(256 * 64, dtype=np.uint32) * 509 % 0x7F80).reshape(256, 64)
    packed: np.ndarray = np.zeros((256, 584), dtype=np.uint8)
    packed[:, :448], packed[:, 448:576], packed[:, 576:583] = codes, rope.astype("<u2").view(np.uint8), scales
    packed[:, 583] = POISON
    assert len(set(zip(codes[:, :].ravel(), scales.repeat(64, axis=1).ravel(), strict=True))) == 65536
    expected = np.concatenate(
        [e4m3(codes) * ue8m0(scales).repeat(64, axis=1), (rope.astype(np.uint32) << 16).view(np.float32)], axis=1
    )
    assert_same_bits(fp8_mla.unpack(torch.from_numpy(packed), torch.float64, token_format="v4"), expected)


def test_v4_1_for_all_codes_and_all_scale_bytes() -> None:
    token, element = np.mgrid[0:256, 0:512]
    codes, scales = element % 256, (token[:, :16] + 7 * element[:, :16]) % 256
    packed = np.concatenate([codes, scales], axis=1).astype(np.uint8)
    expected = e4m3(codes) * ue8m0(scales).repeat(32, axis=1)
    assert_same_bits(fp8_mla.unpack(torch.from_numpy(packed), torch.float64, token_format="v4.1"), expected)


def test_v4_1_fp4_for_all_codes_and_all_scale_bytes() -> None:
    token, place = np.mgrid[0:256, 0:256]
    scales = (token[:, :32] + 3 * place[:, :32]) % 256
    packed = np.concatenate([place, scales], axis=1).astype(np.uint8)
    nibbles = np.stack([place & 15, place >> 4], axis=2).reshape(256, 512)  # the even element is in the low half
    expected = e2m1(nibbles) * e4m3(scales).repeat(16, axis=1)
    assert_same_bits(fp8_mla.unpack(torch.from_numpy(packed), torch.float64, token_format="v4.1_fp4"), expected)


@pytest.mark.parametrize("name", ["v4", "v4.1", "v4.1_fp4"])
def test_products_are_exact_in_bfloat16(name: str) -> None:
    """Kernels rely on it for any code with e4m3 scales and with ue8m0 scales of bytes 3 to 246."""
    token_format = FORMATS[name]
    packed = torch.zeros((256, token_format.token_bytes), dtype=torch.uint8)
    packed[:, : token_format.codes.num_bytes] = torch.arange(token_format.codes.num_bytes)
    start = token_format.start(token_format.scales)
    packed[:, start : start + token_format.num_scales] = torch.arange(256)[:, None]
    usable = torch.arange(256) if name == "v4.1_fp4" else torch.arange(3, 247)
    exact = fp8_mla.unpack(packed[usable], torch.float64, token_format=name)
    half = fp8_mla.unpack(packed[usable], token_format=name)
    assert half.double().equal(exact) or torch.equal(half.double().nan_to_num(nan=0.5), exact.nan_to_num(nan=0.5))


# ---- quantizers


def nearest(values: np.ndarray, x: np.ndarray) -> np.ndarray:
    """For each x >= 0 the index of the nearest of ascending values; a tie goes to the even index."""
    distance = np.abs(np.minimum(x, values[-1])[..., None] - values)
    close = distance == distance.min(-1, keepdims=True)
    first = close.argmax(-1)
    return np.where((close.sum(-1) == 2) & (first % 2 == 1), first + 1, first)


def signed(codes: np.ndarray, x: np.ndarray, bit: int) -> np.ndarray:
    return codes | np.where(np.signbit(x), bit, 0)


E4M3_VALUES, E2M1_VALUES = e4m3(np.arange(127)), e2m1(np.arange(8))
BF16_MAX = float(torch.finfo(torch.bfloat16).max)


def power_of_two_rule(tile: np.ndarray) -> tuple[np.ndarray, int]:
    """Codes and scale byte of one tile, by a search for the exponent."""
    finite = np.where(np.isnan(tile), 0, np.where(np.isinf(tile), BF16_MAX, np.abs(tile)))
    absmax = max(float(finite.max()), 1e-4)
    exponent = next(e for e in range(-60, 130) if math.ldexp(448.0, e) >= absmax)
    scaled = np.abs(tile.astype(np.float64)) / 2.0**exponent
    codes = signed(nearest(E4M3_VALUES, np.nan_to_num(scaled, posinf=448)), tile, 0x80)
    return np.where(np.isnan(tile), 0x7F, codes), exponent + 127


def fp4_rule(tile: np.ndarray) -> tuple[np.ndarray, int]:
    if not np.isfinite(tile).all():
        return np.zeros(len(tile), dtype=np.int64), 0x7F
    scale = np.clip(np.abs(tile).max() / np.float32(6), np.float32(2.0**-9), np.float32(448))
    byte = int(nearest(E4M3_VALUES, np.float64(scale)))
    quotient = tile / np.float32(E4M3_VALUES[byte])
    return signed(nearest(E2M1_VALUES, np.abs(quotient).astype(np.float64)), tile, 8), byte


def adversarial_tiles(size: int, count: int) -> torch.Tensor:
    """(count, size) float32: normal data of every size, single values, ties, powers of two, NaN and Inf."""
    generator = torch.Generator().manual_seed(size)
    tiles = torch.randn((count, size), generator=generator) * 2.0 ** (torch.arange(count) % 60 - 30).unsqueeze(1)
    tiles = tiles.bfloat16().float()
    tiles[0] = 0.0
    tiles[1], tiles[1, 3] = 0.0, -0.0
    tiles[2, 1] = math.nan
    tiles[3, 2] = -math.inf
    tiles[4] = torch.tensor([BF16_MAX, -BF16_MAX]).repeat(size // 2)
    tiles[5], tiles[5, 0] = 0.0, 2.0**-133
    for k in range(-24, 24):  # at and above the largest value of a scale
        tiles[8 + 2 * (k + 24), :2] = torch.tensor([448.0 * 2.0**k, 0])
        tiles[9 + 2 * (k + 24), :2] = torch.tensor([450.0 * 2.0**k, 0])
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, -0.25, -5.0, -0.1, 0.24, 0.26, 6.0, 1.0])
    for row in range(110, 118):
        tiles[row] = middles.repeat(size // 16) * 2.0 ** (row - 114)
    return tiles


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["v4", "v4.1", "v4.1_fp4"])
def test_packing_follows_the_rules(name: str, dtype: torch.dtype) -> None:
    token_format = FORMATS[name]
    size, n = token_format.quant_tile, token_format.num_scales
    tiles = adversarial_tiles(size, 32 * n)
    if dtype == torch.float32:
        tiles = tiles * (1 + torch.rand(tiles.shape, generator=torch.Generator().manual_seed(1)) * 2.0**-7)
    kv = torch.zeros((32, 512), dtype=dtype)
    kv[:, : token_format.nope_dim] = tiles.view(32, -1)
    kv[:, token_format.nope_dim :] = torch.arange(32)[:, None]
    packed = fp8_mla.pack(kv, token_format=name).numpy()
    start = token_format.start(token_format.scales)
    rule = fp4_rule if name == "v4.1_fp4" else power_of_two_rule
    for row, token in zip(kv[:, : token_format.nope_dim].float().numpy(), packed, strict=True):
        codes, scales = zip(*(rule(tile) for tile in row.reshape(n, size)), strict=True)
        expected = np.concatenate(codes)
        if name == "v4.1_fp4":
            expected = expected[::2] | expected[1::2] << 4
        assert token[: token_format.codes.num_bytes].tolist() == expected.tolist()
        assert token[start : start + n].tolist() == list(scales)
    rope = kv[:, token_format.nope_dim :].bfloat16().contiguous().view(torch.uint8)
    assert np.array_equal(packed[:, token_format.codes.num_bytes : token_format.row_bytes[0]], rope.numpy())
    assert not packed[:, start + n :].any()


def test_v3_2_without_rope_is_v3_2_without_its_rope_part() -> None:
    kv = torch.randn((40, 576), generator=torch.Generator().manual_seed(3))
    with_rope, without = fp8_mla.pack(kv), fp8_mla.pack(kv[:, :512], token_format="v3.2_nope")
    assert torch.equal(with_rope[:, :528], without)
    assert torch.equal(fp8_mla.unpack(without, token_format="v3.2_nope"), fp8_mla.unpack(with_rope)[:, :512])


# ---- pages

LAYOUTS = [(f, layout) for f in FORMATS.values() for layout in f.cache_layouts]
EACH_LAYOUT = pytest.mark.parametrize(("token_format", "layout"), LAYOUTS, ids=[f"{f.name} {n}" for f, n in LAYOUTS])


def random_tokens(count: int, token_format: TokenFormat, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return fp8_mla.pack(torch.randn((count, token_format.d_qk), generator=generator), token_format=token_format)


def flash_mla_view(pages: int, page_size: int, num_bytes: int, padding: int) -> torch.Tensor:
    """(pages, page_size, 1, bytes) over poisoned memory, with pages padded to a multiple of 16 bytes."""
    size = page_size * num_bytes + padding
    memory = torch.full((pages, size + -size % 16), POISON, dtype=torch.uint8)
    return memory[:, : page_size * num_bytes].view(pages, page_size, 1, num_bytes)


@EACH_LAYOUT
@pytest.mark.parametrize("page_size", [1, 2, 7])
def test_rows_lie_where_the_format_says(token_format: TokenFormat, layout: str, page_size: int) -> None:
    """The bytes in memory must be those that docs/users/formats.md describes."""
    cache = flash_mla_view(4, page_size, token_format.token_bytes, padding=32)
    tokens = random_tokens(2 * page_size, token_format, seed=1)
    slots = torch.randperm(4 * page_size, generator=torch.Generator().manual_seed(2))[: 2 * page_size]
    where: Any = {"token_format": token_format, "cache_layout": layout}
    fp8_mla.write_pages(
        cache, torch.cat([slots, torch.tensor([-1, 4 * page_size])]), tokens.repeat(2, 1)[: len(slots) + 2], **where
    )
    assert torch.equal(fp8_mla.read_pages(cache.view(torch.float8_e4m3fn), slots.int(), **where), tokens)
    memory = torch.full((4, cache.stride(0)), POISON, dtype=torch.uint8)
    for slot, token in zip(slots.tolist(), tokens, strict=True):
        page, offset = divmod(slot, page_size)
        if layout == "interleaved":
            start = offset * token_format.token_bytes
            memory[page, start : start + token_format.token_bytes] = token
        else:
            data, scale = token_format.row_bytes
            memory[page, offset * data : (offset + 1) * data] = token[:data]
            start = page_size * data + offset * scale
            memory[page, start : start + scale] = token[data:]
    assert torch.equal(cache.as_strided(memory.shape, memory.stride()), memory)
    assert not fp8_mla.read_pages(cache, torch.tensor([-5, 2**40]), **where).any()


def test_v3_2_pages_are_read_without_their_rope_part() -> None:
    tokens = random_tokens(12, FORMATS["v3.2"], seed=4)
    cache = tokens.view(4, 3, 656)
    read = fp8_mla.read_pages(cache, torch.arange(12), token_format="v3.2_nope")
    assert torch.equal(read, tokens[:, :528])
    q = torch.randn((1, 1, 2, 512), generator=torch.Generator().manual_seed(5)).bfloat16()
    indices = torch.tensor([[[3, 7, 11]]], dtype=torch.int32)
    got = mla_fp8_decode(q, cache, indices=indices, return_lse=True)
    alone = mla_fp8_decode(
        q, tokens[:, :528].view(4, 3, 528), indices=indices, cache_format="v3.2_nope", return_lse=True
    )
    assert torch.equal(got[0], alone[0]) and torch.equal(got[1], alone[1])


@EACH_LAYOUT
def test_appends_write_what_pack_returns(token_format: TokenFormat, layout: str) -> None:
    cache = flash_mla_view(4, 5, token_format.token_bytes, padding=32)
    expected = cache.as_strided((4, cache.stride(0)), (cache.stride(0), 1)).clone()
    expected = expected.as_strided(cache.shape, cache.stride())
    kv = torch.randn((7, token_format.d_qk), generator=torch.Generator().manual_seed(17)).bfloat16()
    slots = torch.tensor([3, -1, 19, 0, 20, 11, 2**40])
    where: Any = {"token_format": token_format, "cache_layout": layout}
    fp8_mla.write_pages(expected, slots, fp8_mla.pack(kv, token_format=token_format), **where)
    mla_fp8_append(kv, cache.view(torch.float8_e4m3fn), slots, cache_format=token_format.name, cache_layout=layout)
    assert torch.equal(
        cache.as_strided((4, cache.stride(0)), (cache.stride(0), 1)),
        expected.as_strided((4, cache.stride(0)), (cache.stride(0), 1)),
    )
    assert not fp8_mla.read_pages(cache, slots[[1]], **where).any()


def test_an_append_without_rope_leaves_the_rope_bytes_alone() -> None:
    cache = torch.full((2, 4, 656), POISON, dtype=torch.uint8)
    kv = torch.randn((2, 512), generator=torch.Generator().manual_seed(18)).bfloat16()
    mla_fp8_append(kv, cache, torch.tensor([6, 1]))
    tokens = cache.view(8, 656)
    assert torch.equal(tokens[[6, 1], :528], fp8_mla.pack(kv, token_format="v3.2_nope"))
    assert (tokens[:, 528:] == POISON).all() and (tokens[[0, 2, 3, 4, 5, 7]] == POISON).all()


# ---- attention


def by_hand(q: torch.Tensor, keys: torch.Tensor, s_aux: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 attention of (h_q, d) over (n, d) keys, with the sink as a term of the denominator."""
    if not len(keys):
        return torch.zeros((len(q), 512), dtype=torch.float64), torch.full((len(q),), -math.inf, dtype=torch.float64)
    scores = q.double() @ keys.T * keys.shape[1] ** -0.5
    lse = scores.logsumexp(-1)
    with_sink = lse if s_aux is None else torch.logaddexp(lse, s_aux.double())
    return (scores - with_sink[:, None]).exp() @ keys[:, :512], lse


def poisoned_cache(
    token_format: TokenFormat, layout: str, pages: int, page_size: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A cache whose odd slots hold NaN bytes; its good slots, and keys by slot in float64."""
    cache = flash_mla_view(pages, page_size, token_format.token_bytes, padding=16)
    slots = torch.arange(0, pages * page_size, 2)
    tokens = random_tokens(len(slots), token_format, seed)
    fp8_mla.write_pages(cache, slots, tokens, token_format=token_format, cache_layout=layout)
    keys = torch.full((pages * page_size, token_format.d_qk), math.nan, dtype=torch.float64)
    keys[slots] = fp8_mla.unpack(tokens, torch.float64, token_format=token_format)
    return cache, slots, keys


def some_indices(good: torch.Tensor, num_slots: int, topk: int, seed: int) -> torch.Tensor:
    """(2, 3, topk) good slots and slots that do not exist."""
    generator = torch.Generator().manual_seed(seed)
    choices = torch.cat([good, good, torch.tensor([-1, num_slots, -(2**31), 2**31 - 1])])
    return choices[torch.randint(0, len(choices), (2, 3, topk), generator=generator)].int()


def seen_keys(keys: torch.Tensor, indices: torch.Tensor, length: int) -> torch.Tensor:
    return keys[[slot for slot in indices[: max(length, 0)].tolist() if 0 <= slot < len(keys)]]


PAIR_LAYOUTS = [
    (pair, layout)
    for pair in PAIRS
    for layout in FORMATS[pair[0]].cache_layouts
    if layout in FORMATS[pair[1]].cache_layouts
]


@pytest.mark.parametrize("topks", [(6, 9), (0, 4), (5, 0), (0, 0)], ids=str)
@pytest.mark.parametrize(("pair", "layout"), PAIR_LAYOUTS, ids=str)
def test_one_softmax_over_two_caches(pair: tuple[str, str], layout: str, topks: tuple[int, int]) -> None:
    first, second = (FORMATS[name] for name in pair)
    cache, good, keys = poisoned_cache(first, layout, 5, 4, seed=6)
    extra, extra_good, extra_keys = poisoned_cache(second, layout, 9, 3, seed=7)
    indices = some_indices(good, len(keys), topks[0], seed=8)
    extra_indices = some_indices(extra_good, len(extra_keys), topks[1], seed=9)
    q = torch.randn((2, 3, 4, first.d_qk), generator=torch.Generator().manual_seed(10)).bfloat16()
    s_aux = torch.tensor([-math.inf, 0.5, math.inf, -2.0])
    length = torch.tensor([4, 2**31 - 1], dtype=torch.int32)
    extra_length = torch.tensor([[-1, 3, 7], [0, 2, 9]], dtype=torch.int32)
    call: dict[str, Any] = {
        "indices": indices, "topk_length": length, "s_aux": s_aux, "cache_format": pair[0], "cache_layout": layout,
        "extra_kv_cache": extra, "extra_indices": extra_indices, "extra_topk_length": extra_length,
    }  # fmt: skip
    out, lse = fp8_mla.reference_decode(q, cache, **call)
    for row, query in itertools.product(range(2), range(3)):
        both = [
            seen_keys(keys, indices[row, query], int(length[row])),
            seen_keys(extra_keys, extra_indices[row, query], int(extra_length[row, query])),
        ]
        expected, expected_lse = by_hand(q[row, query], torch.cat(both), s_aux)
        torch.testing.assert_close(out[row, query], expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse[row, query], expected_lse, rtol=1e-12, atol=1e-12)
    got, got_lse = mla_fp8_decode(q, cache, **call, return_lse=True)
    assert torch.equal(got, out.bfloat16()) and torch.equal(got_lse, lse.float())
    named = mla_fp8_decode(q, cache, **call, extra_cache_format=pair[1])
    assert torch.equal(named, got)


@EACH_LAYOUT
def test_dense_calls_of_every_format(token_format: TokenFormat, layout: str) -> None:
    tokens = random_tokens(24, token_format, seed=11)
    cache = flash_mla_view(8, 3, token_format.token_bytes, padding=16)
    where: Any = {"token_format": token_format, "cache_layout": layout}
    fp8_mla.write_pages(cache, torch.arange(24), tokens, **where)
    keys = fp8_mla.unpack(tokens, torch.float64, token_format=token_format)
    table = torch.tensor([[5, 0, 7], [2, 99, 1]], dtype=torch.int32)
    lengths = torch.tensor([8, 7], dtype=torch.int32)
    q = torch.randn((2, 1, 3, token_format.d_qk), generator=torch.Generator().manual_seed(12)).bfloat16()
    out, lse = mla_fp8_decode(
        q, cache, block_table=table, cache_seqlens=lengths, cache_format=token_format.name, cache_layout=layout,
        return_lse=True,
    )  # fmt: skip
    for row, slots in enumerate([[15, 16, 17, 0, 1, 2, 21, 22], [6, 7, 8, 3]]):
        expected, expected_lse = by_hand(q[row, 0], keys[slots], None)
        torch.testing.assert_close(out[row, 0].double(), expected, rtol=2**-8, atol=1e-6)
        torch.testing.assert_close(lse[row, 0].double(), expected_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("num_bytes", "columns", "name"),
    [(656, 576, "v3.2"), (656, 512, "v3.2_nope"), (584, 512, "v4"), (288, 512, "v4.1_fp4")],
)
def test_formats_that_bytes_and_queries_say(num_bytes: int, columns: int, name: str) -> None:
    token_format = FORMATS[name]
    cache = flash_mla_view(3, 4, num_bytes, padding=16)
    fp8_mla.write_pages(cache, torch.arange(12), random_tokens(12, token_format, 13), token_format=name)
    q = torch.randn((2, 1, 3, columns), generator=torch.Generator().manual_seed(14)).bfloat16()
    indices = torch.tensor([[[0, 5, 9]], [[1, 11, -1]]], dtype=torch.int32)
    got = mla_fp8_decode(q, cache, indices=indices)
    assert isinstance(got, torch.Tensor) and got.isfinite().all()
    assert torch.equal(got, mla_fp8_decode(q, cache, indices=indices, cache_format=name))


def test_528_bytes_name_both_formats() -> None:
    q, cache = torch.zeros((1, 1, 1, 512), dtype=torch.bfloat16), torch.zeros((1, 1, 528), dtype=torch.uint8)
    message = r"^cache_format: got None for tokens of 528 bytes; needs 'v3.2_nope' or 'v4.1'"
    indices = torch.zeros((1, 1, 1), dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        mla_fp8_decode(q, cache, indices=indices)
    with pytest.raises(ValueError, match=message):
        fp8_mla.reference_decode(q, cache, indices=indices)


@pytest.mark.parametrize("name", ["v4", "v4.1", "v4.1_fp4"])
def test_a_live_nan_reaches_its_queries_alone(name: str) -> None:
    token_format = FORMATS[name]
    cache = flash_mla_view(2, 4, token_format.token_bytes, padding=0)
    tokens = random_tokens(8, token_format, seed=15)
    tokens[3, token_format.start(token_format.scales) + 2] = POISON if name != "v4.1_fp4" else 0x7F
    fp8_mla.write_pages(cache, torch.arange(8), tokens, token_format=name)
    q = torch.randn((1, 3, 2, 512), generator=torch.Generator().manual_seed(16)).bfloat16()
    indices = torch.tensor([[[0, 1, 2], [2, 3, 4], [5, 6, 7]]], dtype=torch.int32)
    out, lse = mla_fp8_decode(q, cache, indices=indices, cache_format=name, return_lse=True)
    assert lse.isnan().all(-1).tolist() == [[False, True, False]] and lse.isnan().any(-1).tolist() == [
        [False, True, False]
    ]
    assert out[:, 1].isnan().any() and out[:, ::2].isfinite().all()
