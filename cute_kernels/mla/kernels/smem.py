"""Shared memory of the MLA decode kernel, its matrix products, and where data lies in both."""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.mla.kernels.load_q import q_layout
from cute_kernels.mla.kernels.tile import NOPE, QUANT_TILE, QUANT_TILES
from cute_kernels.mla.spec import LINE_BYTES, TOKENS_PER_TILE, WGMMA_ROWS, MlaDecodeSpec

SHARED_BYTES = 232_448  # most shared memory of a CTA
CODES_BYTES = TOKENS_PER_TILE * NOPE  # codes of a stage of V3.2
ROPE_BYTES = TOKENS_PER_TILE * LINE_BYTES
WARPS = 4  # warps of a warpgroup
P_EXPONENT = 7.0  # row_max is set 7 below the largest score: its P is 2^7, and float16 holds P down to 2^-31 of it
RESCALE_THRESHOLD = 8.0  # log2 of the growth of the largest score that moves row_max: P stays below 2^15
RESCALE_O = 1  # flag of a tile: O is multiplied by `rescaling` first
NEW_UNIT = 2  # flag of a tile: O is also multiplied by `v_move`
BFLOAT16 = 4  # flag: P is bfloat16, and V has to be: float16 does not hold V in the units of O
NEEDS_SCALES = 8  # flag: a partial with the values of this tile needs block scales
HALVES = 16  # flag instead of BFLOAT16: P is float16, split into two bfloat16 numbers (`PvWarpgroups.add_bfloat16`)
V_UNIT = 2.0**-6  # first unit of O; see `ValueUnits`
UNITS = 8  # units of O for keys that are scaled, one for each 64 values; else there is one for each quant tile
NO_TILE = -1  # the kind of a stage that is given to PV after the last key tile of a CTA


def codes_bytes(spec: MlaDecodeSpec) -> int:
    """Returns the code bytes of a stage, in lines of 128 bytes: 64 keys of the first line, then 64 of the second."""
    return TOKENS_PER_TILE * LINE_BYTES * spec.code_lines


def p_layout(heads: int):
    """Returns the layout of P^T in shared memory: (heads, 64 keys, stages)."""
    tile = (WGMMA_ROWS, heads, TOKENS_PER_TILE)
    return sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, Float16, MlaDecodeSpec.p_stages)


def shared_storage(spec: MlaDecodeSpec):
    """Makes the struct of all shared memory."""
    heads, stages, p_stages, s_stages = spec.heads, spec.stages, spec.p_stages, spec.qk_warpgroups
    blocks, units = spec.d_qk // QUANT_TILE, UNITS
    scale_dtype, scales = Uint8, spec.scale_bytes  # scales of a key
    if spec.float_scales:
        units = QUANT_TILES
        scale_dtype, scales = Float32, spec.token_format.num_scales

    @cute.struct
    class Shared:
        codes: cute.struct.Align[cute.struct.MemRange[Uint8, stages * codes_bytes(spec)], 1024]
        rope: cute.struct.Align[cute.struct.MemRange[Uint8, spec.rope_slots * ROPE_BYTES], 1024]
        q: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(q_layout(heads, spec.d_qk))], 1024]
        p: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(p_layout(heads))], 1024]
        s: cute.struct.Align[cute.struct.MemRange[Float32, s_stages * TOKENS_PER_TILE * heads], 1024]  # see `s_offset`
        scale: cute.struct.Align[cute.struct.MemRange[scale_dtype, stages * TOKENS_PER_TILE * scales], 128]
        weight: cute.struct.Align[cute.struct.MemRange[Float16, p_stages * TOKENS_PER_TILE * scales], 128]
        q_peak: cute.struct.MemRange[Float32, (blocks + 1) * heads]  # largest magnitudes, the rope part's last
        q_power: cute.struct.MemRange[Float32, blocks * heads]  # powers of 128 columns of Q
        q_unit: cute.struct.MemRange[Float32, heads]  # `unit` of the Q that QK has
        q_shift: cute.struct.MemRange[Float32, heads]  # power of a head of Q
        unit: cute.struct.MemRange[Float32, s_stages * heads]  # S of a head times this is its score, in units of log2
        v_power: cute.struct.Align[cute.struct.MemRange[Float32, units], 16]  # see `ValueUnits`
        v_highest: cute.struct.MemRange[Int32, units]
        v_top: cute.struct.Align[cute.struct.MemRange[Uint8, UNITS], 8]  # see `ScaledValueUnits`
        v_above: cute.struct.Align[cute.struct.MemRange[Uint8, UNITS], 8]
        v_unit: cute.struct.MemRange[Float32, p_stages * units]
        v_move: cute.struct.MemRange[Float32, p_stages * units]
        rescaling: cute.struct.MemRange[Float32, p_stages * heads]  # factor of O, by head
        inverse_sum: cute.struct.MemRange[Float32, p_stages * heads]  # 1 / row_sum, with the last tile of a work tile
        lse: cute.struct.MemRange[Float32, p_stages * heads]
        flags: cute.struct.Align[cute.struct.MemRange[Int32, p_stages * WARPS], 16]  # flags of a tile, by warp
        rope_flags: cute.struct.Align[cute.struct.MemRange[Int32, stages * WARPS], 16]  # see `multiply_rope`
        kinds: cute.struct.MemRange[Int32, stages]  # kinds of key tiles: an index of `spec.kinds`, or NO_TILE
        sink: cute.struct.MemRange[Float32, heads]  # sinks times log2(e)
        mask: cute.struct.MemRange[Int32, 2 * spec.mask_stages]  # a bit for each key: 1 if it is not masked
        announced: cute.struct.MemRange[Int32, 2 * p_stages]  # (page or -1, key tile of it) that PV has to load
        q_full: Int64
        keys_full: cute.struct.MemRange[Int64, stages]
        keys_empty: cute.struct.MemRange[Int64, stages]
        rope_empty: cute.struct.MemRange[Int64, spec.rope_slots]
        s_full: cute.struct.MemRange[Int64, s_stages]
        s_empty: cute.struct.MemRange[Int64, s_stages]
        p_full: cute.struct.MemRange[Int64, p_stages]
        p_empty: cute.struct.MemRange[Int64, p_stages]
        raw_full: cute.struct.MemRange[Int64, stages if spec.pv_expands else 0]
        cuts: cute.struct.MemRange[Int32, 4]  # where this CTA's share begins and ends
        trace: Int64  # address of the timestamps

    size = Shared.size_in_bytes()  # type: ignore[attr-defined]  # of the decorator
    if size > SHARED_BYTES:
        raise ValueError(f"shared memory: {size} bytes, of {SHARED_BYTES} that a CTA may have")
    return Shared


def tiled_mmas(heads: int):
    """Makes S^T = K Q^T and O^T += V^T P^T with keys in registers: for float16 and for bfloat16."""
    k, one, tile = OperandMajorMode.K, (1, 1, 1), (WGMMA_ROWS, heads)
    registers = warpgroup.OperandSource.RMEM
    return tuple(sm90.make_trivial_tiled_mma(t, t, k, k, Float32, one, tile, registers) for t in (Float16, BFloat16))


def key_of_row(tid: Int32, r: int):
    """Returns the key of a thread's row r of S^T. Its two keys are neighbours: their S is one store."""
    return tid // 32 * 16 + tid % 32 // 4 * 2 + r


def head_of_column(tid: Int32, c: int):
    """Returns the head of a thread's column c of S^T or O^T."""
    return 8 * (c // 2) + 2 * (tid % 4) + c % 2


def s_offset(head: Int32, key_pair: Int32) -> Int32:
    """Returns the offset of S for a head and two neighbouring keys; an odd head follows its even neighbour.

    There are no bank conflicts: QK stores 16 bytes a thread, where eight lanes have two pairs of keys and four of
    heads; the softmax reads 8 bytes, where sixteen lanes have one pair of keys and eight of heads.
    """
    head_pair = head // 2
    swizzle = ((head_pair & 1) << 2) ^ (head_pair & 2) ^ (head_pair >> 2 & 1)
    return (head_pair * (TOKENS_PER_TILE // 2) + (key_pair ^ swizzle)) * 4 + head % 2 * 2


def scale_tensor(smem, stages: int) -> cute.Tensor:
    """Returns the scales of the keys of all stages: (quant tile, key)."""
    return smem.scale.get_tensor(cute.make_layout((QUANT_TILES, TOKENS_PER_TILE * stages)))


def weights(smem, stage: Int32, quant_tile, tid: Int32, quant_tiles: int = QUANT_TILES) -> cute.Tensor:
    """Returns a quant tile's scales times a weight, float16, for a thread's 16 keys: (8, 2), 8 of 32 keys.

    Keys are ordered by the thread that needs them: 32 x half, 8 x (tid % 4), 4 x (block of 16), 2 x (block of 8), 1.
    For keys that are scaled, `quant_tiles` is `spec.scale_bytes`.
    """
    start = (stage * quant_tiles + quant_tile) * TOKENS_PER_TILE + tid % 4 * 8
    pointer = smem.weight.data_ptr() + cute.assume(start, divby=8)
    return cute.make_tensor(pointer, cute.make_layout((8, 2), stride=(1, TOKENS_PER_TILE // 2)))


def stage_kinds(smem, spec: MlaDecodeSpec) -> cute.Tensor:
    """Returns the kinds of the tiles of all stages; they exist with two formats, or if PV expands."""
    return smem.kinds.get_tensor(cute.make_layout(spec.stages))


def kind_of_tile(smem, spec: MlaDecodeSpec, stage: Int32) -> Int32:
    """Returns which of `spec.kinds` the tile of a stage has."""
    return stage_kinds(smem, spec)[stage] if len(spec.kinds) > 1 else Int32(0)


def of_kind(which: Int32, values: list) -> Any:
    """Returns the value of a tile of the which-th of `spec.kinds`; `values` has one for each kind."""
    return values[0] if len(values) == 1 else cutlass.select_(which == 0, *values)


def scale_words(smem, spec: MlaDecodeSpec, stage: Int32, key, first: int, words: cute.Tensor):
    """Copies scale bytes of a key, from byte `first` on, into `words` (Int32), four bytes each."""
    size = 4 * cute.size(words)
    start = (stage * TOKENS_PER_TILE + key) * spec.scale_bytes + first
    pointer = smem.scale.data_ptr() + cute.assume(start, divby=size)
    cute.autovec_copy(cute.make_tensor(cute.recast_ptr(pointer, dtype=Int32), cute.make_layout(size // 4)), words)


def place_of_weight(key):
    """Returns the place of a tile's key in `weights`."""
    return key // 32 * 32 + key % 8 // 2 * 8 + key // 16 % 2 * 4 + key // 8 % 2 * 2 + key % 2


def line_offset(row: Int32, chunk):
    """Returns the place of 16 bytes of a line of a key's row, in bytes from the first of 64 consecutive lines.

    This is the order of the 128-byte swizzle. There are no bank conflicts if eight lanes read the chunks of one line,
    or chunks 0, 1, 4, 5 of a line and of the next but one; nor if sixteen lanes read half a chunk each, two
    neighbouring chunks of four lines, each the next but one.
    """
    return row * LINE_BYTES + ((chunk ^ (row & 7)) << 4)


def copy_columns(array: cute.Tensor, tid: Int32, start, values: cute.Tensor):
    """Copies a thread's columns, from `start` on in an array of heads, into `values` (columns)."""
    for i in range(cute.size(values) // 2):
        pointer = array.iterator + cute.assume(start + 8 * i + 2 * (tid % 4), divby=2)
        two = cute.make_tensor(pointer, cute.make_layout(2))
        cute.autovec_copy(two, cute.make_tensor(values.iterator + 2 * i, cute.make_layout(2)))
