"""Pipelines of the kernels of sink attention, and their named barriers.

Most edges divide tile numbers as signed numbers; the edges of K and V mask them. With unsigned division on all edges
the forward took 1.006 (d 64) and 1.019 (d 128) of the time, because ptxas ordered the softmax differently.
"""

from enum import IntEnum
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32

from cute_kernels.device.pipeline import Pipeline, Pow2Pipeline, SignedPipeline, Slot
from cute_kernels.sink.backward_spec import DS_STAGES, SinkBackwardSpec
from cute_kernels.sink.kernels.scheduler import WORK_STAGES
from cute_kernels.sink.spec import ROWS, SinkQuerySpec


class ForwardNamedBarrier(IntEnum):
    """Named barriers; 0 is for `sync_threads`. Consumer warpgroup w, one of at most 4, has TURN + w and STORE + w.

    A store waits at STORE + w twice, before it writes shared memory and after. One id serves both: the same 128 threads
    wait, in the same order. TURN + w needs its own: the warpgroup before w arrives there without waiting, while w may
    be at its store.
    """

    TURN = 1  # to 4, 256 threads: w waits for its turn to issue products, and the warpgroup before it arrives
    STORE = 5  # to 8, 128 threads: the previous TMA store has read O in shared memory; the new O is in shared memory


class QueryGradNamedBarrier(IntEnum):
    """Named barriers; 0 is for `sync_threads`. Consumer warpgroup w has STORE + w.

    A store waits there twice, before it writes shared memory and after. One id serves both: the same 128 threads wait,
    in the same order.
    """

    STORE = 1  # to 3, 128 threads: the previous TMA store has read dQ in shared memory; the new dQ is in shared memory


class KeyGradNamedBarrier(IntEnum):
    """Named barriers; 0 is for `sync_threads`. In a pair, consumer warpgroup w, one of two, has SEND + w.

    STORE serves two waits, before and after dK and dV are written to shared memory, because the same threads wait at
    both, in the same order.
    """

    STORE = 3  # 256 threads: the previous TMA stores have read dK and dV; the new dK and dV are in shared memory
    SEND = 4  # and 5, 128 threads: dS is in shared memory


class QueryPipelines(NamedTuple):
    """Edges of the query-stationary kernels, from the load warp to the consumer warpgroups.

    work  records of work tiles
    q     blocks of 64 rows of Q, and of dO: stage w is for warpgroup w; if grouped, heads take the stages in turn
    k, v  tiles of K and tiles of V; tiles of the same keys have the same slot
    kept  receives the arrivals for tiles of k and v that are kept for more heads; no thread waits for it
    """

    work: Pipeline
    q: Pipeline
    k: Pipeline
    v: Pipeline
    kept: Pipeline

    def release(self, smem: Any, edge: Pipeline, slot: Slot, kept: Any) -> None:
        """Releases a tile of K or V. If it is `kept`, the thread arrives at `kept_empty`: a branch would cost more."""
        index = slot.index
        if self.kept.consumers:
            offset = self.kept.empty_barrier(smem, 0).toint() - edge.empty_barrier(smem, 0).toint()
            index = cutlass.select_(kept, Int32(offset) // 8, index)
        edge.release(smem, Slot(index, slot.phase))

    def skip(self, smem: Any, slot: Slot) -> None:
        """Waits for a tile that none of these rows sees, so that each phase gets one arrival, and releases it."""
        for edge in (self.k, self.v):
            edge.wait(smem, slot)
            edge.release(smem, slot)


class KeyPipelines(NamedTuple):
    """Edges of the key-stationary kernel.

    work   records of work tiles, from the load warp to all other roles
    kv     K and V of a work tile, from the load warp to the consumers
    ds     dS of query tiles, from all consumers to the warpgroup that makes dQ of it; in a pair, from and to both CTAs
    added  dQ of query tiles, from the warpgroup that makes it to the warps that have the copy engine add it
    q      tiles of Q, dO and their statistics, from the load warp to the consumers
    """

    work: Pipeline
    kv: Pipeline
    ds: Pipeline
    added: Pipeline
    q: Pipeline


def query_pipelines(spec: SinkQuerySpec) -> QueryPipelines:
    """Makes the edges of a query-stationary kernel."""
    consumers = 128 * spec.warpgroups
    kept = consumers if spec.grouped else 0
    k, v = (
        Pow2Pipeline(
            name.lower(),
            spec.stages,
            producers=1,
            consumers=consumers,
            bytes=spec.tile * spec.d * 2,
            full=f"a tile of {name} is loaded",
            empty=f"every warpgroup has read {name} or skipped it",
        )
        for name in ("K", "V")
    )
    return QueryPipelines(
        work=work_pipeline(consumers),
        q=SignedPipeline(
            "q",
            spec.q_stages,
            producers=1,
            consumers=128,
            bytes=spec.row_operands * ROWS * spec.d * 2,
            full=f"64 rows of {'Q' if spec.row_operands == 1 else 'Q and dO'} are loaded",
            empty="their warpgroup has read them for the last time",
        ),
        k=k,
        v=v,
        kept=Pipeline("kept", consumers=kept, empty="nothing: takes the arrivals for tiles kept for more heads"),
    )


def key_pipelines(spec: SinkBackwardSpec) -> KeyPipelines:
    """Makes the edges of the key-stationary kernel."""
    consumers, kv_readers, kv_empty = spec.consumers, spec.consumers, "the last products that read K or V are complete"
    if spec.reuses:
        kv_readers, kv_empty = 32, "the warp that stores dK and dV from their place is done"
    remote = 4 if spec.pair else 0  # one thread of each warp of the other CTA's warpgroup that makes dQ
    return KeyPipelines(
        work=work_pipeline(consumers + 32 * spec.adders),
        kv=SignedPipeline("kv", 1, 1, kv_readers, bytes=spec.bytes_of_keys, full="K and V are loaded", empty=kv_empty),
        ds=SignedPipeline(
            "ds",
            DS_STAGES,
            producers=consumers,
            consumers=128 + remote,
            bytes=2 * spec.keys_of_cta * spec.queries if spec.pair else 0,
            full="dS of a query tile is stored, by the pair's other CTA too",
            empty="whoever made dQ of it has read dS, in both CTAs of a pair",
        ),
        added=SignedPipeline(
            "added", spec.adders, 128, 1, full="dQ of a query tile is staged", empty="the copy engine has read it"
        ),
        q=Pipeline(
            "q",
            spec.stages,
            producers=1,
            consumers=consumers,
            bytes=4 * spec.queries * (spec.d + 2),
            full="Q, dO and the statistics of a query tile are loaded",
            empty="the last products that read the query tile are complete",
        ),
    )


def work_pipeline(readers: int) -> Pipeline:
    """Makes the edge for records of work tiles, which `readers` threads read."""
    return SignedPipeline(
        "work",
        WORK_STAGES,
        producers=32,
        consumers=readers,
        full="the load warp has written the record of a work tile",
        empty="consumers have read it for the last time",
    )
