"""Makes block tables from lists of blocks: each query token and KV head becomes a sequence of the blocks it lists."""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.gqa.block_table_spec import BlockTableSpec

WARP = 32


class Pages(NamedTuple):
    """The cache in virtual pages, as in `cute_kernels.gqa.blocks_plan`; sizes are powers of two.

    block_shift    log2 of the tokens of a block
    rows_shift     log2 of the tokens of a virtual page
    page_shift     log2 of the tokens of a page; not used without a block table
    num_pages      pages of the cache
    page, part, head  steps of virtual page numbers
    """

    block_shift: Int32
    rows_shift: Int32
    page_shift: Int32
    num_pages: Int32
    page: Int32
    part: Int32
    head: Int32


class BlockTableKernel:
    """Lists (batch, s_q, heads, n) -> a table (rows, n x pages of a block) and lengths (rows,), in one launch.

    One warp has a row: a sequence, query token and list. Its table has the virtual pages of the whole blocks of the
    list, in the list's order, then those of the last block if that is partly filled. So missing keys are past the end
    of the row's length, where the decode kernel masks them. The list is read 32 blocks at a time:

    | step                              | instructions of a warp                                    |
    |-----------------------------------|-----------------------------------------------------------|
    | blocks listed before              | 32 shuffles for each 32 blocks up to these                |
    | whole blocks to the front         | a vote, a store to shared memory                          |
    | page numbers, virtual pages       | a load, then a store, for each 32 virtual pages           |

    So a list of 32 takes two round trips to memory: list and length, then page numbers. Blocks past the end of what the
    query sees are left out; for a page that does not exist the virtual page is -1.
    """

    def __init__(self, spec: BlockTableSpec) -> None:
        self.spec = spec
        self.threads = spec.warps * WARP

    @cute.jit
    def __call__(
        self,
        mIndices: cute.Tensor,
        mPages: cute.Tensor | None,
        mLengths: cute.Tensor,
        mTable: cute.Tensor,
        mKeys: cute.Tensor,
        capacity: Int32,
        causal: Int32,
        block_shift: Int32,
        rows_shift: Int32,
        page_shift: Int32,
        num_pages: Int32,
        page_step: Int32,
        part_step: Int32,
        head_step: Int32,
        stream: cuda.CUstream,
    ):
        """Launches the kernel. `capacity`: most tokens of a sequence, fewer than 2^30."""
        _, s_q, heads, _ = mIndices.shape
        pages = Pages(block_shift, rows_shift, page_shift, num_pages, page_step, part_step, head_step)
        divisors = tuple(cute.fast_divmod_create_divisor_v2(Int32(n)) for n in (heads, s_q))
        self._kernel(mIndices, mPages, mLengths, mTable, mKeys, capacity, causal, pages, divisors).launch(
            grid=[cute.ceil_div(mKeys.shape[0], self.spec.warps), 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def _kernel(
        self,
        mIndices: cute.Tensor,
        mPages: cute.Tensor | None,
        mLengths: cute.Tensor,
        mTable: cute.Tensor,
        mKeys: cute.Tensor,
        capacity: Int32,
        causal: Int32,
        pages: Pages,
        divisors: tuple,
    ) -> None:
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        smem = cutlass.utils.SmemAllocator()
        sFound = smem.allocate_tensor(Int32, cute.make_layout((WARP + 1, self.spec.warps)), byte_alignment=4)
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()  # waits for what earlier kernels write: lists, lengths, tables
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), tid % WARP
        row = cta * self.spec.warps + warp
        by_heads, by_s_q = divisors
        if row < mKeys.shape[0]:
            query_row, head = divmod(row, by_heads)
            b, query = divmod(query_row, by_s_q)
            n = Int32(mIndices.shape[3])
            block = self._block(mIndices, b, query, head, lane, n)  # loaded at the same time as the length
            length = cutlass.min(cutlass.max(mLengths[b], 0), capacity)
            end = length  # end of what the query sees
            if causal == 1:
                end = cutlass.max(length - by_s_q.divisor + query + 1, 0)
            whole, rest = end >> pages.block_shift, end & ((Int32(1) << pages.block_shift) - 1)
            per_block = pages.block_shift - pages.rows_shift  # log2 of the virtual pages of a block
            filled = (rest + (Int32(1) << pages.rows_shift) - 1) >> pages.rows_shift  # virtual pages of the last block
            written, keys, has_last = Int32(0), Int32(0), Int32(0)
            for begin in cutlass.range(0, n, WARP, unroll=1):
                is_new = self._is_new(mIndices, b, query, head, block, begin, lane, n)
                is_whole = block >= 0 and block < whole and is_new
                has_last |= cute.arch.vote_ballot_sync(block == whole)
                found = cute.arch.vote_ballot_sync(is_whole)
                many = Int32(cute.arch.popc(found))
                if is_whole:
                    before = found & ((Int32(1) << lane) - 1)
                    sFound[Int32(cute.arch.popc(before)), warp] = block
                keys += many << pages.block_shift
                entries = many << per_block
                if begin + WARP >= n and has_last != 0:
                    if lane == 0:
                        sFound[many, warp] = whole
                    keys += rest
                    entries += filled
                cute.arch.sync_warp()
                for i in cutlass.range(lane, entries, WARP, unroll=1):
                    part = i & ((Int32(1) << per_block) - 1)
                    number = self._virtual_page(mPages, pages, b, head, sFound[i >> per_block, warp], part)
                    mTable[row, written + i] = number
                cute.arch.sync_warp()
                written += entries
                block = self._block(mIndices, b, query, head, begin + WARP + lane, n)
            if lane == 0:
                mKeys[row] = keys

    @cute.jit
    def _block(self, mIndices: cute.Tensor, b: Int32, query: Int32, head: Int32, i: Int32, n: Int32) -> Int32:
        """Returns the i-th block of a list; -1 past its end."""
        block = Int32(-1)
        if i < n:
            block = mIndices[b, query, head, i]
        return block

    @cute.jit
    def _is_new(
        self,
        mIndices: cute.Tensor,
        b: Int32,
        query: Int32,
        head: Int32,
        block: Int32,
        begin: Int32,
        lane: Int32,
        n: Int32,
    ):
        """Returns whether this lane's block, number begin + lane, is not listed before."""
        equal = Int32(0)
        for first in cutlass.range(0, begin, WARP, unroll=1):
            other = self._block(mIndices, b, query, head, first + lane, n)
            for i in cutlass.range_constexpr(WARP):
                equal += cutlass.select_(cute.arch.shuffle_sync(other, i) == block, Int32(1), Int32(0))
        for i in cutlass.range_constexpr(WARP - 1):
            is_before = cute.arch.shuffle_sync(block, i) == block and i < lane
            equal += cutlass.select_(is_before, Int32(1), Int32(0))
        return equal == 0

    @cute.jit
    def _virtual_page(
        self, mPages: cute.Tensor | None, pages: Pages, b: Int32, head: Int32, block: Int32, part: Int32
    ) -> Int32:
        """Returns the number of the part-th virtual page of a block of sequence b; -1 if the page does not exist."""
        first = (block << (pages.block_shift - pages.rows_shift)) + part  # virtual pages of the sequence before it
        page, in_page = b, first
        if const_expr(self.spec.paged):
            assert mPages is not None
            per_page = pages.page_shift - pages.rows_shift
            page = mPages[b, first >> per_page]
            in_page = first & ((Int32(1) << per_page) - 1)
        number = page * pages.page + in_page * pages.part + head * pages.head
        return cutlass.select_(page >= 0 and page < pages.num_pages, number, Int32(-1))

    def fake_arguments(self) -> tuple:
        """Returns the arguments for compilation: any strides of the lists and the table but the last."""
        batch, s_q, heads, n, rows, width = (cute.sym_int() for _ in range(6))

        def strided(*shape):
            strides = tuple(cute.sym_int64() for _ in shape[:-1])
            return make_fake_tensor(Int32, shape, (*strides, 1), assumed_align=4)

        indices = strided(batch, s_q, heads, n)
        pages = strided(batch, cute.sym_int()) if self.spec.paged else None
        lengths = make_fake_tensor(Int32, (batch,), (cute.sym_int64(),), assumed_align=4)
        keys = make_fake_tensor(Int32, (rows,), (1,), assumed_align=4)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return indices, pages, lengths, strided(rows, width), keys, *[Int32(1)] * 9, stream
