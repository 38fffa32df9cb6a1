"""One `CacheLayout` is enough for a plain layout: reference, append, spec and compiled kernel follow from it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_kernels.gqa import append_op
from cute_kernels.gqa.append_op import kv_int8_append
from cute_kernels.gqa.append_spec import KvAppendSpec
from cute_kernels.gqa.launch import decode_spec
from cute_kernels.gqa.layouts import LAYOUTS, CacheLayout, CacheSizes, Which, is_kernel_layout, scale_shapes
from cute_kernels.gqa.op import gqa_decode
from cute_kernels.gqa.request import DECODE
from cute_kernels.runtime.launch import PreparedLaunches
from tests.kit.gqa_cases import SCALE_NAMES, gqa_case
from tests.kit.made_up_layout import SBNH
from tests.kit.mla_cases import generator
from tests.kit.sass import report as report_of

SIZES = CacheSizes(outer=3, rows=8, h_kv=2, d=64)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the layout in its only place."""
    monkeypatch.setitem(LAYOUTS, SBNH.name, SBNH)


def as_bnsh(t: torch.Tensor) -> torch.Tensor:
    """Tensors (s, b, h, ...) or (s, b) in the axis order of BNSH; others stay."""
    if t.dim() < 2:
        return t
    return t.transpose(0, 1) if t.dim() == 2 else t.movedim(0, 2)


def empty_cache(layout: CacheLayout, k_scales: str, v_scales: str) -> dict[str, torch.Tensor]:
    whiches: dict[str, Which] = {"k_cache": "k", "v_cache": "v"}
    cache = {name: torch.zeros(layout.shape(which, SIZES, 1), dtype=torch.int8) for name, which in whiches.items()}
    shapes = scale_shapes(layout, SIZES)
    scales = {"k_scale": SCALE_NAMES[k_scales], "v_scale": SCALE_NAMES[v_scales]}
    return cache | {name: torch.full(shapes[kind], 0.02) for name, kind in scales.items()}


def test_shapes() -> None:
    assert SBNH.shape("k", SIZES, 1) == (8, 3, 2, 64)
    assert scale_shapes(SBNH, SIZES)[SCALE_NAMES["per_group_32"]] == (8, 3, 2, 2)
    assert SBNH.kernel_layout == "rohd" and is_kernel_layout("rohd")
    assert not is_kernel_layout("ohrd") and not is_kernel_layout("rodh") and not is_kernel_layout("SBNH")
    for axes in ("sbdh", "sbh", "tbhd", "sphd"):
        with pytest.raises(ValueError, match="layout 'wrong': got axes"):
            CacheLayout("wrong", axes, axes)


@pytest.mark.parametrize("scales", SCALE_NAMES)
def test_reference_and_append(scales: str) -> None:
    """Reference and append on a CPU must give the results of the same tokens in BNSH."""
    gen = generator(1)
    k, v = torch.randn((2, 24, 2, 64), generator=gen).bfloat16()
    slots = torch.randperm(24, generator=gen)
    q, lengths = torch.randn((3, 2, 4, 64), generator=gen).bfloat16(), torch.tensor([8, 3, 0], dtype=torch.int32)
    results = []
    for layout in (SBNH, LAYOUTS["BNSH"]):
        cache = empty_cache(layout, scales, scales)
        kv_int8_append(k, v, **cache, slot_mapping=slots, layout=layout.name)
        out = gqa_decode(q, **cache, layout=layout.name, cache_seqlens=lengths)
        results.append((cache, out))
    (made_up, out), (usual, usual_out) = results
    assert made_up["k_cache"].any()
    for name, tensor in made_up.items():
        assert torch.equal(as_bnsh(tensor), usual[name])
    assert torch.equal(out, usual_out)


@pytest.mark.parametrize("scales", SCALE_NAMES)
def test_what_the_append_kernel_gets(scales: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The append kernel gets views with the axes of BNSH, at first and at repeated launches."""
    calls: list[tuple[Any, ...]] = []

    def get_kernel(spec: Any) -> Callable[..., None]:
        assert spec.can_implement() == []
        return lambda *arguments: calls.append(arguments)

    monkeypatch.setattr(append_op, "_prepared", PreparedLaunches())
    monkeypatch.setattr(append_op, "require_sm90", lambda name, device: None)
    monkeypatch.setattr(append_op, "get_kernel", get_kernel)
    cache = {name: tensor.to("meta") for name, tensor in empty_cache(SBNH, scales, "per_tensor").items()}
    k = torch.empty((5, 2, 64), dtype=torch.bfloat16, device="meta")
    slots = torch.empty(5, dtype=torch.int64, device="meta")
    for _ in range(2):
        kv_int8_append(k, k, **cache, slot_mapping=slots, layout=SBNH.name)
    assert len(calls) == 2
    for _, _, k_cache, v_cache, k_scale, v_scale, _, heads_first in calls:
        assert heads_first == 0 and v_scale.shape == (1,)
        for got in (k_cache, v_cache):
            assert (got.shape, got.stride()) == ((3, 8, 2, 64), (128, 384, 64, 1))
        assert k_scale.shape == scale_shapes(LAYOUTS["BSNH"], SIZES)[SCALE_NAMES[scales]]


def test_kernels_compile() -> None:
    """Kernels over the layout compile for sm_90a without a GPU and keep to the budgets of every other layout."""
    case = gqa_case(seqlens=[9, 20], h_q=4, h_kv=2, d=64, layout=SBNH.name)
    spec = decode_spec(DECODE.request(**case.arguments(), num_splits=None))
    assert spec.layout == "rohd" and not spec.paged
    append = KvAppendSpec.for_launch(
        dtype="bfloat16", d=64, h_kv=2, k_scale="per_token_head", v_scale="per_token", scale_dtype="float32",
        x_packed=SBNH.x_packed,
    )  # fmt: skip
    for built in (spec, append):
        assert report_of(built).problems(built.expected) == []
