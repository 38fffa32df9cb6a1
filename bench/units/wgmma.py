"""What the tensor core reaches when nothing else is in the way: loops of wgmma over two resident tiles of 64 tokens."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from bench.units.spec import NOPE, QK, ROPE, TILE, WgmmaSpec
from cute_kernels.device import wgmma

COLUMNS = NOPE // 2  # of O, of one warpgroup
THREADS = 384
STORING_REGISTERS, MULTIPLYING_REGISTERS = 40, 232  # 40 + 2 x 232 = 3 x 168; with 200 ptxas serializes the seesaw
PIECES, ROPE_PIECES = TILE * NOPE // (8 * 128), TILE * ROPE // (8 * 128)  # 16-byte pieces of a thread in a tile


def _layouts():
    """Values (64, 512, tiles), rope parts (64, 64, tiles), Q (64, 576, 1)."""
    row, tile = LayoutEnum.ROW_MAJOR, (TILE, TILE)
    return (
        sm90.make_smem_layout_b(row, (*tile, NOPE), BFloat16, 2),
        sm90.make_smem_layout_b(row, (*tile, ROPE), BFloat16, 2),
        sm90.make_smem_layout_a(row, (*tile, QK), BFloat16, 1),
    )


def _storage():
    layout_nope, layout_rope, layout_q = _layouts()

    @cute.struct
    class Shared:
        nope: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout_nope)], 1024]
        rope: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout_rope)], 1024]
        q: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout_q)], 1024]

    return Shared


def _tiled_mmas():
    """S = Q K^T with both operands in shared memory; O += P V of 256 columns with P in registers."""
    k, mn, one = OperandMajorMode.K, OperandMajorMode.MN, (1, 1, 1)
    return (
        sm90.make_trivial_tiled_mma(BFloat16, BFloat16, k, k, Float32, one, (TILE, TILE)),
        sm90.make_trivial_tiled_mma(
            BFloat16, BFloat16, k, mn, Float32, one, (TILE, COLUMNS), warpgroup.OperandSource.RMEM
        ),
    )


class WgmmaKernel:
    """Warpgroups 0 and 1 multiply, each its own S and its own 256 columns of O; warpgroup 2 stores, or leaves.

    P is the same number everywhere, so O is turns x P x the sums of the values over both tiles. Who stores writes the
    bytes that are there already, so the products do not change, whatever the order: with `storing` the tiles are alike
    and repeat every 16 rows and 64 columns.
    """

    def __init__(self, spec: WgmmaSpec):
        self.spec = spec

    def fake_arguments(self) -> tuple:
        """Q; two tiles; per CTA and warpgroup S of the last turn, O, and clocks; P; turns."""
        ctas = cute.sym_int()
        q = make_fake_tensor(BFloat16, (TILE, QK), (QK, 1), assumed_align=16)
        tiles = make_fake_tensor(BFloat16, (2, TILE, QK), (TILE * QK, QK, 1), assumed_align=16)
        s = make_fake_tensor(Float32, (ctas, 2, TILE, TILE), (2 * TILE * TILE, TILE * TILE, TILE, 1), assumed_align=8)
        o = make_fake_tensor(Float32, (ctas, TILE, NOPE), (TILE * NOPE, NOPE, 1), assumed_align=8)
        cycles = make_fake_tensor(Int64, (ctas, 2), (2, 1), assumed_align=8)
        return q, tiles, s, o, cycles, Float32(1.0), Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mTiles: cute.Tensor,
        mS: cute.Tensor,
        mO: cute.Tensor,
        mCycles: cute.Tensor,
        p: Float32,
        turns: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(mQ, mTiles, mS, mO, mCycles, p, turns).launch(
            grid=[mS.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mTiles: cute.Tensor,
        mS: cute.Tensor,
        mO: cute.Tensor,
        mCycles: cute.Tensor,
        p: Float32,
        turns: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator().allocate(_storage())
        layout_nope, layout_rope, layout_q = _layouts()
        sNope = smem.nope.get_tensor(layout_nope.outer, swizzle=layout_nope.inner)
        sRope = smem.rope.get_tensor(layout_rope.outer, swizzle=layout_rope.inner)
        sQ = smem.q.get_tensor(layout_q.outer, swizzle=layout_q.inner)
        for i in cutlass.range(tidx, TILE * QK, THREADS):
            sQ[i // QK, i % QK, 0] = mQ[i // QK, i % QK]
        for tile in cutlass.range_constexpr(2):
            for i in cutlass.range(tidx, TILE * NOPE, THREADS):
                sNope[i // NOPE, i % NOPE, tile] = mTiles[tile, i // NOPE, i % NOPE]
            for i in cutlass.range(tidx, TILE * ROPE, THREADS):
                sRope[i // ROPE, i % ROPE, tile] = mTiles[tile, i // ROPE, NOPE + i % ROPE]
        cute.arch.fence_proxy("async.shared", space="cta")  # ordinary stores, read by wgmma
        cute.arch.sync_threads()

        if warp_idx < 8:
            cute.arch.setmaxregister_increase(MULTIPLYING_REGISTERS)
            if warp_idx < 4 * self.spec.warpgroups:
                self.multiply((sNope, sRope, sQ), mS, mO, mCycles, p, turns, cta, warp_idx // 4, tidx % 128)
        else:
            cute.arch.setmaxregister_decrease(STORING_REGISTERS)
            if const_expr(self.spec.storing):
                self.store(smem, turns, tidx - 256)

    @cute.jit
    def multiply(
        self,
        shared,
        mS: cute.Tensor,
        mO: cute.Tensor,
        mCycles: cute.Tensor,
        p: Float32,
        turns: Int32,
        cta: Int32,
        wg: Int32,
        tid: Int32,
    ):
        """The loop of one warpgroup."""
        sNope, sRope, sQ = shared
        mma_qk, mma_pv = _tiled_mmas()
        thr_qk, thr_pv = mma_qk.get_slice(tid), mma_pv.get_slice(tid)
        rQ = mma_qk.make_fragment_A(thr_qk.partition_A(sQ))[None, None, None, 0]
        rNope = mma_qk.make_fragment_B(thr_qk.partition_B(sNope))
        rRope = mma_qk.make_fragment_B(thr_qk.partition_B(sRope))
        sV = cute.local_tile(wgmma.transposed(sNope), (COLUMNS, TILE), (wg, 0, None))
        rV = mma_pv.make_fragment_B(thr_pv.partition_B(sV))
        acc_s = cute.make_rmem_tensor(mma_qk.partition_shape_C((TILE, TILE)), Float32)
        acc_o = cute.make_rmem_tensor(mma_pv.partition_shape_C((TILE, COLUMNS)), Float32)
        rP = mma_pv.make_fragment_A(mma_pv.partition_shape_A((TILE, TILE)))
        acc_s.fill(0.0)
        acc_o.fill(0.0)
        rP.fill(p.to(BFloat16))
        rope_blocks = [(NOPE // 16 + k, k) for k in range(ROPE // 16)]
        nope_blocks = [(k, k) for k in range(NOPE // 16)]
        key_blocks = [(k, k) for k in range(TILE // 16)]

        start = cute.arch.clock64()
        for _ in cutlass.range(turns, unroll=1):
            warpgroup.fence()
            if const_expr(self.spec.schedule != "pv"):
                wgmma.issue(mma_qk, acc_s, rQ, rRope[None, None, None, wg], False, rope_blocks)
                wgmma.issue(mma_qk, acc_s, rQ, rNope[None, None, None, wg], True, nope_blocks)
                warpgroup.commit_group()
            if const_expr(self.spec.schedule != "qk"):
                # the two warpgroups begin with different tiles, as they would with their own P
                wgmma.issue(mma_pv, acc_o, rP, rV[None, None, None, wg], True, key_blocks)
                wgmma.issue(mma_pv, acc_o, rP, rV[None, None, None, 1 - wg], True, key_blocks)
                warpgroup.commit_group()
            warpgroup.wait_group(0)
        if tid == 0:
            mCycles[cta, wg] = cute.arch.clock64() - start
        cute.autovec_copy(acc_s, thr_qk.partition_C(mS[cta, wg, None, None]))
        gO = cute.local_tile(mO[cta, None, None], (TILE, COLUMNS), (0, wg))
        cute.autovec_copy(acc_o, thr_pv.partition_C(gO))

    @cute.jit
    def store(self, smem, turns: Int32, tid: Int32):
        """Stores both tiles once a turn: 16-byte pieces, each warp 512 bytes in a row.

        All pieces of a thread are 16 rows, 64 columns or a tile apart, so where tiles repeat at these distances they
        are the same and one of them, read before, is stored everywhere.
        """
        first = cute.assume(8 * tid, divby=8)
        nope_blocks = cute.make_layout((8, PIECES, 2), stride=(1, 8 * 128, TILE * NOPE))
        rope_blocks = cute.make_layout((8, ROPE_PIECES, 2), stride=(1, 8 * 128, TILE * ROPE))
        nope = cute.make_tensor(smem.nope.data_ptr() + first, nope_blocks)
        rope = cute.make_tensor(smem.rope.data_ptr() + first, rope_blocks)
        piece = cute.make_rmem_tensor(8, BFloat16)
        cute.autovec_copy(nope[None, 0, 0], piece)
        for _ in cutlass.range(turns, unroll=1):
            for tile in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(PIECES):
                    cute.autovec_copy(piece, nope[None, i, tile])
                for i in cutlass.range_constexpr(ROPE_PIECES):
                    cute.autovec_copy(piece, rope[None, i, tile])
            cute.arch.fence_proxy("async.shared", space="cta")  # as a producer for wgmma; also keeps each turn's stores
