"""One file says how a latent format depends on its codes and scales, and all users of it agree."""

import ast
import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fp8_mla
from cute_kernels.runtime import arch

arch.pin()

from cutlass.cutlass_dsl import CuTeDSL  # noqa: E402

from cute_kernels.mla.kernels import codes  # noqa: E402
from cute_kernels.mla.kernels.convert_q import code_chunk  # noqa: E402
from cute_kernels.mla.kernels.quantize import quantize  # noqa: E402
from cute_kernels.mla.kernels.smem import (  # noqa: E402
    codes_bytes,  # noqa: E402
    key_of_row,
    line_offset,
)
from cute_kernels.mla.spec import LINE_BYTES, TOKENS_PER_TILE, MlaDecodeSpec  # noqa: E402
from cute_kernels.runtime.compile import compile_kernel  # noqa: E402
from fp8_mla import formats  # noqa: E402
from fp8_mla.formats import FORMATS, V3_2, V4, V4_1, V4_1_FP4, Field, TokenFormat  # noqa: E402

MLA = Path(__file__).resolve().parents[2] / "cute_kernels" / "mla"
# the roles of float32 scales, and the rules of all formats in the append
OF_V3_2 = ("append.py", "qk.py", "pv.py", "tile.py", "quantize.py")
FILES = [f for f in sorted((MLA / "kernels").glob("*.py")) if f.name not in OF_V3_2]
OWNERS = ("codes.py",)
FORMAT_CONSTANTS = {name for name, value in vars(formats).items() if isinstance(value, TokenFormat)}
TYPE_WORDS = ("fp4", "e2m1", "e4m3", "e8m0", "float4", "float8")


def mentions(source: str) -> Iterator[str]:
    """Lines of code (no docstrings, no comments) that name a format or a type of codes, or ask for one."""
    tree = ast.parse(source)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        words: list[str] = []
        if isinstance(node, ast.Name):
            words = [node.id]
        elif isinstance(node, (ast.Attribute, ast.arg)):
            words = [node.attr if isinstance(node, ast.Attribute) else node.arg]
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.alias)):
            words = [node.name]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            words = [node.value]
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            asks = [side.attr for side in sides if isinstance(side, ast.Attribute)]
            if {"bits", "quant_tile"}.intersection(asks) and any(isinstance(side, ast.Constant) for side in sides):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        for word in words:
            if word in FORMAT_CONSTANTS or word in FORMATS or any(part in word.lower() for part in TYPE_WORDS):
                yield f"{word}, line {getattr(node, 'lineno', '?')}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_other_file_knows_a_format(file: Path) -> None:
    found = list(mentions(file.read_text(encoding="utf-8")))
    assert bool(found) == (file.name in OWNERS), found


# ---- what a thread reads

READ = pytest.mark.parametrize("kind", [V4, V4_1, V4_1_FP4], ids=lambda kind: kind.name)


def stage_of(kind: TokenFormat, copied: bool = False) -> dict[int, tuple[int, int]]:
    """The (key, code) of each byte of a stage's codes, as QK and PV read them.

    With `copied`, the (key, byte of the row) that `KeyLoader.copy_tile` leaves, which differs if codes expand.
    """
    own, places = codes.of(kind), {}
    size, first = (kind.codes.num_bytes, own.first_line) if copied else (kind.codes.count, 0)
    for key in range(TOKENS_PER_TILE):
        for chunk in range(size // 16):
            line, chunk_of_line = divmod(chunk, LINE_BYTES // 16)
            if (line + 1) * LINE_BYTES > size:
                chunk_of_line = own.rest_chunk(chunk_of_line)
            start = (first + line) * TOKENS_PER_TILE * LINE_BYTES + line_offset(key, chunk_of_line)
            places.update({start + byte: (key, 16 * chunk + byte) for byte in range(16)})
    assert len(places) == TOKENS_PER_TILE * size
    return places


@READ
def test_codes_that_do_not_expand_are_read_where_they_are_copied(kind: TokenFormat) -> None:
    assert (stage_of(kind) == stage_of(kind, copied=True)) == (not codes.of(kind).expands)


@READ
def test_lanes_read_all_codes_of_a_key_in_the_order_of_q(kind: TokenFormat) -> None:
    stage = stage_of(kind)
    for tid in range(128):
        for c in range(kind.codes.count // 64):
            place, line = codes.chunk_place(c, tid)
            for r in range(2):
                start = line + (place ^ (16 * r)) + LINE_BYTES * r
                piece = c // 2 * 8 + code_chunk(tid % 4, c % 2)
                if 128 * (c // 2 + 1) > kind.codes.count:  # half a line: `LatentQConverter.convert_half`
                    piece = c // 2 * 8 + tid % 4
                read = [stage[start + byte] for byte in range(16)]
                assert read == [(key_of_row(tid, r), 16 * piece + byte) for byte in range(16)]


@READ
def test_a_spec_knows_which_codes_expand(kind: TokenFormat) -> None:
    spec = MlaDecodeSpec(sparse=True, cache_format=kind.name)
    assert spec.expands == codes.of(kind).expands
    assert codes_bytes(spec) == TOKENS_PER_TILE * 512


@pytest.mark.parametrize("rows", [16, 8])
def test_a_warp_expands_its_rows_as_they_are_copied(rows: int) -> None:
    own, copied, expanded = codes.E2m1Codes(V4_1_FP4), stage_of(V4_1_FP4, copied=True), stage_of(V4_1_FP4)
    for warp, row in itertools.product(range(TOKENS_PER_TILE // rows), range(rows)):
        read: dict[int, tuple[int, int]] = {}
        written: dict[int, tuple[int, int]] = {}
        banks = []
        for lane in range(32):
            source, target = (
                codes.row_place(p, row % 8) + row // 8 * 8 * LINE_BYTES for p in own.places(rows, 32 * warp + lane)
            )
            read |= {source + byte: (lane, byte) for byte in range(8)}
            written |= {target + byte: (lane, byte) for byte in range(16)}
            banks.append((source % 128 // 8, target % 128 // 16))
        key = rows * warp + row
        assert {place: copied[place] for place in read} == {p: (key, 8 * lane + b) for p, (lane, b) in read.items()}
        assert {p: expanded[p] for p in written} == {p: (key, 16 * lane + b) for p, (lane, b) in written.items()}
        own_row = {place for place, (owner, _) in expanded.items() if owner == key}
        assert len(read) == 256 and set(read) <= own_row == set(written)  # no other row is overwritten
        assert all(len({bank for bank, _ in banks[first : first + 16]}) == 16 for first in (0, 16))
        assert all(len({bank for _, bank in banks[first : first + 8]}) == 8 for first in range(0, 32, 8))


def select_bytes(a: int, b: int, selector: int) -> int:
    """The result of `prmt` for two words."""
    places = [selector >> 4 * i & 15 for i in range(4)]
    assert max(places) < 8, "that copies a sign"
    return sum(((a if place < 4 else b) >> 8 * (place % 4) & 0xFF) << 8 * i for i, place in enumerate(places))


def test_expanded_codes_are_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codes, "Int32", int)
    monkeypatch.setattr(codes.cute.arch, "prmt", lambda a, b, c: select_bytes(a, b, c & 0xFFFF))
    row = torch.randint(0, 256, (64, 288), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    row[:, :256] = (torch.arange(256) + 5 * torch.arange(64)[:, None]).to(torch.uint8)  # each byte in each place
    row[:, 256:] = 0x38  # scales of 1
    words = row[:, :256].numpy().view(np.uint32).ravel().tolist()
    expanded = np.array([codes.expand_word(word) for word in words]).astype(np.uint32).view(np.uint8)
    numbers = torch.from_numpy(expanded.reshape(64, 512)).view(torch.float8_e4m3fn).to(torch.float32)
    expected = fp8_mla.unpack(row, torch.float32, token_format="v4.1_fp4")
    assert torch.equal(numbers.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("exponent", [0, 3, -9])
def test_scales_that_do_not_fit_their_unit_are_seen_in_each_byte_of_a_word(exponent: int) -> None:
    top, limit = 127 + exponent, min(111 + 8 * exponent, 127)
    usable = {kind.name: set(range(top - 20, top + 1)) for kind in (V4, V4_1)}
    usable["v4.1_fp4"] = {byte for byte in range(256) if byte & 0x7F <= limit}
    for kind, place, byte in itertools.product((V4, V4_1, V4_1_FP4), range(4), range(256)):
        own, usual = codes.of(kind), (0x20 if kind is V4_1_FP4 else top - 3) * 0x01010101
        word = usual & ~(0xFF << 8 * place) | byte << 8 * place
        misfits = own.misfits(word, top * 0x01010101, (127 - limit) * 0x01010101)
        assert (misfits & 0xFFFFFFFF == 0) == (byte in usable[kind.name]), (kind.name, byte)


def test_the_largest_fp4_scales_are_in_range_of_float16() -> None:
    assert 6 * 448 * codes.FP4_WEIGHT < 65504 and 0.5 * 2**-9 * codes.FP4_WEIGHT >= 2**-24 * 8
    assert 6 * 2.0 ** (6 + codes.FP4_ROOM + 1) <= 65504  # in V, a scale is at most as large as its unit allows


class NamedScales:
    """Words of a key's scales whose bytes are labelled by their place, instead of registers."""

    def __init__(self, places: list[int]) -> None:
        self.places = places

    def __getitem__(self, index: int) -> int:
        return self.places[index]


def named_multiplier(self: codes.Codes, word: int, offset: int, byte: Any, second: Any = None) -> int | tuple[int, int]:
    """The place of one or two scales among their key's scales."""
    places = [4 * word + int(getattr(one, "value", one)) for one in (byte, second) if one is not None]
    return places[0] if second is None else (places[0], places[1])


@READ
def test_the_multiplier_is_that_of_the_codes(kind: TokenFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    own = codes.of(kind)
    monkeypatch.setattr(type(own), "multiplier", named_multiplier)
    factors = codes.RowFactors(0, 1.0, 0, 1)
    for lane in range(4):
        words = [2 * j + lane // 2 for j in range(4)] if kind is V4_1_FP4 else list(range(-(-kind.num_scales // 4)))
        for c in range(kind.codes.count // 64):
            piece = c // 2 * 8 + code_chunk(lane, c % 2)
            if 128 * (c // 2 + 1) > kind.codes.count:
                piece = c // 2 * 8 + lane
            assert own.chunk_multiplier(NamedScales(words), factors, c, lane) == piece * 16 // kind.quant_tile
            if c % 2 == 0 and c + 1 < kind.codes.count // 64:
                two = [own.chunk_multiplier(NamedScales(words), factors, c + i, lane) for i in range(2)]
                assert own.chunk_multipliers(NamedScales(words), factors, c, lane) == tuple(two)
            assert own.scale_index(c, lane) == piece * 16 // kind.quant_tile


def test_padding_is_masked() -> None:
    masks = {kind.name: [codes.of(kind).scale_mask(i) for i in range(2)] for kind in (V4, V4_1, V4_1_FP4)}
    assert masks == {"v4": [-1, 0x00FFFFFF], "v4.1": [-1, -1], "v4.1_fp4": [-1, -1]}


# ---- formats that it reads, and others


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_tile": 128, "scales": ("float8_e8m0fnu", 4)}, "quant_tile: got 128 of made up; needs one of (32, 64)"),
        (
            {"quant_tile": 64, "scales": ("float8_e4m3fn", 8)},
            "got ('float8_e4m3fn', 'float8_e4m3fn') of made up",
        ),
        ({"quant_tile": 16, "codes": ("float4_e2m1fn_x2", 384), "scales": ("float8_e4m3fn", 24)}, "192 bytes of codes"),
        ({"quant_tile": 32, "codes": ("float8_e4m3fn", 480), "scales": ("float8_e8m0fnu", 15)}, "480 bytes of codes"),
    ],
)
def test_formats_that_it_does_not_read(changes: dict[str, Any], message: str) -> None:
    dtype, count = changes.get("codes", ("float8_e4m3fn", 512))
    made_up = made_up_format(changes["quant_tile"], Field("codes", dtype, count, 0), *changes["scales"])
    with pytest.raises(ValueError) as raised:
        codes.of(made_up)
    assert message in str(raised.value)


def made_up_format(quant_tile: int, codes_field: Field, scale_dtype: str, scale_count: int) -> TokenFormat:
    return TokenFormat(
        name="made up",
        d_qk=codes_field.count,
        d_v=codes_field.count,
        fields=(codes_field, Field("scales", scale_dtype, scale_count, 0, row=1)),
        quant_tile=quant_tile,
        row_bytes=(512, 32),
    )


def test_expanded_rows_have_no_rope_part() -> None:
    rope = Field("rope", "bfloat16", 64, 256)
    made_up = dataclasses.replace(
        V4_1_FP4, name="made up", d_qk=576, fields=(*V4_1_FP4.fields, rope), row_bytes=(384, 32)
    )
    with pytest.raises(ValueError, match="rope: got a rope part of made up; needs none: its rows are expanded"):
        codes.of(made_up)


def test_an_incomplete_line_has_a_place_only_where_there_may_be_one() -> None:
    assert [codes.of(V4).rest_chunk(chunk) for chunk in range(4)] == [0, 1, 4, 5]
    with pytest.raises(ValueError, match="codes: got an incomplete line of v4.1_fp4"):
        codes.of(V4_1_FP4).rest_chunk(0)


def test_every_format_has_codes() -> None:
    assert {type(codes.of(kind)) for kind in FORMATS.values()} == set(codes.TYPES.values())
    assert type(codes.of(V3_2)) is codes.FloatScales


class PowerOfTwoFp4(codes.E2m1Codes):
    """e2m1 codes with ue8m0 scales, as a new type would declare them."""

    room, least_unit = codes.E4m3Codes.room, codes.E4m3Codes.least_unit
    row_factors = codes.E4m3Codes.row_factors
    multiplier = codes.E4m3Codes.multiplier
    scale_of = codes.E4m3Codes.scale_of
    exponent = codes.E4m3Codes.exponent
    misfits = codes.E4m3Codes.misfits
    fitted = codes.E4m3Codes.fitted
    value_weights = codes.E4m3Codes.value_weights


@pytest.mark.parametrize(
    ("made_up", "own"),
    [
        (made_up_format(64, Field("codes", "float8_e4m3fn", 512, 0), "float8_e8m0fnu", 8), codes.E4m3Codes),
        (made_up_format(16, Field("codes", "float4_e2m1fn_x2", 512, 0), "float8_e8m0fnu", 32), PowerOfTwoFp4),
    ],
    ids=["types that there are", "a new type"],
)
def test_a_made_up_format_is_traced(
    made_up: TokenFormat, own: type[codes.Codes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel for it needs a line in `FORMATS`, and a class if its codes or scales are new."""
    made_up = dataclasses.replace(made_up, row_bytes=(made_up.codes.num_bytes, made_up.num_scales))
    monkeypatch.setitem(FORMATS, made_up.name, made_up)
    monkeypatch.setitem(codes.TYPES, (made_up.codes.dtype, made_up.scales.dtype), own)
    spec = MlaDecodeSpec(sparse=True, cache_format=made_up.name)
    assert spec.can_implement() == []
    assert type(codes.of(made_up)) is own
    traced = []

    def stop(owner: object, module: object, name: str) -> None:
        traced.append(name)
        raise InterruptedError("traced")

    with pytest.raises(Exception, match="traced"), CuTeDSL._get_dsl().trace_finalize_hooks(stop):  # noqa: B017
        compile_kernel(spec)
    assert traced


def test_the_append_refuses_types_without_a_rule() -> None:
    made_up = made_up_format(16, Field("codes", "float4_e2m1fn_x2", 512, 0), "float8_e8m0fnu", 32)
    with pytest.raises(ValueError, match="codes and scales: got .* of made up; needs types that have a rule"):
        quantize(made_up, None)
