"""Stores a rank's states to its peers, waits for theirs, and merges: one launch over memory that GPUs share."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.merge.kernels.merge import DTYPES, MergeKernel, MergeRow, Strided, row_address
from cute_kernels.merge.peers_spec import CTAS, FLAG_BYTES, PeerMergeSpec
from cute_kernels.merge.spec import VECTOR_BYTES


class PeerMergeKernel:
    """Rows of this rank and of all others -> out (b, s, h, d), lse (b, s, h), in one launch on each rank.

    A row is d values, then a float32 log-sum-exp, padded to 16 bytes. The rows of a rank are (b, s, all heads); the
    result has h heads, all of them or this rank's. CTA c of each rank has the rows c, c + CTAS, ... of a result:

    1. It stores this rank's state of these rows into the buffer of each rank, this one included.
    2. It stores a flag at each peer, with release semantics at system scope: a rank that sees the flag sees the rows.
    3. It waits for the flags of CTA c of all peers, with acquire semantics.
    4. It merges the rows in its own buffer, in the order of ranks: the same bits every time.

    The flag is the number of the launch. The kernel counts it in device memory, so graphs can be replayed and nothing
    is ever reset. A buffer has two halves for odd and even launches. A rank begins launch n + 1 after it has seen flag
    n of every peer, which a peer stores once its launch n - 1 has ended: so nobody reads the half that launch n + 1
    writes.

    Every CTA that has rows stores before it waits, and waits only for stores: no order of CTAs makes ranks wait for
    each other for ever. CTAs without rows do neither (docs/journal/context_parallel.md, v2).

    The launch begins while the kernel before it ends. It does not let the next kernel begin: CTAs of that kernel would
    keep exchanges of other groups on this GPU from an SM, whose peers then wait for them. The wait has a limit, because
    a rank may have died. It then leaves the number of that rank, plus one, at `report`, in host memory, and traps.

    | buffer of a rank | bytes                                         |
    |------------------|-----------------------------------------------|
    | flags            | 4 x CTAS for each rank, `FLAG_BYTES` in all   |
    | half 0, half 1   | ranks x rows of a result x bytes of a row     |

    There is no shared memory. Barriers: one after the stores, one after the wait.
    """

    def __init__(self, spec: PeerMergeSpec) -> None:
        self.spec = spec
        self.dtype = DTYPES[spec.dtype]
        self.rows = MergeKernel(spec.merge)

    @cute.jit
    def __call__(
        self,
        mSink: cute.Tensor | None,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        rows: Int64,
        peers: Int64,
        counts: Int64,
        report: Int64,
        half_bytes: Int64,
        limit_ns: Int64,
        world_size: Int32,
        rank: Int32,
        all_heads: Int32,
        head_shift: Int32,
        stream: cuda.CUstream,
    ):
        """Launches the kernel.

        Args:
            mSink: (h,) float32, or None.
            mOut: (b, s, h, d).
            mLse: (b, s, h) float32.
            rows: address of this rank's rows, (b, s, all_heads) without gaps.
            peers: address of world_size int64, the addresses of the ranks' buffers as this GPU sees them.
            counts: address of `CTAS` int32 that start at 0.
            report: address of an int32 in host memory.
            half_bytes: bytes of half a buffer.
            limit_ns: nanoseconds to wait for a peer.
            world_size: number of ranks.
            rank: number of this rank.
            all_heads: heads of a rank's rows.
            head_shift: rank p merges from head p x head_shift on: h, or 0 if each rank merges all heads.
        """
        batch, s, heads = (Int32(mOut.shape[i]) for i in range(3))
        divisors = tuple(cute.fast_divmod_create_divisor_v2(n) for n in (heads, s, world_size))
        addresses = (rows, peers, counts, report)
        shape = (batch * s * heads, world_size, rank, all_heads, head_shift)
        self._kernel(mSink, mOut, mLse, addresses, half_bytes, limit_ns, shape, divisors).launch(
            grid=[CTAS, 1, 1], block=[self.spec.threads, 1, 1], stream=stream, min_blocks_per_mp=1, use_pdl=True
        )

    @cute.kernel
    def _kernel(
        self,
        mSink,  # None without a sink
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        addresses: tuple,
        half_bytes: Int64,
        limit_ns: Int64,
        shape: tuple,
        divisors: tuple,
    ) -> None:
        rows, peers, counts, report = addresses
        num_rows, world_size, rank, _, _ = shape
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_wait()  # waits for what earlier kernels write: rows, counters, sinks
        count = cute.make_ptr(Int32, counts + 4 * Int64(cta), AddressSpace.gmem, assumed_align=4)
        epoch = count.load() + 1
        half = FLAG_BYTES + Int64(epoch & 1) * half_bytes
        own_rows = (num_rows - cta + (CTAS - 1)) // CTAS

        self._store_to_peers(rows, peers, half, shape, divisors, own_rows, cta, tid)
        cute.arch.sync_threads()
        own = _address_of(peers, rank)
        if tid < world_size and tid != rank and own_rows > 0:
            theirs = _flag(_address_of(peers, tid), rank, cta)
            cute.arch.store(theirs, epoch, sem="release", scope="sys")
            self._await(_flag(own, tid, cta), epoch, limit_ns, report, tid)
        cute.arch.sync_threads()
        self._merge(mSink, mOut, mLse, own + half, shape, divisors, own_rows, cta, tid)
        if tid == 0:
            count.store(epoch)

    @cute.jit
    def _store_to_peers(
        self,
        rows: Int64,
        peers: Int64,
        half: Int64,
        shape: tuple,
        divisors: tuple,
        own_rows: Int32,
        cta: Int32,
        tid: Int32,
    ):
        """Copies this rank's state of the CTA's rows, to the next rank first: ranks begin with different targets."""
        spec = self.spec
        num_rows, world_size, rank, all_heads, head_shift = shape
        by_heads, _, by_ranks = divisors
        vectors = own_rows * world_size * spec.row_vectors
        for first in cutlass.range(tid, vectors, spec.threads * spec.copies, unroll=1):
            copies = []
            for u in cutlass.range_constexpr(spec.copies):
                wanted = first + u * spec.threads < vectors
                i = cutlass.min(first + u * spec.threads, vectors - 1)
                vector = i % spec.row_vectors
                turn, step = divmod(i // spec.row_vectors, by_ranks)
                peer = rank + step
                peer = cutlass.select_(peer >= world_size, peer - world_size, peer)
                row = cta + turn * CTAS
                query, head = divmod(row, by_heads)
                from_row = Int64(query) * all_heads + peer * head_shift + head
                to_row = Int64(rank) * num_rows + row
                source = rows + (from_row * spec.row_vectors + vector) * VECTOR_BYTES
                target = _address_of(peers, peer) + half + (to_row * spec.row_vectors + vector) * VECTOR_BYTES
                copies.append((target, _load16(source), wanted))
            for u in cutlass.range_constexpr(spec.copies):
                _store16(*copies[u])

    @cute.jit
    def _await(self, flag: cute.Pointer, epoch: Int32, limit_ns: Int64, report: Int64, peer: Int32):
        """Waits until the flag has reached this launch's number, or traps.

        The peer may be one launch ahead. Any other number is old: CTAs without rows store no flag, so their flags may
        be from 2^31 launches ago and more, and seem newer. Numbers wrap around after 2^32 launches.
        """
        begin = Int64(cute.arch.globaltimer())
        ahead = cute.arch.load(flag, Int32, sem="acquire", scope="sys") - epoch
        while ahead != 0 and ahead != 1:
            ahead = cute.arch.load(flag, Int32, sem="acquire", scope="sys") - epoch
            if ahead != 0 and ahead != 1 and Int64(cute.arch.globaltimer()) - begin > limit_ns:
                _report_and_trap(report, peer + 1)

    @cute.jit
    def _merge(
        self,
        mSink,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        states: Int64,
        shape: tuple,
        divisors: tuple,
        own_rows: Int32,
        cta: Int32,
        tid: Int32,
    ):
        """Merges the CTA's rows out of this rank's buffer."""
        spec, merge = self.spec, self.spec.merge
        num_rows, world_size, _, _, _ = shape
        by_heads, by_queries, _ = divisors
        row_bytes = const_expr(spec.row_vectors * VECTOR_BYTES)
        at_once = const_expr(spec.threads // merge.lanes)
        for first in cutlass.range(0, own_rows, at_once, unroll=1):
            turn = first + tid // merge.lanes
            row_index = cta + cutlass.min(turn, own_rows - 1) * CTAS
            query, head = divmod(row_index, by_heads)
            batch, seq = divmod(query, by_queries)
            state = states + Int64(row_index) * row_bytes
            apart = Int64(num_rows) * row_bytes
            row = MergeRow(
                Strided(state + Int64(tid % merge.lanes) * VECTOR_BYTES, apart),
                Strided(state + (row_bytes - VECTOR_BYTES), apart),
                None,
                mSink[head] if spec.has_sink else None,
                row_address(mOut, batch, seq, head),
                row_address(mLse, batch, seq, head),
            )
            self.rows.merge_row(row, None, world_size, turn < own_rows, tid, Int32(0))

    def fake_arguments(self) -> tuple:
        """Returns the arguments for compilation: any strides of the leading dimensions of the result."""
        spec = self.spec
        shape = tuple(cute.sym_int() for _ in range(3))
        strides = [cute.sym_int64(divisibility=VECTOR_BYTES * 8 // self.dtype.width) for _ in range(3)]
        sink = make_fake_tensor(Float32, shape[2:], (cute.sym_int64(),), assumed_align=4)
        return (
            sink if spec.has_sink else None,
            make_fake_tensor(self.dtype, (*shape, spec.d), (*strides, 1), assumed_align=16),
            make_fake_tensor(Float32, shape, tuple(cute.sym_int64() for _ in range(3)), assumed_align=4),
            *[Int64(0)] * 6,
            *[Int32(1)] * 4,
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )


def _address_of(peers: Int64, rank: Int32) -> Int64:
    """Returns the address of a rank's buffer."""
    return cute.make_ptr(Int64, peers + 8 * Int64(rank), AddressSpace.gmem, assumed_align=8).load()


def _flag(buffer: Int64, rank: Int32, cta: Int32) -> cute.Pointer:
    """Returns the flag that a CTA of a rank stores in a buffer."""
    return cute.make_ptr(Int32, buffer + 4 * Int64(rank * CTAS + cta), AddressSpace.gmem, assumed_align=4)


def _load16(address: Int64) -> tuple:
    """Loads four words from global memory."""
    return cute.arch.inline_ptx(
        "ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def _store16(address: Int64, words: tuple, wanted) -> None:
    """Stores four words to global memory, or nothing; without a branch, which would keep loads from overlapping."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r1}, 0; @p st.global.v4.b32 [{$r0}], {{$r2}, {$r3}, {$r4}, {$r5}}; }",
        read_only_args=[address, Int32(wanted), *words],
    )


def _report_and_trap(report: Int64, value: Int32) -> None:
    """Writes a number to host memory, waits until it is there, and ends the launch with an error."""
    cute.arch.inline_ptx(
        "st.relaxed.sys.global.b32 [{$r0}], {$r1}; fence.sc.sys; trap;", read_only_args=[report, value]
    )
