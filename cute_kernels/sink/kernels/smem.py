"""Shared memory and tiled MMAs of the kernels of sink attention."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.device.pipeline import Pipelines, initialize
from cute_kernels.sink.backward_spec import DS_STAGES, QUERIES, SinkBackwardSpec
from cute_kernels.sink.kernels.scheduler import RECORD, WORK_STAGES
from cute_kernels.sink.kernels.views import DTYPES
from cute_kernels.sink.spec import ROWS, SinkQuerySpec


def view(field, layout) -> cute.Tensor:
    """Returns a field of shared memory as a tensor."""
    return field.get_tensor(layout.outer, swizzle=layout.inner)


@cute.jit
def start(smem, edges: cutlass.Constexpr[Pipelines], tmas: tuple, warp_idx: Int32, tidx: Int32):
    """Prefetches the descriptors of TMA copies, and initializes the barriers of a CTA; called by all its threads."""
    if warp_idx == 0:
        for tma in tmas:
            cpasync.prefetch_descriptor(tma.atom)
    if tidx == 0:
        smem.work_full.data_ptr()  # in a branch that calls a method of smem, the DSL derives field addresses anew
        initialize(smem, edges)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()


# ---- query-stationary kernels: the forward, and dq


class QueryLayouts(NamedTuple):
    """Layouts in shared memory of a query-stationary kernel."""

    q: Any  # Q, and dO: (64, d, q_stages)
    out: Any  # O or dQ: (64, d, warpgroups)
    kv: Any  # K, and V: (tile, d, stages)


class QueryMmas(NamedTuple):
    """Tiled MMAs of a consumer warpgroup."""

    qk: Any  # S = Q K^T, and dP = dO V^T: both operands in shared memory
    pv: Any  # O += P V, and dQ += dS K: P or dS in registers


def query_layouts(spec: SinkQuerySpec) -> QueryLayouts:
    """Returns the layouts of a spec."""
    row, dtype = LayoutEnum.ROW_MAJOR, DTYPES[spec.dtype]
    tiler = (ROWS, spec.tile, spec.d)
    return QueryLayouts(
        sm90.make_smem_layout_a(row, tiler, dtype, spec.q_stages),
        sm90.make_smem_layout_epi(dtype, row, (ROWS, spec.d), spec.warpgroups),
        sm90.make_smem_layout_b(row, tiler, dtype, spec.stages),
    )


def query_mmas(spec: SinkQuerySpec) -> QueryMmas:
    """Returns the tiled MMAs of a spec."""
    k, mn, one, t = OperandMajorMode.K, OperandMajorMode.MN, (1, 1, 1), DTYPES[spec.dtype]
    registers = warpgroup.OperandSource.RMEM
    return QueryMmas(
        sm90.make_trivial_tiled_mma(t, t, k, k, Float32, one, (ROWS, spec.tile)),
        sm90.make_trivial_tiled_mma(t, t, k, mn, Float32, one, (ROWS, spec.d), registers),
    )


def query_storage(spec: SinkQuerySpec):
    """Makes the struct of shared memory of a query-stationary kernel."""
    layouts, dtype = query_layouts(spec), DTYPES[spec.dtype]
    d_out_size = cute.cosize(layouts.q) if spec.row_operands == 2 else 0

    @cute.struct
    class Shared:
        q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.q)], 1024]
        d_out: cute.struct.Align[cute.struct.MemRange[dtype, d_out_size], 1024]
        out: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.out)], 1024]
        k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.kv)], 1024]
        v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.kv)], 1024]
        work: cute.struct.MemRange[Int32, RECORD * WORK_STAGES]
        work_full: cute.struct.MemRange[Int64, WORK_STAGES]
        work_empty: cute.struct.MemRange[Int64, WORK_STAGES]
        q_full: cute.struct.MemRange[Int64, spec.q_stages]
        q_empty: cute.struct.MemRange[Int64, spec.q_stages]
        k_full: cute.struct.MemRange[Int64, spec.stages]
        k_empty: cute.struct.MemRange[Int64, spec.stages]
        v_full: cute.struct.MemRange[Int64, spec.stages]
        v_empty: cute.struct.MemRange[Int64, spec.stages]
        kept_empty: Int64

    return Shared


class QueryViews(NamedTuple):
    """Tensors that the load warp fills; d_out is None in the forward."""

    q: cute.Tensor
    d_out: Any
    k: cute.Tensor
    v: cute.Tensor


def query_views(smem, spec: SinkQuerySpec) -> QueryViews:
    """Makes the views before the load warp begins: views made where they are used would cost it instructions."""
    layouts = query_layouts(spec)
    return QueryViews(
        view(smem.q, layouts.q),
        view(smem.d_out, layouts.q) if spec.row_operands == 2 else None,
        view(smem.k, layouts.kv),
        view(smem.v, layouts.kv),
    )


# ---- the key-stationary kernel


class KeyLayouts(NamedTuple):
    """Layouts in shared memory of the key-stationary kernel."""

    kv: Any  # K, and V: (keys of the CTA, d, 1)
    q: Any  # Q, and dO: (queries, d, stages)
    d_s: Any  # dS^T: (keys of the CTA, queries, 2); in a pair 4, not 2: own dS and the other's, of two query tiles
    stats: Any  # L and delta: (queries, 1, 2, stages)


class KeyMmas(NamedTuple):
    """Tiled MMAs of a consumer warpgroup."""

    qk: Any  # S^T = K Q^T and dP^T = V dO^T: both operands in shared memory
    kv: Any  # dV += P^T dO and dK += dS^T Q: P^T and dS^T in registers
    dq: Any  # dQ = dS K: dS read by columns from shared memory


def key_layouts(spec: SinkBackwardSpec) -> KeyLayouts:
    """Returns the layouts of a spec."""
    row, dtype = LayoutEnum.ROW_MAJOR, DTYPES[spec.dtype]
    queries = spec.queries
    ds_tiles = DS_STAGES * (2 if spec.pair else 1) if spec.fused else 1
    return KeyLayouts(
        sm90.make_smem_layout_b(row, (ROWS, spec.keys_of_cta, spec.d), dtype, 1),
        sm90.make_smem_layout_b(row, (ROWS, queries, spec.d), dtype, spec.stages),
        sm90.make_smem_layout_b(row, (ROWS, spec.keys_of_cta, queries), dtype, ds_tiles),
        cute.make_layout((queries, 1, 2, spec.stages), stride=(1, queries, queries, 2 * queries)),
    )


class KeyViews(NamedTuple):
    """Tensors that the load warp fills; peer_k is None unless CTAs form pairs."""

    k: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    d_out: cute.Tensor
    stats: cute.Tensor
    peer_k: Any


def key_views(smem, spec: SinkBackwardSpec) -> KeyViews:
    """Makes the views before the load warp begins; see `query_views`."""
    layouts = key_layouts(spec)
    return KeyViews(
        view(smem.k, layouts.kv),
        view(smem.v, layouts.kv),
        view(smem.q, layouts.q),
        view(smem.d_out, layouts.q),
        smem.stats.get_tensor(layouts.stats),
        view(smem.peer_k, peer_k_layout(spec)) if spec.pair else None,
    )


def peer_k_layout(spec: SinkBackwardSpec):
    """Returns the layout of half of the columns of the other CTA's K, in a pair: (keys of the CTA, 64, 1)."""
    shape = (ROWS, spec.keys_of_cta, spec.columns)
    return sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, shape, DTYPES[spec.dtype], 1)


def key_mmas(spec: SinkBackwardSpec) -> KeyMmas:
    """Returns the tiled MMAs of a spec."""
    k, mn, one, t = OperandMajorMode.K, OperandMajorMode.MN, (1, 1, 1), DTYPES[spec.dtype]
    registers = warpgroup.OperandSource.RMEM
    return KeyMmas(
        sm90.make_trivial_tiled_mma(t, t, k, k, Float32, one, (ROWS, spec.queries)),
        sm90.make_trivial_tiled_mma(t, t, k, mn, Float32, one, (ROWS, spec.d), registers),
        sm90.make_trivial_tiled_mma(t, t, mn, mn, Float32, one, (QUERIES, spec.columns)),
    )


def key_storage(spec: SinkBackwardSpec):
    """Makes the struct of shared memory. If fused, it has 226 KB (d 64) or 225 KB (d 128) of 227 KB."""
    layouts, dtype = key_layouts(spec), DTYPES[spec.dtype]
    ds_size = cute.cosize(layouts.d_s) if spec.fused else 64
    dkv_size = 0 if spec.reuses else cute.cosize(layouts.kv)
    added_size = spec.warpgroups * QUERIES * spec.d if spec.fused else 32
    peer_k_size = 0
    if spec.pair:
        peer_k_size, added_size = cute.cosize(peer_k_layout(spec)), QUERIES * spec.columns

    @cute.struct
    class Shared:
        k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.kv)], 1024]
        v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.kv)], 1024]
        d_k: cute.struct.Align[cute.struct.MemRange[dtype, dkv_size], 1024]
        d_v: cute.struct.Align[cute.struct.MemRange[dtype, dkv_size], 1024]
        peer_k: cute.struct.Align[cute.struct.MemRange[dtype, peer_k_size], 1024]
        q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.q)], 1024]
        d_out: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.q)], 1024]
        d_s: cute.struct.Align[cute.struct.MemRange[dtype, ds_size], 1024]
        added: cute.struct.Align[cute.struct.MemRange[Float32, added_size], 128]
        stats: cute.struct.Align[cute.struct.MemRange[Float32, cute.cosize(layouts.stats)], 128]
        work: cute.struct.MemRange[Int32, RECORD * WORK_STAGES]
        work_full: cute.struct.MemRange[Int64, WORK_STAGES]
        work_empty: cute.struct.MemRange[Int64, WORK_STAGES]
        kv_full: Int64
        kv_empty: Int64
        q_full: cute.struct.MemRange[Int64, spec.stages]
        q_empty: cute.struct.MemRange[Int64, spec.stages]
        ds_full: cute.struct.MemRange[Int64, DS_STAGES]
        ds_empty: cute.struct.MemRange[Int64, DS_STAGES]
        added_full: cute.struct.MemRange[Int64, max(spec.adders, 1)]
        added_empty: cute.struct.MemRange[Int64, max(spec.adders, 1)]

    return Shared
