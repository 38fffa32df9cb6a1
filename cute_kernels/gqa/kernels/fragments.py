"""Which values of the matrix products a thread of a consumer warp has."""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import warp

from cute_kernels.gqa.kernels.smem import DTYPES
from cute_kernels.gqa.spec import GqaDecodeSpec


class Fragments:
    """Facts of a consumer warp, which has 16 keys of each tile; S^T = K Q^T and O^T += V^T P^T (`swap_ab`).

    With g = lane / 4, t = lane % 4: a thread has S and P of keys g and g + 8 (in the order of `key_row`) for the query
    rows 8 n + 2 t and 8 n + 2 t + 1; its accumulators are two rows of 16 of O^T for the same query rows. So the thread
    that needs a maximum, sum or factor of a query row has it.
    """

    def __init__(self, spec: GqaDecodeSpec):
        self.spec = spec
        self.n_tiles = spec.columns // 8
        self.thread_rows = spec.columns // 4  # query rows of a thread
        self.k_groups = spec.scale_groups(spec.k_scales)
        self.v_groups = spec.scale_groups(spec.v_scales)
        self.is_int8 = spec.kv_dtype == "int8"
        self.k_dtype, self.v_dtype = DTYPES[spec.k_operand], DTYPES[spec.v_operand]
        self.scale_dtype = DTYPES[spec.scale_dtype]
        self.vllm = spec.layout == "vllm"
        self.pairs_of_tokens = self.vllm and spec.bytes_cache  # see `key_row`
        self.interleaved_d = spec.bytes_cache and not self.vllm
        self.row_chunks = spec.row_bytes // 16
        self.page_bytes = spec.d * spec.box_rows * spec.itemsize
        self.has_nan = not self.is_int8 or self.v_groups > 0  # whether values, or scales of tokens, may be NaN

    def key_row(self, i):
        """Which of the warp's 16 keys stands in row i of S.

        V of paged_vllm comes as rows of neighbouring tokens, of which even ones and odd ones make a pair of registers:
        the rows of S take the same order, so that P fits.
        """
        return 2 * (i % 8) + i // 8 if self.pairs_of_tokens else i

    def query_row(self, i: int, lane):
        """The i-th query row that this thread has."""
        return 8 * (i // 2) + 2 * (lane % 4) + i % 2

    def mma(self, dtype):
        """The warp's matrix product m16n8k16 with float32 sums."""
        return cute.make_tiled_mma(warp.MmaF16BF16Op(dtype, Float32, (16, 8, 16)))

    def accumulators(self) -> list:
        """O^T: a fragment for each 16 rows of d and 8 query rows."""
        mma = self.mma(self.v_dtype)
        shape = mma.partition_shape_C((16, 8))
        return [[mma.make_fragment_C(shape) for _ in range(self.n_tiles)] for _ in range(self.spec.d // 16)]

    def chunk_address(self, tile, row, chunk: int, half):
        """Where 16 bytes of a token lie: those of chunk + half, of row `row` of the tile, half 0 or 1."""
        if self.vllm:
            page = self.spec.box_rows
            in_page = row // page * self.page_bytes + row % page * 16 + half * (page * 16)
            return tile + in_page + chunk * (page * 16)
        spec = self.spec
        # the swizzle exchanges bits 4.. of an address with bits 7..
        swizzle = row % 8 if spec.row_bytes == 128 else row * spec.row_pitch // 128 % 4
        block, inner = chunk // self.row_chunks, chunk % self.row_chunks
        base = tile + row * spec.row_pitch + block * (spec.keys_per_tile * spec.row_pitch)
        return base + ((inner << 4) ^ ((half ^ swizzle) << 4))
