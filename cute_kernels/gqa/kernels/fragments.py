"""Which keys, columns and bytes a thread of a consumer warp has, in fragments of mma.sync m16n8k16."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from cute_kernels.gqa.kernels.smem import DTYPES
from cute_kernels.gqa.spec import GqaDecodeSpec


class Thread(NamedTuple):
    """A consumer thread: its warp, its lane, and its number among all consumer threads."""

    warp: Int32
    lane: Int32
    tidx: Int32


class SoftmaxState(NamedTuple):
    """What a warp accumulates, in registers.

    acc_o    O^T, relative to row_max: a fragment for each 16 rows of d and 8 columns
    row_max  of a thread's columns, in units of log2: the maximum that P is relative to
    row_sum  of P over the keys that this thread has seen
    """

    acc_o: list
    row_max: cute.Tensor
    row_sum: cute.Tensor


class ScoreTerms(NamedTuple):
    """What turns q k of a thread's columns into scores in units of log2; slope and position are for ALiBi alone."""

    factor: cute.Tensor
    slope: cute.Tensor
    position: cute.Tensor


class TileKeys(NamedTuple):
    """The 16 keys that a warp has of a tile, of a sequence of `length` keys.

    first   the first of them
    own     the two of them that this thread has
    exists  bit i: row i of S has a page that exists
    """

    first: Int32
    own: tuple[Int32, Int32]
    exists: Int32
    length: Int32


class Fragments:
    """What the parts of a consumer warp share.

    With g = lane / 4, t = lane % 4: a thread has S and P of keys g and g + 8 (as `key_row` orders them) for the columns
    8 n + 2 t and 8 n + 2 t + 1; its accumulators are two rows of 16 of O^T for the same columns. So what belongs to a
    column (maximum, sum, factors) is in the thread that needs it.
    """

    def __init__(self, spec: GqaDecodeSpec):
        self.spec = spec
        self.n_tiles = spec.columns // 8
        self.thread_columns = spec.columns // 4
        self.k_groups = spec.scale_groups(spec.k_scales)
        self.v_groups = spec.scale_groups(spec.v_scales)
        self.is_int8 = spec.kv_dtype == "int8"
        self.k_dtype, self.v_dtype = DTYPES[spec.k_operand], DTYPES[spec.v_operand]
        self.vllm = spec.packed
        self.pairs_of_tokens = self.vllm and spec.bytes_cache  # see `key_row`
        self.interleaved_d = spec.bytes_cache and not self.vllm  # see `device.operands`, "rows are columns of A"
        self.row_chunks = spec.row_bytes // 16
        self.page_bytes = spec.d * spec.box_rows * spec.itemsize

    def key_row(self, i):
        """Which of the warp's 16 keys is row i of S.

        V of paged_vllm comes as rows of neighbouring tokens, of which even ones and odd ones make a pair of registers:
        the rows of S take the same order, so that P fits.
        """
        return 2 * (i % 8) + i // 8 if self.pairs_of_tokens else i

    def column(self, i: int, lane):
        """The i-th column that this thread has."""
        return 8 * (i // 2) + 2 * (lane % 4) + i % 2

    def mma(self, dtype):
        """The matrix product of 16 keys, or 16 rows of d, by 8 columns."""
        return cute.make_tiled_mma(warp.MmaF16BF16Op(dtype, Float32, (16, 8, 16)))

    def accumulators(self) -> list:
        """O^T: a fragment for each 16 rows of d and 8 columns."""
        mma = self.mma(self.v_dtype)
        shape = mma.partition_shape_C((16, 8))
        return [[mma.make_fragment_C(shape) for _ in range(self.n_tiles)] for _ in range(self.spec.d // 16)]

    def v_registers(self, m: int) -> range:
        """Which registers of the raw values have rows 16 m .. 16 m + 15 of V^T."""
        count = 2 * self.spec.itemsize
        return range(count * m, count * (m + 1))

    def chunk_address(self, tile, row, chunk: int, half):
        """Address of 16 bytes of a token: those of chunk + half, of row `row` of the tile, half 0 or 1."""
        if self.vllm:
            page = self.spec.box_rows
            in_page = row // page * self.page_bytes + row % page * 16 + half * (page * 16)
            return tile + in_page + chunk * (page * 16)
        spec = self.spec
        # the swizzle exchanges bits 4.. of an address with bits 7..
        swizzle = row % 8 if spec.row_bytes == 128 else row * spec.row_pitch // 128 % 4
        segment, inner = chunk // self.row_chunks, chunk % self.row_chunks
        base = tile + row * spec.row_pitch + segment * (spec.keys_per_tile * spec.row_pitch)
        return base + ((inner << 4) ^ ((half ^ swizzle) << 4))
