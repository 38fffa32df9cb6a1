"""GQA decoding on SM90 over a cache of int8, e4m3 or 16-bit numbers: persistent split-KV flash decoding.

A CTA decodes a block of query rows (tokens x heads) of one KV head over a range of the line of key tiles (see
scheduler.py), in tiles of 128 keys. Operands are swapped (swap_ab): keys are rows of the matrix products and query rows
their columns, S^T = K Q^T, O^T = V^T P^T with mma.sync m16n8k16. So 8 query rows fill an instruction, and a byte of K
or V is widened in the registers of the one warp that uses it (device/operands.py). Each consumer warp has 16 keys of
every tile (32 of 4-bit keys, in tiles of 256), and its own row_max, row_sum and O: warps meet only where a sequence
ends. With d 512 a team of four warps shares the keys, and each warp has a quarter of d: one warp lacks registers for
all of O. A team adds up S once a tile (qk.py).

Scales of whole heads join the softmax scale and the result. Scales of tokens multiply S, and P before it is rounded.
Scales of groups multiply partial sums of S, and P once a group. So dequantization costs a few instructions a key.

Q is scaled by a power of two per row, so that float16 holds it whatever its size; S is scaled back in float32.

Roles (384 threads; 160 without warps 9 to 11 and with tiles of 64 keys if a token has 512 bytes)
  warp 0..7   consumers, 200 registers: 16 keys of each tile, 32 of 4-bit keys, or a part of d of 16 (consumer.py:
              load_q.py, qk.py, softmax.py, pv.py, spread_nan.py), then the results (epilogue.py, merge.py)
  warp 8      load, 104 registers: TMA copies of K and V, `stages` tiles ahead (load.py)
  warp 9..11  scales of tokens, if there are any (scales.py)

Mbarriers (pipelines.py): arrivals and bytes per phase
int8, d 128, scales of tokens
  kv_full[4]         33 + 32,768 bytes  K, V and their scales are in the stage
  kv_empty[4]       256                 consumers have K and V in registers
  warp_o_empty      256                 consumers have read the O of all warps
bfloat16, d 128
  kv_full[2]          1 + 65,536 bytes  K and V are in the stage
  kv_empty[2]       256                 consumers have K and V in registers
  warp_o_empty      256                 consumers have read the O of all warps
Named barriers: CONSUMERS, all consumers, which hand over Q and the results of warps; TEAM + i, the warps of team i,
which exchange parts of S.

Shared memory is listed in smem.py; with int8, d 128, 8 columns and scales of tokens: 4 stages, 178 KB.

Timeline of a stage: `kv_empty` completes; the load warp starts its copies and the scale warps store their scales;
`kv_full` completes; consumers do QK, load V into registers and release the stage; softmax and PV overlap with the next
copies.
Nothing waits for global memory between two sequences: Q, page numbers and scales are requested before.

The last CTA of a sequence that several CTAs share merges it: each CTA writes O, row_max and row_sum in float32 and
counts itself, and the CTA that sees the full count adds them up in order. No CTA waits, and the order of additions is
fixed. Short sequences of small batches are shared by a cluster of CTAs instead, which read each other's shared memory.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.device.pipeline import initialize
from cute_kernels.gqa.codes import element
from cute_kernels.gqa.kernels.arguments import (
    Call,
    Divisors,
    PageTable,
    Scales,
    Scoring,
    Scratch,
    Sizes,
    Tensors,
    Tma,
    Work,
)
from cute_kernels.gqa.kernels.cache_tiles import fake_caches, tma_copy
from cute_kernels.gqa.kernels.consumer import ConsumerWarp
from cute_kernels.gqa.kernels.load import LoadWarp
from cute_kernels.gqa.kernels.pipelines import pipelines
from cute_kernels.gqa.kernels.scales import ScaleWarp
from cute_kernels.gqa.kernels.scheduler import WorkList
from cute_kernels.gqa.kernels.smem import allocate
from cute_kernels.gqa.spec import GqaDecodeSpec

LOAD_REGISTERS, CONSUMER_REGISTERS = 104, 200  # 104 + 2 * 200 = 504 = 3 * 168, the registers of 384 threads at launch


class GqaDecodeKernel:
    """The kernel that the module's docstring describes. `spec` holds everything that is fixed at compile time."""

    def __init__(self, spec: GqaDecodeSpec):
        reasons = spec.can_implement()
        if reasons:
            raise ValueError("; ".join(reasons))
        self.spec = spec
        self.dtype = spec.codes.element()
        # eight consumer warps can take registers from a warpgroup of load and scale warps
        self.threads = 32 * spec.warps + (128 if spec.warps == 8 else 32)
        self.load = LoadWarp(spec)
        self.scales = ScaleWarp(spec)
        self.consumer = ConsumerWarp(spec)

    def fake_arguments(self) -> tuple:
        """Returns shapes, strides and alignments that the compiled callable accepts, in the order of `__call__`."""
        spec = self.spec
        batch, s_q, h_q, h_kv, outer, rows = (cute.sym_int() for _ in range(6))
        q_dtype = element(spec.q_dtype)

        def strided(dtype, shape, align):
            strides = [cute.sym_int64(divisibility=align // (dtype.width // 8)) for _ in shape[:-1]]
            return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=align)

        q = strided(q_dtype, (batch, s_q, h_q, spec.d), 8)
        out = strided(q_dtype, (batch, s_q, h_q, spec.d), 8)
        lse = make_fake_tensor(Float32, (batch, s_q, h_q), tuple(cute.sym_int64() for _ in range(3)), assumed_align=4)
        k, v = fake_caches(spec, {"o": outer, "r": rows, "h": h_kv, "d": spec.d})
        table = strided(Int32, (batch, cute.sym_int()), 4) if spec.paged else None
        lengths = make_fake_tensor(Int32, (batch,), (cute.sym_int64(),), assumed_align=4)
        starts = make_fake_tensor(Int32, (batch,), (cute.sym_int64(),), assumed_align=4) if spec.starts else None
        sink = make_fake_tensor(Float32, (h_q,), (1,), assumed_align=4)
        scales = [Int64(0)] * 10
        alibi = [Int64(0)] * 2
        numbers = (Float32(1.0), Float32(1.0), *[Int32(1)] * 5, Int64(0), Int64(0))
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return (q, k, v, table, lengths, starts, sink, out, lse, *scales, *alibi, *numbers, stream)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mTable: cute.Tensor | None,
        mLengths: cute.Tensor,
        mStarts: cute.Tensor | None,
        mSink: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        k_scale: Int64,
        k_scale_outer: Int64,
        k_scale_head: Int64,
        k_scale_row: Int64,
        k_scale_group: Int64,
        v_scale: Int64,
        v_scale_outer: Int64,
        v_scale_head: Int64,
        v_scale_row: Int64,
        v_scale_group: Int64,
        alibi: Int64,
        alibi_batch: Int64,
        softmax_scale: Float32,
        softcap: Float32,
        window: Int32,
        causal: Int32,
        ranges: Int32,
        splits: Int32,
        ctas: Int32,
        scratch: Int64,
        counters: Int64,
        stream: cuda.CUstream,
    ):
        """Launches `ctas` CTAs.

        Scales, slopes, scratch and counters come as addresses, which cost the host less than tensors; the strides of
        scales (outer, head, row, group) and of slopes are in elements. `window` is below 2^30. The line of key tiles is
        cut into `ranges`, or each sequence into `splits` if that is not 0. `scratch` has room for 2 x ranges x heads of
        the cache x blocks of query rows (or splits x batch instead of ranges) partials of columns x (d + 2) float32;
        `counters` has a word for each sequence, head of the cache and block of query rows, 0 before and after.
        """
        spec = self.spec
        batch, s_q, h_q, _ = mQ.shape
        h_kv = mK.shape[spec.cache_axes.index("h")]
        ratio = h_q // h_kv
        blocks = cute.ceil_div(ratio * s_q, spec.columns)
        k_tma, v_tma = tma_copy(spec, "k", mK), tma_copy(spec, "v", mV)
        page_size = Int32(spec.box_rows)
        capacity = Int32(mK.shape[spec.cache_axes.index("r")])
        num_pages = Int32(mK.shape[spec.cache_axes.index("o")])
        if const_expr(spec.paged):
            if const_expr(spec.box_rows == spec.keys_per_tile):
                page_size = capacity
            assert mTable is not None
            capacity = page_size * Int32(mTable.shape[1])
        head_blocks = h_kv * blocks
        num_work_tiles = head_blocks * ranges
        if splits > 0:
            num_work_tiles = head_blocks * splits * batch
        if const_expr(spec.cluster > 1):
            num_work_tiles = head_blocks * spec.cluster * batch
        divisors = Divisors(
            *(
                cute.fast_divmod_create_divisor_v2(Int32(n))
                for n in (head_blocks, blocks, ratio, ranges, cutlass.max(splits, 1))
            )
        )
        call = Call(
            Tensors(mQ, mTable, mLengths, mStarts, mSink, mOut, mLse),
            Scales(k_scale, k_scale_outer, k_scale_head, k_scale_row, k_scale_group),
            Scales(v_scale, v_scale_outer, v_scale_head, v_scale_row, v_scale_group),
            Scoring(alibi, alibi_batch, softmax_scale, softcap),
            Sizes(capacity, window, Int32(s_q), causal),
        )
        self.kernel(
            k_tma,
            v_tma,
            call,
            page_size,
            num_pages,
            Work(ranges, splits, num_work_tiles),
            Scratch(scratch, counters),
            divisors,
        ).launch(
            grid=[ctas, 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            cluster=[spec.cluster, 1, 1] if const_expr(spec.cluster > 1) else None,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        k_tma: Tma,
        v_tma: Tma,
        call: Call,
        page_size: Int32,
        num_pages: Int32,
        work: Work,
        scratch: Scratch,
        divisors: Divisors,
    ):
        """Dispatches the roles."""
        spec = self.spec
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), tidx % 32
        if warp_idx == spec.warps:
            cpasync.prefetch_descriptor(k_tma.atom)
            cpasync.prefetch_descriptor(v_tma.atom)

        smem = allocate(spec)
        if tidx == 0:
            initialize(smem, pipelines(spec))
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()  # waits for what earlier kernels write: q, lengths, new tokens, the counters

        work_list = WorkList(call.tensors.mLengths, call.tensors.mStarts, call.sizes, work, divisors)
        page_shift = 31 - Int32(cute.arch.clz(page_size)) if const_expr(spec.paged) else Int32(0)
        page_table = PageTable(call.tensors.mTable, page_shift, page_size, num_pages)
        if warp_idx >= spec.warps:
            if const_expr(spec.warps == 8):
                cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            if warp_idx == spec.warps:
                self.load.run(k_tma, v_tma, work_list, page_table, smem, lane)
            elif warp_idx <= spec.warps + spec.scale_warps:
                if const_expr(spec.scale_warps > 0):
                    self.scales.run(call.k_scales, call.v_scales, work_list, page_table, smem, warp_idx, lane)
        else:
            if const_expr(spec.warps == 8):
                cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.consumer.run(call, work_list, scratch, smem, warp_idx, lane)
