"""The kernel of the backward where keys stay: its place in shared memory, and the products S^T and dP^T of a tile.

See backward.py, which is made of this, of key_blocks.py and of query_sums.py.
"""

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.device import wgmma
from cute_kernels.sink.backward_spec import QUERIES
from cute_kernels.sink.kernels import schedule as schedule
from cute_kernels.sink.spec import ROWS


class KeyTiles:
    """Layouts and products; `spec` is a SinkBackwardSpec."""

    def __init__(self, spec):
        self.spec = spec
        self.dtype = schedule.DTYPES[spec.dtype]

    def layouts(self):
        """Shared memory: K and V (128, d, 1), Q and dO (64, d, stages), dS^T (128, 64, 2), L and delta (64, 1, 2)."""
        spec, row = self.spec, LayoutEnum.ROW_MAJOR
        tiles = (4 if spec.pair else 2) if spec.fused else 1
        return (
            sm90.make_smem_layout_b(row, (ROWS, spec.keys_of_cta, spec.d), self.dtype, 1),
            sm90.make_smem_layout_b(row, (ROWS, QUERIES, spec.d), self.dtype, spec.stages),
            sm90.make_smem_layout_b(row, (ROWS, spec.keys_of_cta, QUERIES), self.dtype, tiles),
            cute.make_layout((QUERIES, 1, 2, spec.stages), stride=(1, QUERIES, QUERIES, 2 * QUERIES)),
        )

    def layout_others(self):
        """Of a pair: the other CTA's K, half of the columns, (keys, 64, 1)."""
        row, shape = LayoutEnum.ROW_MAJOR, (ROWS, self.spec.keys_of_cta, self.spec.columns)
        return sm90.make_smem_layout_b(row, shape, self.dtype, 1)

    def tiled_mmas(self):
        """S^T and dP^T from shared memory; dV and dK with P^T and dS^T in registers; dQ with dS read by columns."""
        k, mn, one, t, d = OperandMajorMode.K, OperandMajorMode.MN, (1, 1, 1), self.dtype, self.spec.d
        registers = warpgroup.OperandSource.RMEM
        return (
            sm90.make_trivial_tiled_mma(t, t, k, k, Float32, one, (ROWS, QUERIES)),
            sm90.make_trivial_tiled_mma(t, t, k, mn, Float32, one, (ROWS, d), registers),
            sm90.make_trivial_tiled_mma(t, t, mn, mn, Float32, one, (QUERIES, self.spec.columns)),
        )

    def storage(self):
        """The struct in shared memory."""
        spec, dtype = self.spec, self.dtype
        layout_kv, layout_q, layout_ds, layout_stats = self.layouts()
        of_ds = cute.cosize(layout_ds) if spec.fused else 64
        of_dkv = 0 if spec.reuses else cute.cosize(layout_kv)
        of_added = spec.warpgroups * QUERIES * spec.d if spec.fused else 32
        of_others = 0
        if spec.pair:
            of_others, of_added = cute.cosize(self.layout_others()), QUERIES * spec.columns

        @cute.struct
        class Shared:
            k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout_kv)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout_kv)], 1024]
            d_k: cute.struct.Align[cute.struct.MemRange[dtype, of_dkv], 1024]
            d_v: cute.struct.Align[cute.struct.MemRange[dtype, of_dkv], 1024]
            others: cute.struct.Align[cute.struct.MemRange[dtype, of_others], 1024]
            q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout_q)], 1024]
            d_out: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout_q)], 1024]
            d_s: cute.struct.Align[cute.struct.MemRange[dtype, of_ds], 1024]
            added: cute.struct.Align[cute.struct.MemRange[Float32, of_added], 128]
            stats: cute.struct.Align[cute.struct.MemRange[Float32, cute.cosize(layout_stats)], 128]
            work: cute.struct.MemRange[Int32, schedule.RECORD * schedule.SLOTS]
            work_full: cute.struct.MemRange[Int64, schedule.SLOTS]
            work_empty: cute.struct.MemRange[Int64, schedule.SLOTS]
            kv_full: Int64
            kv_empty: Int64
            q_full: cute.struct.MemRange[Int64, spec.stages]
            q_empty: cute.struct.MemRange[Int64, spec.stages]
            ds_full: cute.struct.MemRange[Int64, 2]
            ds_empty: cute.struct.MemRange[Int64, 2]
            added_empty: Int64

        return Shared

    @cute.jit
    def mine_of(self, x, block: Int32, tid: Int32):
        """64 rows of K or V as an operand in shared memory."""
        layout_kv, _, _, _ = self.layouts()
        mma_s, _, _ = self.tiled_mmas()
        sX = x.get_tensor(layout_kv.outer, swizzle=layout_kv.inner)
        sX = cute.local_tile(sX, (ROWS, self.spec.d), (block, 0, None))
        return mma_s.make_fragment_A(mma_s.get_slice(tid).partition_A(sX))[None, None, None, 0]

    @cute.jit
    def transposed_product(self, rX: cute.Tensor, y, acc: cute.Tensor, stage: Int32, tid: Int32):
        """Issues K Q^T or V dO^T of 64 keys and of a tile of queries, and commits the group."""
        spec = self.spec
        _, layout_q, _, _ = self.layouts()
        mma_s, _, _ = self.tiled_mmas()
        sY = y.get_tensor(layout_q.outer, swizzle=layout_q.inner)
        rY = mma_s.make_fragment_B(mma_s.get_slice(tid).partition_B(sY))
        of_d = [(k, k) for k in range(spec.d // 16)]
        wgmma.issue(mma_s, acc, rX, rY[None, None, None, stage], False, of_d)
        warpgroup.commit_group()

    @cute.jit
    def give_back(self, smem, stage: Int32, rank: Int32, tid: Int32):
        """Products have read a tile of Q and dO: the next may come, from here and, if it is shared, from the other."""
        empty = smem.q_empty.data_ptr() + stage
        cute.arch.mbarrier_arrive(empty)

    @cute.jit
    def scores(self, smem, acc_s: cute.Tensor, rK: cute.Tensor, use: Int32, tid: Int32):
        """Issues S^T of a tile once it is there."""
        stage, phase = schedule.stage_of(use, self.spec.stages)
        cute.arch.mbarrier_wait(smem.q_full.data_ptr() + stage, phase)
        warpgroup.fence()
        self.transposed_product(rK, smem.q, acc_s, stage, tid)

    def of_columns(self, source: cute.Pointer) -> cute.Tensor:
        """L or delta of this thread's columns, (2, 8): in registers, or where they are if registers are short."""
        layout = cute.make_layout((2, QUERIES // 8), stride=(1, 8))
        values = cute.make_rmem_tensor((2, QUERIES // 8), Float32)
        cute.autovec_copy(cute.make_tensor(source, layout), values)
        return values
