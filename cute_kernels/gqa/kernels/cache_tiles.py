"""Caches of every layout as TMA sees them, and a tile of one in shared memory.

What the order of a cache's axes, or a packing, means to the load warp is here; what it means to the registers of a
consumer warp is in fragments.py.
"""

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_tensor

from cute_kernels.gqa.kernels.arguments import Tma
from cute_kernels.gqa.spec import GqaDecodeSpec


def fake_caches(spec: GqaDecodeSpec, sizes: dict) -> list:
    """K and V as the kernel is compiled for them; `sizes` by axis: outer, rows, heads, d."""
    dtype = spec.codes.element()
    if spec.x_packed:
        x, page = 16 // spec.itemsize, spec.box_rows
        lead = [cute.sym_int64(divisibility=x) for _ in range(4)]
        k_shape, v_shape = (spec.d // x, page, x), (spec.d, page)
        k_strides, v_strides = (*lead[:2], page * x, x, 1), (*lead[2:], page, 1)
        shapes = [((sizes["o"], sizes["h"], *k_shape), k_strides), ((sizes["o"], sizes["h"], *v_shape), v_strides)]
    else:
        shape = tuple(sizes[axis] for axis in spec.cache_axes)
        shapes = [
            (shape, (*(cute.sym_int64(divisibility=16 // spec.itemsize) for _ in shape[:-1]), 1)) for _ in range(2)
        ]
    return [make_fake_tensor(dtype, shape, strides, assumed_align=16) for shape, strides in shapes]


def tma_copy(spec: GqaDecodeSpec, cache: cute.Tensor) -> Tma:
    """The TMA copy of K or V; the modes of its coordinates are (rows, width, heads, outer)."""
    if spec.x_packed:
        rows, width = box_shape(spec)
        strides = (width, 1, cache.stride[1], cache.stride[0])
        view = cute.make_layout((rows, width, cache.shape[1], cache.shape[0]), stride=strides)
    else:
        view = cute.select(cache.layout, mode=[spec.cache_axes.index(axis) for axis in "rdho"])
    atom, tensor = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(),
        cute.make_tensor(cache.iterator, view),
        tile_layout(spec),
        box_shape(spec),
    )
    return Tma(atom, tensor)


def tile_layout(spec: GqaDecodeSpec):
    """Shared memory of one box: (rows, width), swizzled unless the bytes come as vLLM packs them."""
    shape = box_shape(spec)
    plain = cute.make_ordered_layout(shape, order=(1, 0))
    if spec.x_packed:
        return plain
    bits = 3 if shape[1] * spec.itemsize == 128 else 2
    return cute.make_composed_layout(cute.make_swizzle(bits, 4, 3), 0, plain)


def box_shape(spec: GqaDecodeSpec) -> tuple[int, int]:
    """(rows, width) of one TMA copy. The bytes of a vLLM page and head are contiguous: rows of 128 of them."""
    if spec.x_packed:
        width = 128 // spec.itemsize
        return spec.d * spec.box_rows // width, width
    return spec.box_rows, spec.row_bytes // spec.itemsize


def partition(spec: GqaDecodeSpec, tma: Tma, smem: cute.Pointer):
    """`gTile` and `sTile` of a `TileCopy`, whose stage 0 begins at `smem`."""
    box = box_shape(spec)
    segments = 1 if spec.x_packed else spec.d // box[1]
    boxes = spec.keys_per_tile // spec.box_rows
    # row segments outermost, so that the rows of a segment are those of the tile
    box_size = box[0] * box[1] if spec.x_packed else box[0] * spec.row_pitch // spec.itemsize
    stage_size = 2 * spec.tile_bytes // spec.itemsize
    stride = (box[1], 1, box_size, boxes * box_size, stage_size)
    shape = cute.make_layout((*box, boxes, segments, spec.stages), stride=stride)
    pointer = smem
    if not spec.x_packed:
        pointer = cute.recast_ptr(smem, tile_layout(spec).inner, spec.codes.element())
    sTile = cute.make_tensor(pointer, shape)
    gTile = cute.local_tile(tma.tensor, box, (None, None, None, None))
    target, source = cpasync.tma_partition(
        tma.atom, 0, cute.make_layout(1), cute.group_modes(sTile, 0, 2), cute.group_modes(gTile, 0, 2)
    )
    return source, target
