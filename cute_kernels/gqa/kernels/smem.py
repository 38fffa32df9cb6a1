"""Shared memory of the GQA decode kernel: its parts, in order, and tensors over them."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from cute_kernels.gqa.codes import element
from cute_kernels.gqa.spec import GqaDecodeSpec

Q_BUFFERS = 2  # Q of the next sequence is stored while slow warps still read Q of this one
CONSTANTS_BUFFERS = 3  # and they may still read the constants of the sequence before, to store it
S_SCALE, SINK, O_SCALE, NUM_CONSTANTS = 0, 1, 2, 3  # constants of a column: see `column_constants`


class SmemViews(NamedTuple):
    """Pointers to the first element of each part.

    tiles         stages x (K, V) x keys x d x itemsize: rows of 128 bytes (64, 32), swizzled; pages of paged_vllm as
                  they lie in global memory
    q             2 buffers x terms x columns x d as fragments of B: a lane's 16 bytes of two k steps are neighbours;
                  then the sum of each column, float32, if K has zero points
    warp_o        teams x columns x (d + 4) float32: O of each team; a team is one warp unless warps split d
    warp_softmax  2 x (teams + 1) x columns float32: row_max and row_sum of each team, and of all for a cluster
    s_parts       2 tiles x warps x 16 x columns float32: parts of S, if warps split d; see `qk`
    constants     3 buffers x columns x 3 float32: see `column_constants`
    scales        stages x keys x scales of a token, float32
    page_exists   a bit for each TMA copy of a stage: its page exists
    kv_full, kv_empty, warp_o_empty   mbarriers: see `pipelines`
    arrived       this CTA's number in the count of partials
    """

    tiles: cute.Pointer
    q: cute.Pointer
    warp_o: cute.Pointer
    warp_softmax: cute.Pointer
    s_parts: cute.Pointer
    constants: cute.Pointer
    scales: cute.Pointer
    page_exists: cute.Pointer
    kv_full: cute.Pointer
    kv_empty: cute.Pointer
    warp_o_empty: cute.Pointer
    arrived: cute.Pointer


def allocate(spec: GqaDecodeSpec) -> SmemViews:
    """Lays out the shared memory of a CTA."""
    array = SmemAllocator().allocate_array
    dtype, q_dtype = spec.codes.element(), element(spec.k_operand)
    tiles = array(dtype, spec.stages * spec.stage_bytes // spec.itemsize, byte_alignment=1024)
    q = array(q_dtype, Q_BUFFERS * spec.q_values, byte_alignment=16)
    warp_o = array(Float32, spec.teams * spec.columns * spec.warp_o_stride, byte_alignment=16)
    warp_softmax = array(Float32, 2 * (spec.teams + 1) * spec.columns, byte_alignment=16)
    s_parts = array(Float32, spec.s_part_values, byte_alignment=16) if spec.s_part_values else warp_o
    constants = array(Float32, CONSTANTS_BUFFERS * NUM_CONSTANTS * spec.columns, byte_alignment=16)
    scales = array(Float32, max(spec.stages * spec.scale_values, 1), byte_alignment=16)
    page_exists = array(Int32, spec.stages * spec.page_words, byte_alignment=4)
    mbarriers = array(Int64, 2 * spec.stages + 1, byte_alignment=8)
    arrived = array(Int32, 1, byte_alignment=4)
    return SmemViews(
        tiles=tiles,
        q=q,
        warp_o=warp_o,
        warp_softmax=warp_softmax,
        s_parts=s_parts,
        constants=constants,
        scales=scales,
        page_exists=page_exists,
        kv_full=mbarriers,
        kv_empty=mbarriers + spec.stages,
        warp_o_empty=mbarriers + 2 * spec.stages,
        arrived=arrived,
    )


def column_constants(spec: GqaDecodeSpec, constants: cute.Pointer) -> cute.Tensor:
    """Views (column, S_SCALE | SINK | O_SCALE): S's factor besides the softmax scale, the sink, and O's factor."""
    return cute.make_tensor(constants, cute.make_layout((spec.columns, NUM_CONSTANTS)))


def q_sums(spec: GqaDecodeSpec, q: cute.Pointer) -> cute.Tensor:
    """Views (column): sums of Q in the buffer that begins at `q`."""
    size = spec.q_terms * spec.columns * spec.d
    return cute.make_tensor(cute.recast_ptr(q + size, dtype=Float32), cute.make_layout(spec.columns))


def warp_o_tensor(spec: GqaDecodeSpec, smem: SmemViews) -> cute.Tensor:
    """Views O of each team: (d, column, team)."""
    stride = (1, spec.warp_o_stride, spec.warp_o_stride * spec.columns)
    return cute.make_tensor(smem.warp_o, cute.make_layout((spec.d, spec.columns, spec.teams), stride=stride))


def warp_softmax_tensor(spec: GqaDecodeSpec, smem: SmemViews) -> cute.Tensor:
    """Views (column, team, 0 for row_max or 1 for row_sum); the last team stands for all."""
    return cute.make_tensor(smem.warp_softmax, cute.make_layout((spec.columns, spec.teams + 1, 2)))
