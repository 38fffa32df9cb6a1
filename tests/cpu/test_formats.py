"""`fp8_mla.formats` alone defines the numbers of a format; everything else takes them from there."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

import fp8_mla
from fp8_mla.formats import (
    CACHE_LAYOUTS,
    FORMATS,
    ITEMSIZE,
    PAIRS,
    V3_2,
    V3_2_NOPE,
    V4,
    V4_1,
    V4_1_FP4,
    Field,
    PageLayout,
    TokenFormat,
)
from tests.kit.kernel_place import printed

ROOT = Path(__file__).resolve().parents[2]


# the bytes of the other formats once more: (name, row, offset, end) of each field
OTHERS = {
    V3_2_NOPE: [("codes", 0, 0, 512), ("scales", 0, 512, 528)],
    V4: [("codes", 0, 0, 448), ("rope", 0, 448, 576), ("scales", 1, 0, 7)],
    V4_1: [("codes", 0, 0, 512), ("scales", 1, 0, 16)],
    V4_1_FP4: [("codes", 0, 0, 256), ("scales", 1, 0, 32)],
}
BYTES = {"v3.2": (656,), "v3.2_nope": (528,), "v4": (576, 8), "v4.1": (512, 16), "v4.1_fp4": (256, 32)}


def test_bytes_of_the_other_formats() -> None:
    for token_format, fields in OTHERS.items():
        assert [(field.name, field.row, field.offset, field.end) for field in token_format.fields] == fields
        assert (token_format.d_qk, token_format.d_v) == (512, 512)
    assert {name: token_format.row_bytes for name, token_format in FORMATS.items()} == BYTES
    assert [token_format.quant_tile for token_format in FORMATS.values()] == [128, 128, 64, 32, 16]
    assert all(name == token_format.name for name, token_format in FORMATS.items())
    assert {name for pair in PAIRS for name in pair} == set(FORMATS)


PLANAR, INTERLEAVED = CACHE_LAYOUTS
SEVEN_TOKENS = [
    (V3_2, INTERLEAVED, (656, 512, 656, 7 * 656)),
    (V3_2_NOPE, INTERLEAVED, (528, 512, 528, 7 * 528)),
    (V4, PLANAR, (576, 7 * 576, 8, 7 * 584)),
    (V4_1, PLANAR, (512, 7 * 512, 16, 7 * 528)),
    (V4_1, INTERLEAVED, (528, 512, 528, 7 * 528)),
    (V4_1_FP4, PLANAR, (256, 7 * 256, 32, 7 * 288)),
    (V4_1_FP4, INTERLEAVED, (288, 256, 288, 7 * 288)),
]


def test_where_the_rows_of_a_page_are() -> None:
    for token_format, cache_layout, expected in SEVEN_TOKENS:
        layout = token_format.page_layout(7, cache_layout)
        assert dataclasses.astuple(layout) == (cache_layout, *expected)
        if cache_layout == token_format.cache_layouts[0]:
            assert token_format.page_layout(7) == layout
    assert {(f.name, name) for f in FORMATS.values() for name in f.cache_layouts} == {
        (token_format.name, cache_layout) for token_format, cache_layout, _ in SEVEN_TOKENS
    }
    # the codes and scales of V3.2's tokens, whose rope part nobody reads
    assert V3_2_NOPE.page_layout(7, token_stride=656) == PageLayout(INTERLEAVED, 656, 512, 656, 6 * 656 + 528)


@pytest.mark.parametrize(
    ("token_format", "arguments", "message"),
    [
        (V4, {"cache_layout": INTERLEAVED}, "cache_layout: got 'interleaved'; needs 'planar' for v4"),
        (V3_2, {"cache_layout": PLANAR}, "cache_layout: got 'planar'; needs 'interleaved' for v3.2"),
        (V4_1, {"cache_layout": "rows"}, "cache_layout: got 'rows'; needs 'planar' or 'interleaved' for v4.1"),
        (V4_1, {"page_size": 0}, "page_size: got 0; needs at least 1"),
        (V4_1, {"token_stride": 528}, "token_stride: got 528; needs None"),
    ],
)
def test_page_layouts_that_do_not_exist(token_format: TokenFormat, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        token_format.page_layout(**{"page_size": 64, **arguments})


def test_dtypes_are_those_of_torch() -> None:
    for name, itemsize in ITEMSIZE.items():
        assert getattr(torch, name).itemsize == itemsize


MADE_UP = TokenFormat(
    name="made up",
    d_qk=288,
    d_v=192,
    fields=(
        Field("scales", "float32", 4, 0),
        Field("rope", "bfloat16", 32, 16),
        Field("codes", "float8_e4m3fn", 256, 80),
    ),
    quant_tile=64,
    row_bytes=(352,),
)
"""A format with another order of fields, other counts, a value shorter than the codes, and 16 unused bytes."""


def test_a_made_up_format_packs_and_decodes() -> None:
    """The bytes, decoded by hand, and the functions that take a format must agree."""
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn((6, MADE_UP.d_qk), dtype=torch.float32, generator=generator).bfloat16()
    packed = fp8_mla.pack(kv, token_format=MADE_UP)
    assert packed.shape == (6, 352) and not packed[:, 336:].any()
    scales, rope = packed[:, :16].contiguous().view(torch.float32), packed[:, 16:80].contiguous().view(torch.bfloat16)
    codes = packed[:, 80:336].contiguous().view(torch.float8_e4m3fn)
    assert torch.equal(rope, kv[:, 256:])
    assert torch.equal(scales, kv[:, :256].float().view(6, 4, 64).abs().amax(-1) / 448)
    keys = torch.cat([codes.double() * scales.double().repeat_interleave(64, 1), rope.double()], 1)
    assert torch.equal(fp8_mla.unpack(packed, torch.float64, token_format=MADE_UP), keys)
    q = torch.randn((1, 1, 2, MADE_UP.d_qk), dtype=torch.float64, generator=generator)
    out, lse = fp8_mla.reference_decode(
        q, packed.view(3, 2, 352), indices=torch.tensor([[[4, -1, 0, 6]]]), cache_format=MADE_UP
    )
    scores = q[0, 0] @ keys[[4, 0]].T * MADE_UP.d_qk**-0.5
    torch.testing.assert_close(out[0, 0], scores.softmax(-1) @ keys[[4, 0], : MADE_UP.d_v])
    torch.testing.assert_close(lse[0, 0], scores.logsumexp(-1))


def test_a_made_up_format_of_two_rows() -> None:
    """Scales in a row of their own, planar or interleaved, must give the results of tokens in one row."""
    fields = (
        Field("codes", "float8_e4m3fn", 256, 0),
        Field("rope", "bfloat16", 32, 256),
        Field("scales", "float32", 4, 16, row=1),
    )
    two_rows = dataclasses.replace(MADE_UP, name="two", row_bytes=(320, 40), fields=fields, may_interleave=True)
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn((6, MADE_UP.d_qk), dtype=torch.float32, generator=generator).bfloat16()
    packed, one_row = fp8_mla.pack(kv, token_format=two_rows), fp8_mla.pack(kv, token_format=MADE_UP)
    for start, other, count in ((0, 80, 256), (256, 16, 64), (320 + 16, 0, 16)):
        assert torch.equal(packed[:, start : start + count], one_row[:, other : other + count])
    assert not packed[:, 320:336].any() and not packed[:, 352:].any()
    assert torch.equal(fp8_mla.unpack(packed, token_format=two_rows), fp8_mla.unpack(one_row, token_format=MADE_UP))
    slots, q = torch.tensor([5, 0, 3, 1, 2, 4]), torch.randn((1, 1, 2, MADE_UP.d_qk), generator=generator)
    expected = fp8_mla.reference_decode(
        q, one_row.view(3, 2, 352), indices=torch.tensor([[[4, -1, 0, 6]]]), cache_format=MADE_UP
    )
    for cache_layout in CACHE_LAYOUTS:
        cache = torch.zeros((3, 2, 360), dtype=torch.uint8)
        where = {"token_format": two_rows, "cache_layout": cache_layout}
        fp8_mla.write_pages(cache, slots, packed, **where)
        assert torch.equal(fp8_mla.read_pages(cache, slots, **where), packed)
        got = fp8_mla.reference_decode(
            q, cache, indices=slots[[4, 0]].view(1, 1, 2), cache_format=two_rows, cache_layout=cache_layout
        )
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_all_that_knows_the_format_takes_it_from_there() -> None:
    """With the made-up format in the place of V3.2, every number of the packages is one of the made-up format."""
    code = f"""
import fp8_mla.formats as formats
from fp8_mla.formats import Field, TokenFormat

formats.V3_2 = made = {MADE_UP!r}

import torch, fp8_mla
from cute_kernels import mla_fp8_append, mla_fp8_decode
from cute_kernels.budget import variants
from cute_kernels.runtime import arch

arch.pin()
from cute_kernels.device import token_cache
from cute_kernels.mla import spec
from cute_kernels.mla.kernels import tile

def equal(*numbers):
    assert len(set(numbers)) == 1, numbers

nope, rope, d_qk, d_v, size = 256, 32, 288, 192, 352
equal(size, fp8_mla.TOKEN_BYTES, token_cache.ROW_BYTES, variants.TOKEN_BYTES)
equal(0, fp8_mla.SCALE_OFFSET, token_cache.SCALE_OFFSET)
equal(16, fp8_mla.ROPE_OFFSET, token_cache.ROPE_OFFSET)
equal(nope, fp8_mla.NOPE_DIM, tile.NOPE, variants.NOPE_DIM)
equal(rope, fp8_mla.ROPE_DIM, tile.ROPE, variants.ROPE_DIM)
equal(d_qk, fp8_mla.QK_DIM, tile.QK, variants.QK_DIM)
equal(64, fp8_mla.QUANT_TILE, tile.QUANT_TILE)
equal(80, fp8_mla.CODE_OFFSET)
equal(d_v, fp8_mla.V_DIM)
equal(d_v // 2 + d_v // 64 + 1, spec.PARTIAL_FLOATS)

# the public operators, on a CPU
cache = torch.zeros(2, 4, size, dtype=torch.uint8)
kv = torch.randn(3, d_qk).bfloat16()
mla_fp8_append(kv, cache, torch.tensor([5, 0, 2]))
assert torch.equal(cache.view(8, size)[[5, 0, 2]], fp8_mla.pack(kv, token_format=made))
q = torch.randn(1, 1, 2, d_qk).bfloat16()
out = mla_fp8_decode(q, cache, indices=torch.tensor([[[5, 2]]], dtype=torch.int32))
expected = fp8_mla.reference_decode(q, cache, indices=torch.tensor([[[5, 2]]]), cache_format=made)[0]
assert torch.equal(out, expected.bfloat16()) and out.shape == (1, 1, 2, d_v)
"""
    printed(code)


def test_no_other_file_writes_its_numbers_again() -> None:
    """656 and 528 have no other meaning. 512 and 64 do, so only assignments of them to names count."""
    wrong = []
    for package in ("cute_kernels", "fp8_mla", "bench", "scripts"):
        for file in sorted((ROOT / package).rglob("*.py")):
            if file.name == "formats.py":
                continue
            code = re.sub(r'""".*?"""|#[^\n]*|"[^"\n]*"', "", file.read_text(), flags=re.DOTALL)
            found = re.findall(r"\b(?:656|528)\b|\b(?:NOPE|ROPE|QK|V)(?:_DIM)?\b[^=\n]* = (?:512|576|64)\b", code)
            wrong += [f"{file.relative_to(ROOT)}: {number}" for number in found]
    assert wrong == []


def test_importing_the_formats_loads_no_torch() -> None:
    code = "import sys, fp8_mla.formats; print(sorted({'torch', 'cutlass', 'einops'} & set(sys.modules)))"
    assert printed(code).strip() == "[]"


def test_names_of_the_package_are_what_they_were() -> None:
    code = (
        "import fp8_mla.reference, fp8_mla; print(callable(fp8_mla.pack), sorted(fp8_mla.__all__) == fp8_mla.__all__)"
    )
    assert printed(code).split() == ["True", "True"]
    for name in fp8_mla.__all__:
        assert getattr(fp8_mla, name) is not None and name in dir(fp8_mla)
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        fp8_mla.unknown  # noqa: B018


CODES = Field("codes", "float8_e4m3fn", 512, 0)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"fields": (CODES, Field("scales", "float32", 4, 508), V3_2.fields[2])}, "scales: got offset 508"),
        ({"fields": (CODES, Field("scales", "float32", 4, 514), V3_2.fields[2])}, "scales: got offset 514"),
        ({"row_bytes": (640,)}, "row_bytes: got 640"),
        ({"quant_tile": 64}, "quant_tile: got 4 scales of 64"),
        ({"d_qk": 512}, "d_qk: got 512; needs 576"),
    ],
)
def test_a_format_that_does_not_add_up_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(V3_2, **change)
