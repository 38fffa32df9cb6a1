"""Shared memory of the latent decode kernel, and where scales and their multipliers lie in it."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8

from cute_kernels.mla.kernels.load_q import q_layout
from cute_kernels.mla.kernels.smem import ROPE_BYTES, SHARED_BYTES, WARPS, p_layout
from cute_kernels.mla.kernels.tile import QUANT_TILE as BLOCK
from cute_kernels.mla.latent.spec import LINE_BYTES, LatentDecodeSpec
from cute_kernels.mla.spec import TOKENS_PER_TILE

NEEDS_SCALES = 8  # flag of a tile: a partial with its values needs block scales
UNITS = 8  # of O: one for each 64 values
NO_TILE = -1  # the kind of a stage that is given to PV after the last key tile of a CTA


def codes_bytes(spec: LatentDecodeSpec) -> int:
    """Codes of a stage, in lines of 128 bytes: 64 keys of the first line, then 64 of the second."""
    return TOKENS_PER_TILE * LINE_BYTES * spec.code_lines


def shared_storage(spec: LatentDecodeSpec):
    """The struct of all shared memory. Fields have the names of `mla.kernels.smem`, so roles are shared."""
    heads, stages, p_stages, s_stages = spec.heads, spec.stages, spec.p_stages, spec.qk_warpgroups
    scale_dtype, scales, weights = Uint8, spec.scale_bytes, spec.scale_bytes  # of a key
    if spec.float_scales:
        scale_dtype, scales, weights = Float32, spec.token_format.num_scales, spec.token_format.num_scales

    @cute.struct
    class Shared:
        codes: cute.struct.Align[cute.struct.MemRange[Uint8, stages * codes_bytes(spec)], 1024]
        rope: cute.struct.Align[cute.struct.MemRange[Uint8, spec.rope_slots * ROPE_BYTES], 1024]
        q: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(q_layout(heads, spec.d_qk))], 1024]
        p: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(p_layout(heads))], 1024]
        s: cute.struct.Align[cute.struct.MemRange[Float32, s_stages * TOKENS_PER_TILE * heads], 1024]
        scale: cute.struct.Align[cute.struct.MemRange[scale_dtype, stages * TOKENS_PER_TILE * scales], 128]
        weight: cute.struct.Align[cute.struct.MemRange[Float16, p_stages * TOKENS_PER_TILE * weights], 128]
        q_peak: cute.struct.MemRange[Float32, (spec.d_qk // BLOCK + 1) * heads]
        q_power: cute.struct.MemRange[Float32, spec.d_qk // BLOCK * heads]
        q_unit: cute.struct.MemRange[Float32, heads]
        q_shift: cute.struct.MemRange[Float32, heads]  # power of a head of Q
        unit: cute.struct.MemRange[Float32, s_stages * heads]
        v_power: cute.struct.Align[cute.struct.MemRange[Float32, UNITS], 16]
        v_highest: cute.struct.MemRange[Int32, UNITS]
        v_top: cute.struct.Align[cute.struct.MemRange[Uint8, UNITS], 8]  # see `LatentValueUnits`
        v_above: cute.struct.Align[cute.struct.MemRange[Uint8, UNITS], 8]
        v_unit: cute.struct.MemRange[Float32, p_stages * UNITS]
        v_move: cute.struct.MemRange[Float32, p_stages * UNITS]
        rescaling: cute.struct.MemRange[Float32, p_stages * heads]  # factor of O, by head
        inverse_sum: cute.struct.MemRange[Float32, p_stages * heads]  # 1 / row_sum, with the last tile of a work tile
        lse: cute.struct.MemRange[Float32, p_stages * heads]
        flags: cute.struct.Align[cute.struct.MemRange[Int32, p_stages * WARPS], 16]  # of a tile, by warp
        rope_flags: cute.struct.Align[cute.struct.MemRange[Int32, stages * WARPS], 16]  # see `multiply_rope`
        kinds: cute.struct.MemRange[Int32, stages]  # of key tiles: an index of `spec.kinds`, or NO_TILE
        sink: cute.struct.MemRange[Float32, heads]  # times log2(e)
        mask: cute.struct.MemRange[Int32, 2 * spec.mask_stages]  # a bit for each key: 1 if it counts
        q_full: Int64
        keys_full: cute.struct.MemRange[Int64, stages]
        keys_empty: cute.struct.MemRange[Int64, stages]
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


def stage_kinds(smem, spec: LatentDecodeSpec) -> cute.Tensor:
    """The kinds of the tiles of all stages: of two formats, or where PV expands."""
    return smem.kinds.get_tensor(cute.make_layout(spec.stages))


def kind_of_tile(smem, spec: LatentDecodeSpec, stage: Int32) -> Int32:
    """Which of `spec.kinds` the tile of a stage has."""
    return stage_kinds(smem, spec)[stage] if len(spec.kinds) > 1 else Int32(0)


def of_kind(which: Int32, values: list) -> Any:
    """That of a tile, which has the which-th of `spec.kinds`, of one value for each."""
    return values[0] if len(values) == 1 else cutlass.select_(which == 0, *values)


def scale_words(smem, spec: LatentDecodeSpec, stage: Int32, key, first: int, words: cute.Tensor):
    """Copies scale bytes of a key, from byte `first` on, into `words` (Int32), four bytes each."""
    size = 4 * cute.size(words)
    start = (stage * TOKENS_PER_TILE + key) * spec.scale_bytes + first
    pointer = smem.scale.data_ptr() + cute.assume(start, divby=size)
    cute.autovec_copy(cute.make_tensor(cute.recast_ptr(pointer, dtype=Int32), cute.make_layout(size // 4)), words)


def weights(smem, spec: LatentDecodeSpec, stage: Int32, quant_tile, tid: Int32) -> cute.Tensor:
    """Multipliers of a quant tile, of the 16 keys that a thread multiplies: (8, 2), 8 of 32 keys.

    Keys are ordered as in `mla.kernels.smem.weights`.
    """
    start = (stage * spec.scale_bytes + quant_tile) * TOKENS_PER_TILE + tid % 4 * 8
    pointer = smem.weight.data_ptr() + cute.assume(start, divby=8)
    return cute.make_tensor(pointer, cute.make_layout((8, 2), stride=(1, TOKENS_PER_TILE // 2)))
