"""The docstring of the GQA decode kernel shows the barriers that its initialization reads."""

import pytest

pytest.importorskip("cutlass")

from cute_kernels.device.barriers import table
from cute_kernels.gqa.kernels import decode
from cute_kernels.gqa.kernels.barriers import barriers
from cute_kernels.gqa.spec import GqaDecodeSpec

SPECS = {
    "int8, d 128, scales of tokens": GqaDecodeSpec("bfloat16", "int8", 128, 8, k_scales="token", v_scales="token"),
    "bfloat16, d 128": GqaDecodeSpec("bfloat16", "bfloat16", 128, 8),
}


@pytest.mark.parametrize("title", SPECS)
def test_docstring_shows_the_barriers(title):
    assert decode.__doc__ is not None
    assert f"{title}\n{table(barriers(SPECS[title]))}\n" in decode.__doc__
