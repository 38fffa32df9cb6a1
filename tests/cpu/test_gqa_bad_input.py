"""Bad layouts and dtypes in calls of `gqa_decode`; tests/kit/bad_input_gqa.py has all other bad input.

Outputs of every call are full of NaN before it and must still be after it.
"""

from typing import Any

import pytest
import torch

from cute_kernels import gqa_decode
from cute_kernels.gqa.layouts import LAYOUTS
from tests.kit import bad_input_gqa
from tests.kit.bad_input import ERROR
from tests.kit.bad_tensors import FP8


def call(layout: str = "BNSH", dtype: torch.dtype = torch.int8) -> dict[str, Any]:
    return bad_input_gqa.gqa_call("cpu", layout, dtype)


def cache(layout: str, which: str = "k", dtype: torch.dtype = torch.int8, **sizes: int) -> torch.Tensor:
    return bad_input_gqa.cache("cpu", layout, which, dtype, **sizes)


def require_error(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises((TypeError, ValueError), match=ERROR.format(name)):
        gqa_decode(**arguments)
    for buffer in ("out", "lse"):
        assert arguments[buffer].isnan().all(), "an output was written before the arguments were checked"


@pytest.mark.parametrize("dtype", [torch.int8, FP8, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_calls_that_the_others_break_are_right(layout, dtype):
    arguments = call(layout, dtype)
    gqa_decode(**arguments)
    assert arguments["out"].isfinite().all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_of_another_cache(layout):
    """The cache has another rank, or its sizes fit another number of sequences or scales."""
    for other in LAYOUTS:
        if other == layout or (LAYOUTS[other].paged, LAYOUTS[layout].paged) == (True, False):
            continue
        with pytest.raises((TypeError, ValueError), match=r"^(q|k_cache|v_cache|k_scale|block_table): got .+"):
            gqa_decode(**{**call(layout), "layout": other})


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_of_caches_that_have_none_or_both(name, dtype):
    """An FP8 cache gets only one of two scales, a 16-bit cache gets any."""
    missing = {"k_scale": "v_scale", "v_scale": "k_scale"}[name] if dtype is FP8 else name
    require_error({**call(dtype=dtype), name: torch.ones(1)}, missing)


def test_16_bit_caches_have_the_dtype_of_q():
    half = call(dtype=torch.float16)
    require_error(half, "k_cache")
    require_error({**call(dtype=torch.bfloat16), "v_cache": half["v_cache"]}, "v_cache")
