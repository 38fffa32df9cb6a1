"""Pages of a quantized cache as 16-bit numbers: the reference, the kernel's spec and its arguments."""

import pytest
import torch

from cute_kernels.gqa.gather_op import gather_pages, gather_spec
from cute_kernels.gqa.gather_spec import shipped_specs
from cute_kernels.warm import PromptShape, kernel_specs
from tests.kit.gather_pages import KINDS, expected, gather_cache


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["NHD", "HND", "interleaved"])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_codes_times_scales(kind: str, layout: str, dtype: torch.dtype) -> None:
    """A number that names no page is clamped to the nearest page."""
    cache = gather_cache(kind, layout, 64)
    pages = torch.tensor([4, 0, 0, 2, 9, -3], dtype=torch.int32)
    found = gather_pages(*cache, pages, dtype)
    for copies, exact in zip(found, expected(cache, [4, 0, 0, 2, 4, 0]), strict=True):
        assert copies.shape == (6, 16, 3, 64) and copies.dtype is dtype
        assert torch.equal(copies, exact.to(dtype))


def test_no_page_is_no_copy() -> None:
    cache = gather_cache("int8", "NHD", 64)
    k, v = gather_pages(*cache, torch.zeros(0, dtype=torch.int32), torch.bfloat16)
    assert k.shape == v.shape == (0, 16, 3, 64)


def test_a_warm_start_names_the_kernel_and_merges() -> None:
    shape = {"heads": 32, "head_dim": 128, "dtype": "bfloat16", "kv_dtype": "int8"}
    assert kernel_specs(PromptShape(**shape)) == [gather_spec(torch.int8, torch.bfloat16, 128)]
    merged = kernel_specs(PromptShape(**shape, sink=True, merged=True))
    assert gather_spec(torch.float8_e4m3fn, torch.float16, 256) in shipped_specs()
    assert len(merged) > 1 and {type(spec).__name__ for spec in merged} == {"KvGatherSpec", "MergeSpec"}
