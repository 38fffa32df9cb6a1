"""Shapes of caches and scales: their meaning, and the error for a wrong shape."""

import itertools
from typing import get_args

import pytest

from cute_kernels.gqa.layouts import (
    GROUP_SIZES,
    HEAD_DIMS,
    LAYOUTS,
    CacheSizes,
    ScaleKind,
    Which,
    cache_sizes,
    scale_kind,
    scale_shapes,
)

# outer 5, rows 16, h_kv 3, d 128: k_cache (int8), v_cache, scales per token, per token and head, per group of 32
SHAPES = {
    "BNSH": ((5, 3, 16, 128), (5, 3, 16, 128), (5, 16), (5, 3, 16), (5, 3, 16, 4)),
    "BSNH": ((5, 16, 3, 128), (5, 16, 3, 128), (5, 16), (5, 16, 3), (5, 16, 3, 4)),
    "paged_NHD": ((5, 16, 3, 128), (5, 16, 3, 128), (5, 16), (5, 16, 3), (5, 16, 3, 4)),
    "paged_HND": ((5, 3, 16, 128), (5, 3, 16, 128), (5, 16), (5, 3, 16), (5, 3, 16, 4)),
    "paged_vllm": ((5, 3, 8, 16, 16), (5, 3, 128, 16), (5, 16), (5, 3, 16), (5, 3, 4, 16)),
}
SIZES = CacheSizes(outer=5, rows=16, h_kv=3, d=128)


def sizes_of(name, k_shape, v_shape=None, itemsize=1):
    return cache_sizes(LAYOUTS[name], k_shape, k_shape if v_shape is None else v_shape, itemsize)


def test_the_layouts_are_those_of_the_interface():
    assert list(LAYOUTS) == list(SHAPES)
    assert [name for name, layout in LAYOUTS.items() if layout.paged] == ["paged_NHD", "paged_HND", "paged_vllm"]
    assert all(layout.name == name for name, layout in LAYOUTS.items())


@pytest.mark.parametrize("name", SHAPES)
def test_sizes_and_scales_of_each_layout(name):
    k_shape, v_shape, token, token_head, group = SHAPES[name]
    layout = LAYOUTS[name]
    assert sizes_of(name, k_shape, v_shape) == SIZES
    assert (layout.shape("k", SIZES, 1), layout.shape("v", SIZES, 1)) == (k_shape, v_shape)
    shapes = {
        ScaleKind("per_tensor"): (1,),
        ScaleKind("per_head"): (3,),
        ScaleKind("per_token"): token,
        ScaleKind("per_token_head"): token_head,
        ScaleKind("per_group", 32): group,
        ScaleKind("per_group", 64): tuple(2 if size == 4 else size for size in group),
    }
    assert scale_shapes(layout, SIZES) == shapes
    for kind, shape in shapes.items():
        assert scale_kind("k_scale", shape, layout, SIZES) == kind
    assert scale_kind("k_scale", (), layout, SIZES) == ScaleKind("per_tensor")


@pytest.mark.parametrize("name", SHAPES)
def test_no_cache_has_an_ambiguous_scale(name):
    """The rank determines the granularity, and d the group size. A single head counts as per_tensor."""
    numbers = (1, 2, 3, 4, 8, 16, 32)
    for outer, rows, h_kv, d in itertools.product((0, *numbers), numbers, numbers, HEAD_DIMS):
        sizes = CacheSizes(outer, rows, h_kv, d)
        for kind, shape in scale_shapes(LAYOUTS[name], sizes).items():
            expected = ScaleKind("per_tensor") if shape == (1,) else kind
            assert scale_kind("k_scale", shape, LAYOUTS[name], sizes) == expected
    assert {kind.granularity for kind in scale_shapes(LAYOUTS[name], SIZES)} == {
        "per_tensor", "per_head", "per_token", "per_token_head", "per_group",
    }  # fmt: skip
    assert {kind.group_size for kind in scale_shapes(LAYOUTS[name], SIZES)} == {0, *GROUP_SIZES}


@pytest.mark.parametrize("itemsize, x", [(1, 16), (2, 8)])
def test_chunks_of_keys_are_16_bytes(itemsize, x):
    assert sizes_of("paged_vllm", (5, 3, 128 // x, 16, x), (5, 3, 128, 16), itemsize) == SIZES
    with pytest.raises(ValueError, match=rf"k_cache: got x = {x // 2} in shape .*; needs {x}, 16 bytes"):
        sizes_of("paged_vllm", (5, 3, 256 // x, 16, x // 2), (5, 3, 128, 16), itemsize)


def test_rotated_vectors_have_256_elements_at_most():
    assert cache_sizes(LAYOUTS["BNSH"], (1, 2, 3, 256), (1, 2, 3, 128), 1, v_values=2).d == 256
    with pytest.raises(ValueError, match="v_cache: got head dimension 512; needs one of .64, 128, 256. with 4-bit"):
        cache_sizes(LAYOUTS["BNSH"], (1, 2, 3, 512), (1, 2, 3, 256), 1, v_values=2)


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_head_dimensions(d):
    assert sizes_of("BNSH", (1, 1, 7, d)).d == d
    with pytest.raises(ValueError, match=rf"k_cache: got head dimension {d + 32}; needs one of"):
        sizes_of("BNSH", (1, 1, 7, d + 32))


@pytest.mark.parametrize("name", SHAPES)
def test_page_sizes(name):
    layout = LAYOUTS[name]
    for rows in (0, 1, 2, 7, 8, 12, 16, 32, 48, 64, 128, 1024):
        shapes = [layout.shape(which, CacheSizes(5, rows, 3, 128), 1) for which in get_args(Which)]
        power = rows > 0 and rows & (rows - 1) == 0
        if not layout.paged or (rows in (8, 16, 32) if name == "paged_vllm" else power):
            assert sizes_of(name, *shapes).rows == rows
        else:
            with pytest.raises(ValueError, match=rf"k_cache: got page size {rows}; layout '{name}' needs"):
                sizes_of(name, *shapes)


@pytest.mark.parametrize("name", SHAPES)
def test_caches_must_agree(name):
    k_shape, v_shape = SHAPES[name][:2]
    for axis in range(len(v_shape)):
        other = tuple(2 * size if i == axis else size for i, size in enumerate(v_shape))
        with pytest.raises(ValueError, match="v_cache: got shape .*; needs the sizes of k_cache"):
            sizes_of(name, k_shape, other)


@pytest.mark.parametrize("name", SHAPES)
def test_wrong_ranks(name):
    k_shape, v_shape = SHAPES[name][:2]
    with pytest.raises(ValueError, match=rf"k_cache: got shape .*; layout '{name}' needs {len(k_shape)} axes"):
        sizes_of(name, k_shape[1:], v_shape)
    with pytest.raises(ValueError, match=rf"v_cache: got shape .*; layout '{name}' needs 4 axes"):
        sizes_of(name, k_shape, (*v_shape, 1))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    "shape", [(0,), (2,), (4,), (5,), (16, 5), (5, 15), (3, 5, 16), (5, 3, 16, 1), (5, 3, 16, 128), (1, 1)]
)
def test_scales_that_fit_nothing(name, shape):
    with pytest.raises(ValueError, match=r"v_scale: got shape .* fits no granularity; known are per_tensor \(1,\); "):
        scale_kind("v_scale", shape, LAYOUTS[name], SIZES)
