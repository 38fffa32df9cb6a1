"""A format is said once: `fp8_mla.formats` has the numbers, and all else takes them from there."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fp8_mla
from fp8_mla.formats import FORMATS, ITEMSIZE, V3_2, Field, TokenFormat

ROOT = Path(__file__).resolve().parents[2]


def test_the_656_bytes() -> None:
    assert FORMATS == {"v3.2": V3_2}
    assert [(field.name, field.offset, field.end) for field in V3_2.fields] == [
        ("codes", 0, 512),
        ("scales", 512, 528),
        ("rope", 528, 656),
    ]
    assert (V3_2.nope_dim, V3_2.rope_dim, V3_2.num_scales, V3_2.token_bytes) == (512, 64, 4, 656)


def test_dtypes_are_those_of_torch() -> None:
    for name, itemsize in ITEMSIZE.items():
        assert getattr(torch, name).itemsize == itemsize


def test_bytes_of_a_packed_token_lie_where_the_format_says() -> None:
    """Each field, read off the bytes by the format alone, is what `unpack` makes of them."""
    kv = torch.randn((5, V3_2.d_qk), dtype=torch.float32, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = fp8_mla.pack(kv)
    read = {
        field.name: packed[:, field.offset : field.end].contiguous().view(getattr(torch, field.dtype))
        for field in V3_2.fields
    }
    assert torch.equal(read["rope"], kv[:, V3_2.nope_dim :])
    scales = read["scales"].repeat_interleave(V3_2.quant_tile, dim=1)
    expected = torch.cat([read["codes"].float() * scales, read["rope"].float()], dim=1)
    assert torch.equal(fp8_mla.unpack(packed, torch.float32), expected)


def test_all_that_knows_the_format_takes_it_from_there() -> None:
    from cute_kernels.budget import variants
    from cute_kernels.runtime import arch

    arch.pin()
    from cute_kernels.device import token_cache
    from cute_kernels.mla import spec
    from cute_kernels.mla.crossover.kernels import load
    from cute_kernels.mla.kernels import append
    from scripts.bench.units import spec as units

    rope = V3_2.field("rope")
    assert (fp8_mla.NOPE_DIM, fp8_mla.ROPE_DIM, fp8_mla.QK_DIM, fp8_mla.V_DIM) == (
        V3_2.nope_dim, V3_2.rope_dim, V3_2.d_qk, V3_2.d_v
    )  # fmt: skip
    assert (fp8_mla.SCALE_OFFSET, fp8_mla.ROPE_OFFSET, fp8_mla.TOKEN_BYTES) == (
        V3_2.scales.offset, rope.offset, V3_2.token_bytes
    )  # fmt: skip
    assert (token_cache.SCALE_OFFSET, token_cache.ROPE_OFFSET, token_cache.ROW_BYTES) == (
        V3_2.scales.offset, rope.offset, V3_2.token_bytes
    )  # fmt: skip
    assert (append.SCALE_OFFSET, append.ROPE_OFFSET, append.TOKEN_BYTES) == (
        V3_2.scales.offset, rope.offset, V3_2.token_bytes
    )  # fmt: skip
    assert (load.NOPE, load.ROPE, load.GROUP) == (
        V3_2.nope_dim, V3_2.rope_dim, V3_2.quant_tile
    )  # fmt: skip
    assert spec.PARTIAL_FLOATS == V3_2.d_v // 2 + V3_2.d_v // 64 + 1
    assert variants.TOKEN_BYTES == units.ROW_BYTES == V3_2.token_bytes


def test_no_other_file_writes_its_numbers_again() -> None:
    """656 and 528 mean nothing else; 512 and 64 mean other things as well, so only assignments to names count."""
    wrong = []
    for package in ("cute_kernels", "fp8_mla", "scripts"):
        for file in sorted((ROOT / package).rglob("*.py")):
            if file.name == "formats.py":
                continue
            code = re.sub(r'""".*?"""|#[^\n]*|"[^"\n]*"', "", file.read_text(), flags=re.DOTALL)
            found = re.findall(r"\b(?:656|528)\b|\b(?:NOPE|ROPE|QK|V)(?:_DIM)?\b[^=\n]* = (?:512|576|64)\b", code)
            wrong += [f"{file.relative_to(ROOT)}: {number}" for number in found]
    assert wrong == []


def test_importing_the_formats_loads_no_torch() -> None:
    code = "import sys, fp8_mla.formats; print(sorted({'torch', 'cutlass', 'einops'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_names_of_the_package_are_what_they_were() -> None:
    code = (
        "import fp8_mla.reference, fp8_mla; print(callable(fp8_mla.pack), sorted(fp8_mla.__all__) == fp8_mla.__all__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "True"], done.stderr
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


def test_a_format_may_have_rows_of_two_kinds() -> None:
    """Data rows, then scale rows: offsets count within each."""
    made = TokenFormat(
        name="planar",
        d_qk=512,
        d_v=512,
        fields=(
            Field("codes", "float8_e4m3fn", 448, 0),
            Field("rope", "bfloat16", 64, 448),
            Field("scales", "float8_e4m3fn", 7, 0, row=1),
        ),
        quant_tile=64,
        row_bytes=(576, 8),
    )
    assert made.token_bytes == 584 and made.num_scales == 7
