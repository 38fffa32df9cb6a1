"""Packing obeys the quantization rule, by a second implementation, and a round trip keeps every bit."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fp8_mla

F32_MAX = float(np.finfo(np.float32).max)
BF16_MAX = float(torch.finfo(torch.bfloat16).max)


def e4m3_value(code: int) -> float:
    """The value of a finite e4m3 code, from the type's definition: 4 exponent bits with bias 7, 3 mantissa bits."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 0x7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


FINITE_CODES = [code for code in range(256) if code & 0x7F != 0x7F]
E4M3 = np.array([e4m3_value(code) if code in FINITE_CODES else np.nan for code in range(256)])
POSITIVE = E4M3[:0x7F]


def nearest_code(value: float) -> int:
    """The e4m3 code nearest to a finite value by exhaustive search: ties to the even code, saturating."""
    if np.isnan(value):
        return 0x7F
    distance = np.abs(POSITIVE - min(abs(value), 448.0))  # exact in float64 if it decides: both are short
    nearest = np.flatnonzero(distance == distance.min())
    code = int(nearest[nearest % 2 == 0][0]) if len(nearest) == 2 else int(nearest[0])
    return code | (0x80 if np.signbit(value) else 0)


def packed_by_the_rule(row: np.ndarray) -> tuple[list[int], list[np.float32]]:
    """The rule of docs/users/formats.md for 512 float32 values, one value at a time."""
    codes, scales = [], []
    with np.errstate(all="ignore"):
        for tile in row.reshape(4, 128):
            magnitudes = [np.float32(BF16_MAX) if np.isinf(x) else abs(x) for x in tile if not np.isnan(x)]
            absmax = max(magnitudes, default=np.float32(0))
            scale = np.float32(1) if absmax == 0 else max(absmax / np.float32(448), np.float32(2.0**-126))
            inverse = np.float32(1) / scale
            scales.append(scale)
            codes += [nearest_code(x * inverse) for x in tile]
    return codes, scales


def check_rule(kv: torch.Tensor) -> None:
    """Requires that every row of (tokens, 576) is packed as the rule says."""
    packed = fp8_mla.pack(kv)
    for row, token in zip(kv[:, :512].float().numpy(), packed.numpy(), strict=True):
        codes, scales = packed_by_the_rule(row)
        assert token[:512].tolist() == codes
        assert token[512:528].view("<f4").tolist() == scales


def tokens_with_all_codes(scales: list[float]) -> torch.Tensor:
    """One token per scale: the 254 finite codes in tiles 0 and 1, and again in 2 and 3 with twice the scale.

    Every tile has the code 448 or -448, because `pack` chooses its scale only then.
    """
    negative = [code for code in FINITE_CODES if code & 0x80]
    positive = [code for code in FINITE_CODES if not code & 0x80]
    codes = torch.tensor([*positive, 0xFE, *reversed(negative), 0x7E] * 2, dtype=torch.uint8)
    tokens = torch.empty(len(scales), 656, dtype=torch.uint8)
    tokens[:, :512] = codes
    column = torch.tensor(scales, dtype=torch.float32).unsqueeze(1)
    tokens[:, 512:528] = torch.cat([column, column, 2 * column, 2 * column], dim=1).view(torch.uint8)
    rope = torch.arange(len(scales) * 64, dtype=torch.int32).view(-1, 64) * 509 % 0x7F80  # non-negative finite bfloat16
    tokens[:, 528:] = rope.to(torch.int16).view(torch.uint8)
    return tokens


@pytest.mark.parametrize(
    ("dtype", "exponents"),
    [
        # scales s from the smallest whose 2**-9 s is in the range of the type to the largest whose 448 s is
        (torch.bfloat16, range(-124, 119)),
        (torch.float32, range(-126, 119)),
    ],
)
def test_round_trip_of_all_codes_at_every_power_of_two(dtype, exponents):
    tokens = tokens_with_all_codes([2.0**e for e in exponents])
    assert torch.equal(fp8_mla.pack(fp8_mla.unpack(tokens, dtype)), tokens)


@settings(max_examples=60, deadline=None)
@given(st.integers(2**19, 2**20 - 1), st.integers(-140, 98))
def test_round_trip_at_any_scale_whose_products_are_exact(mantissa, exponent):
    # 4 bits of code times 20 bits of scale fit into the 24 bits of float32
    tokens = tokens_with_all_codes([mantissa * 2.0**exponent])
    assert torch.equal(fp8_mla.pack(fp8_mla.unpack(tokens, torch.float32)), tokens)


@settings(max_examples=60, deadline=None)
@given(st.integers(8, 15), st.integers(-124, 114))
def test_round_trip_through_bfloat16_at_any_scale_whose_products_are_exact(mantissa, exponent):
    tokens = tokens_with_all_codes([mantissa * 2.0**exponent])
    assert torch.equal(fp8_mla.pack(fp8_mla.unpack(tokens, torch.bfloat16)), tokens)


def test_every_bfloat16_survives_in_the_rope_part():
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(-1, 64)
    kv = torch.zeros(len(patterns), 576, dtype=torch.bfloat16)
    kv[:, 512:] = patterns.view(torch.bfloat16)
    packed = fp8_mla.pack(kv)
    assert torch.equal(packed[:, 528:].contiguous().view(torch.int16), patterns)
    assert torch.equal(fp8_mla.unpack(packed)[:, 512:].contiguous().view(torch.int16), patterns)


def test_float32_rope_is_rounded_to_nearest_even():
    kv = torch.zeros(1, 576)
    kv[0, 512:516] = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, 3.4e38])
    rope = fp8_mla.unpack(fp8_mla.pack(kv), torch.float32)[0, 512:516]
    assert rope.tolist() == [1.0, 1 + 2.0**-6, 1 + 2.0**-7, float("inf")]


def test_rounding_at_and_beside_every_midpoint():
    middles = (POSITIVE[1:] + POSITIVE[:-1]) / 2
    values = np.concatenate([middles, np.nextafter(middles.astype(np.float32), np.float32(0)), POSITIVE]).astype(
        np.float32
    )
    values = np.concatenate([values, np.nextafter(middles.astype(np.float32), np.float32(448))])
    values = np.concatenate([values, -values])
    kv = torch.zeros(-(-len(values) // 508), 4, 128)
    kv[..., 0] = 448.0  # holds the scale at 1
    flat = torch.zeros(kv.shape[0] * 508)
    flat[: len(values)] = torch.from_numpy(values)
    kv[..., 1:] = flat.view(-1, 4, 127)
    kv = torch.cat([kv.flatten(1), torch.zeros(len(kv), 64)], dim=1)
    packed = fp8_mla.pack(kv)
    assert torch.equal(packed[:, 512:528].contiguous().view(torch.float32), torch.ones(len(kv), 4))
    check_rule(kv)


FLOAT32 = st.floats(width=32, allow_nan=True, allow_infinity=True)
LIKE_SIZED = st.builds(lambda x, e: x * 2.0**e, st.floats(-1, 1, width=32), st.integers(-12, 0))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_rule_on_any_float32(data):
    tile = data.draw(st.lists(st.one_of(FLOAT32, LIKE_SIZED), min_size=1, max_size=24))
    shift = data.draw(st.integers(0, 511))
    row = (tile * (576 // len(tile) + 1))[:576]
    check_rule(torch.tensor(row, dtype=torch.float32).roll(shift).unsqueeze(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("exponent", [-149, -133, -127, -118, -117, -60, -1, 0, 40, 118])
def test_rule_on_normal_data_of_any_size(dtype, exponent):
    generator = torch.Generator().manual_seed(exponent + 1000)
    kv = torch.randn(6, 576, generator=generator, dtype=torch.float64) * 2.0**exponent
    kv[:, 130] *= 64  # an outlier channel
    check_rule(kv.clamp(-BF16_MAX, BF16_MAX).to(dtype))


def test_rule_for_every_bfloat16_magnitude_as_the_maximum():
    # division, not multiplication by 1/448: they differ in the last bit for more than half of these scales
    magnitudes = torch.arange(1, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    magnitudes = torch.cat([magnitudes, magnitudes[: -len(magnitudes) % 4]])
    kv = torch.zeros(len(magnitudes) // 4, 576, dtype=torch.bfloat16)
    kv[:, :512].view(-1, 4, 128)[:, :, 77] = magnitudes.view(-1, 4)
    scales = fp8_mla.pack(kv)[:, 512:528].contiguous().view(torch.float32).flatten().numpy()
    expected = np.maximum(magnitudes.float().numpy() / np.float32(448), np.float32(2.0**-126))
    np.testing.assert_array_equal(scales, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rule_on_zeros_and_subnormal_numbers(dtype):
    """A tile of zeros has scale 1 and keeps signs; one of subnormal numbers gets the smallest normal scale."""
    kv = torch.zeros(2, 576, dtype=dtype)
    kv[0, 1], kv[1, 0] = -0.0, 2.0**-133 if dtype == torch.bfloat16 else 2.0**-149
    kv[1, 128], kv[1, 256] = 2.0**-126, -(2.0**-132)
    check_rule(kv)
    assert torch.equal(fp8_mla.unpack(fp8_mla.pack(kv[0]), dtype).signbit(), kv[0].signbit())


def test_nan_and_inf_do_not_spoil_their_tile():
    nan, inf = float("nan"), float("inf")
    kv = torch.zeros(1, 576)
    kv[0, :4] = torch.tensor([nan, -nan, 448.0, -3.0])
    kv[0, 128:132] = torch.tensor([inf, -inf, nan, 1e38])
    kv[0, 256:384] = nan
    kv[0, 384:387] = torch.tensor([F32_MAX, -inf, -F32_MAX])
    kv[0, 1] = torch.tensor(nan).copysign(torch.tensor(-1.0))
    token = fp8_mla.pack(kv)[0]
    scales = token[512:528].view(torch.float32).numpy()
    assert scales.tolist() == [1.0, np.float32(BF16_MAX) / np.float32(448), 1.0, np.float32(F32_MAX) / np.float32(448)]
    assert token[:4].tolist() == [0x7F, 0x7F, 0x7E, nearest_code(-3.0)]
    assert token[128:131].tolist() == [0x7E, 0xFE, 0x7F]
    assert token[256:384].tolist() == [0x7F] * 128
    assert token[384:387].tolist() == [0x7E, 0xFE, 0xFE]
    check_rule(kv)
    unpacked = fp8_mla.unpack(token, torch.float32)
    assert torch.equal(unpacked[:576].isnan(), kv[0].isnan())
    assert unpacked[128].item() == pytest.approx(BF16_MAX, rel=1e-6)
    assert unpacked[129].item() == pytest.approx(-BF16_MAX, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.floats(2.0**-149, F32_MAX, width=32), st.lists(st.integers(0, 255), min_size=1, max_size=8))
def test_unpack_honours_any_positive_finite_scale(scale, codes):
    token = torch.zeros(656, dtype=torch.uint8)
    token[384 : 384 + len(codes)] = torch.tensor(codes, dtype=torch.uint8)
    token[512:528] = torch.tensor([1.0, 2.0, 3.0, scale]).view(torch.uint8)
    exact = fp8_mla.unpack(token, torch.float64)[384 : 384 + len(codes)]
    single = fp8_mla.unpack(token, torch.float32)[384 : 384 + len(codes)]
    half = fp8_mla.unpack(token)[384 : 384 + len(codes)]
    for code, wide, mid, narrow in zip(codes, exact.tolist(), single.tolist(), half, strict=True):
        if code & 0x7F == 0x7F:
            assert all(np.isnan(x) for x in (wide, mid, narrow.item()))
            continue
        assert Fraction(wide) == Fraction(e4m3_value(code)) * Fraction(scale)
        with np.errstate(over="ignore"):
            product = np.float32(wide)  # one rounding of the exact product
        assert mid == product
        assert torch.equal(narrow, torch.tensor(product.item()).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pack_takes_any_strides_and_leading_dimensions(dtype):
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(3, 600, 5, generator=generator).to(dtype)
    kv = wide[:, 7:583].transpose(1, 2)
    before = wide.clone()
    packed = fp8_mla.pack(kv)
    assert packed.shape == (3, 5, 656) and packed.is_contiguous()
    assert torch.equal(packed, fp8_mla.pack(kv.contiguous()))
    assert torch.equal(packed[1, 2], fp8_mla.pack(kv[1, 2]))
    assert torch.equal(wide, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_unpack_takes_any_strides_and_offsets(dtype):
    generator = torch.Generator().manual_seed(2)
    packed = fp8_mla.pack(torch.randn(4, 3, 576, generator=generator))
    expected = fp8_mla.unpack(packed, dtype)
    assert expected.shape == (4, 3, 576) and expected.dtype == dtype and expected.is_contiguous()
    shifted = torch.zeros(4, 3, 701, dtype=torch.uint8)
    shifted[..., 3:659] = packed  # odd strides and an odd offset, so that no field is aligned
    assert torch.equal(fp8_mla.unpack(shifted[..., 3:659], dtype), expected)
    apart = torch.zeros(4, 3, 656, 2, dtype=torch.uint8)
    apart[..., 0] = packed
    assert torch.equal(fp8_mla.unpack(apart[..., 0], dtype), expected)
    assert torch.equal(fp8_mla.unpack(packed.view(torch.float8_e4m3fn), dtype), expected)
    assert torch.equal(fp8_mla.unpack(packed[2, 1], dtype), expected[2, 1])


def test_nothing_to_pack():
    packed = fp8_mla.pack(torch.zeros(0, 576, dtype=torch.bfloat16))
    assert packed.shape == (0, 656)
    assert fp8_mla.unpack(packed).shape == (0, 576)


def test_pack_leaves_the_graph():
    kv = torch.randn(2, 576, requires_grad=True)
    assert not fp8_mla.pack(kv).requires_grad


@pytest.mark.parametrize(
    ("kv", "error"),
    [
        (torch.zeros(2, 576, dtype=torch.float16), TypeError),
        (torch.zeros(2, 576, dtype=torch.float64), TypeError),
        ([0.0] * 576, TypeError),
        (torch.zeros(2, 575), ValueError),
        (torch.zeros(576, 2), ValueError),
        (torch.tensor(1.0), ValueError),
    ],
)
def test_pack_refuses(kv, error):
    with pytest.raises(error, match=r"^kv: got .*; needs "):
        fp8_mla.pack(kv)


def test_unpack_refuses():
    with pytest.raises(TypeError, match=r"^cache: got .*bfloat16.*; needs "):
        fp8_mla.unpack(torch.zeros(2, 656, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"^cache: got \(2, 576\).*; needs 656"):
        fp8_mla.unpack(torch.zeros(2, 576, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"^dtype: got torch.float16; needs "):
        fp8_mla.unpack(torch.zeros(2, 656, dtype=torch.uint8), torch.float16)
