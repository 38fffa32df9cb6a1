"""A plain layout that one `CacheLayout` adds, on a GPU against the oracle; tests/cpu has the rest of the proof."""

import pytest
import torch

from cute_kernels import gqa_decode, kv_int8_append
from cute_kernels.gqa.layouts import LAYOUTS
from cute_kernels.gqa.reference import reference_append
from tests.kit.gqa_cases import SCALE_NAMES, check_gqa, gqa_case
from tests.kit.made_up_layout import SBNH


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the layout, which has no other definition."""
    monkeypatch.setitem(LAYOUTS, SBNH.name, SBNH)


@pytest.mark.parametrize("scales", SCALE_NAMES)
@pytest.mark.parametrize("num_splits", [None, 1, 3])
def test_decode(scales: str, num_splits: int | None) -> None:
    case = gqa_case(
        seqlens=[700, 3, 0, 300], h_q=8, h_kv=2, layout=SBNH.name, k_scales=scales, v_scales=scales,
        device="cuda",
    )  # fmt: skip
    out, lse = case.outputs(padded=True)
    gqa_decode(**case.arguments(), num_splits=num_splits, out=out.tensor, lse=lse.tensor)
    check_gqa(out.tensor, lse.tensor, case).require()
    out.require_no_stray_writes()
    lse.require_no_stray_writes()


@pytest.mark.parametrize("scales", SCALE_NAMES)
def test_append(scales: str) -> None:
    case = gqa_case(seqlens=[70, 3], h_q=8, h_kv=2, layout=SBNH.name, k_scales=scales, v_scales=scales, device="cuda")
    names = ("k_cache", "v_cache", "k_scale", "v_scale")
    gpu = [getattr(case, name).nan_to_num(0.01) if "scale" in name else getattr(case, name) for name in names]
    host = [t.cpu() for t in gpu]
    k, v = torch.randn((2, 33, 2, 128), device="cuda").bfloat16()
    slots = torch.randperm(2 * case.k_cache.shape[0], device="cuda")[:33]
    slots[::7] = -1
    for _ in range(2):
        kv_int8_append(k, v, *gpu, slots, layout=SBNH.name)
    reference_append(k.cpu(), v.cpu(), *host, slots.cpu(), layout=SBNH.name)
    for got, expected in zip(gpu, host, strict=True):
        assert torch.equal(got.cpu(), expected)
