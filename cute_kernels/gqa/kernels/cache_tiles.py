"""Caches of every layout in the form that TMA takes, and a tile of one in shared memory.

This module knows what the order of a cache's axes, or a packing, means to the load warp; fragments.py knows what it
means to the registers of a consumer warp.
"""

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_tensor

from cute_kernels.gqa.codes import Codes
from cute_kernels.gqa.kernels.arguments import Tma
from cute_kernels.gqa.layouts import Which
from cute_kernels.gqa.spec import GqaDecodeSpec


def fake_caches(spec: GqaDecodeSpec, sizes: dict) -> list:
    """Makes fake K and V for compilation; `sizes` by axis: outer, rows, heads, d."""
    if spec.x_packed:
        x, page = 16 // spec.itemsize, spec.box_rows
        lead = [cute.sym_int64(divisibility=x) for _ in range(4)]
        k_shape, v_shape = (spec.d // x, page, x), (spec.d, page)
        k_strides, v_strides = (*lead[:2], page * x, x, 1), (*lead[2:], page, 1)
        shapes = [((sizes["o"], sizes["h"], *k_shape), k_strides), ((sizes["o"], sizes["h"], *v_shape), v_strides)]
    else:
        shapes = []
        for which in ("k", "v"):
            codes = codes_of(spec, which)
            shape = tuple(sizes[axis] for axis in spec.cache_axes[:-1])
            strides = (*(cute.sym_int64(divisibility=16 // codes.itemsize) for _ in shape), 1)
            shapes.append(((*shape, sizes["d"] // codes.values), strides))
    dtypes = (spec.codes.element(), spec.v_codes.element())
    return [
        make_fake_tensor(dtype, shape, strides, assumed_align=16)
        for dtype, (shape, strides) in zip(dtypes, shapes, strict=True)
    ]


def codes_of(spec: GqaDecodeSpec, which: Which) -> Codes:
    """Returns the type of K or V."""
    return spec.codes if which == "k" else spec.v_codes


def tma_copy(spec: GqaDecodeSpec, which: Which, cache: cute.Tensor) -> Tma:
    """Makes the TMA copy of K or V; the modes of its coordinates are (rows, width, heads, outer)."""
    if spec.x_packed:
        rows, width = box_shape(spec, which)
        strides = (width, 1, cache.stride[1], cache.stride[0])
        view = cute.make_layout((rows, width, cache.shape[1], cache.shape[0]), stride=strides)
    else:
        view = cute.select(cache.layout, mode=[spec.cache_axes.index(axis) for axis in "rdho"])
    atom, tensor = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(),
        cute.make_tensor(cache.iterator, view),
        tile_layout(spec, which),
        box_shape(spec, which),
    )
    return Tma(atom, tensor)


def tile_layout(spec: GqaDecodeSpec, which: Which):
    """Returns the layout of a box in shared memory: (rows, width), swizzled unless the bytes are packed as in vLLM."""
    shape = box_shape(spec, which)
    plain = cute.make_ordered_layout(shape, order=(1, 0))
    if spec.x_packed:
        return plain
    bits = {128: 3, 64: 2, 32: 1}[spec.tile(which).row]
    return cute.make_composed_layout(cute.make_swizzle(bits, 4, 3), 0, plain)


def box_shape(spec: GqaDecodeSpec, which: Which) -> tuple[int, int]:
    """Returns (rows, width) of a TMA copy. The bytes of a vLLM page and head are contiguous: rows of 128 bytes."""
    if spec.x_packed:
        width = 128 // spec.itemsize
        return spec.d * spec.box_rows // width, width
    return spec.box_rows, spec.tile(which).row // codes_of(spec, which).itemsize


def partition(spec: GqaDecodeSpec, which: Which, tma: Tma, smem: cute.Pointer):
    """Returns `gTile` and `sTile` of a `TileCopy`, whose stage 0 begins at `smem`."""
    box, tile, codes = box_shape(spec, which), spec.tile(which), codes_of(spec, which)
    segments = 1 if spec.x_packed else tile.segments
    boxes = spec.keys_per_tile // spec.box_rows
    # row segments outermost, so that a segment's rows are the tile's
    box_size = box[0] * box[1] if spec.x_packed else box[0] * tile.pitch // codes.itemsize
    stage_size = spec.stage_bytes // codes.itemsize
    stride = (box[1], 1, box_size, boxes * box_size, stage_size)
    shape = cute.make_layout((*box, boxes, segments, spec.stages), stride=stride)
    pointer = smem
    if not spec.x_packed:
        pointer = cute.recast_ptr(smem, tile_layout(spec, which).inner, codes.element())
    sTile = cute.make_tensor(pointer, shape)
    gTile = cute.local_tile(tma.tensor, box, (None, None, None, None))
    target, source = cpasync.tma_partition(
        tma.atom, 0, cute.make_layout(1), cute.group_modes(sTile, 0, 2), cute.group_modes(gTile, 0, 2)
    )
    return source, target
