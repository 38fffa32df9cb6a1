"""Pipelines of the kernels of sink attention, and their named barriers."""

from enum import IntEnum
from typing import NamedTuple

from cute_kernels.device.pipeline import Pipeline
from cute_kernels.sink.backward_spec import DS_STAGES, QUERIES, SinkBackwardSpec, SinkQueryGradSpec
from cute_kernels.sink.spec import ROWS, SinkForwardSpec

WORK_STAGES = 2  # work tiles that the load warp may be ahead


class ForwardNamedBarrier(IntEnum):
    """Hardware barriers of a CTA; 0 is `sync_threads`. Consumer warpgroup w of at most 4 has TURN + w and STORE + w.

    A store waits at STORE + w twice, before it writes shared memory and after. One id serves both: the same 128 threads
    wait, in the same order. TURN + w needs its own: the warpgroup before w arrives there without waiting, while w may
    be at its store.
    """

    TURN = 1  # 256, to 4: w waits for its turn to issue products, the warpgroup before it arrives
    STORE = 5  # 128, to 8: the TMA store before has read O in shared memory; O of this one is in shared memory


class QueryGradNamedBarrier(IntEnum):
    """Hardware barriers of a CTA; 0 is `sync_threads`. Consumer warpgroup w has STORE + w.

    A store waits there twice, before it writes shared memory and after. One id serves both: the same 128 threads wait,
    in the same order.
    """

    STORE = 1  # 128, to 3: the TMA store before has read dQ in shared memory; dQ of this one is in shared memory


class KeyGradNamedBarrier(IntEnum):
    """Hardware barriers of a CTA; 0 is `sync_threads`. Consumer warpgroup w, of two, has ADD + w.

    Each id serves two waits, because the same threads wait at both, in the same order: STORE before and after dK and dV
    are written to shared memory, ADD + w before and after dQ is. A pair waits at ADD + w for its dS instead of before
    dQ: the edge `added` says there that the place of dQ is free, because both warpgroups use that place.
    """

    STORE = 3  # 256, all consumers: the TMA stores before have read dK and dV; dK and dV of this work tile are there
    ADD = 4  # 128, and 5: the copy before has read dQ (a pair: dS is in shared memory); dQ is in shared memory


class QueryPipelines(NamedTuple):
    """Edges of the query-stationary kernels; all but `kept` from the load warp to the consumer warpgroups.

    work     records of work tiles
    q        64 rows of Q, and of dO; not grouped, a warpgroup has a stage of its own
    k, v     key tiles; K and V come apart, as their products do
    kept     grouped: takes the arrivals for tiles that are kept for more heads, and means nothing
    """

    work: Pipeline
    q: Pipeline
    k: Pipeline
    v: Pipeline
    kept: Pipeline


def query_pipelines(spec: SinkForwardSpec | SinkQueryGradSpec) -> QueryPipelines:
    """The edges of a query-stationary kernel."""
    consumers = 128 * spec.warpgroups
    q_bytes, tile_bytes = spec.row_operands * ROWS * spec.d * 2, spec.tile * spec.d * 2
    rows = "Q" if spec.row_operands == 1 else "Q and dO"
    k, v = (
        Pipeline(
            name.lower(),
            spec.stages,
            producers=1,
            consumers=consumers,
            bytes=tile_bytes,
            full=f"a tile of {name} is loaded",
            empty=f"every warpgroup has read {name} or skipped it",
        )
        for name in "KV"
    )
    return QueryPipelines(
        work=_work(consumers),
        q=Pipeline(
            "q",
            spec.q_stages,
            producers=1,
            consumers=128,
            bytes=q_bytes,
            full=f"64 rows of {rows} are loaded",
            empty="their warpgroup has read them for the last time",
        ),
        k=k,
        v=v,
        kept=Pipeline(
            "kept",
            consumers=consumers if spec.grouped else 0,
            empty="nothing: takes the arrivals for tiles kept for more heads",
        ),
    )


class KeyPipelines(NamedTuple):
    """Edges of the key-stationary kernel.

    work     records of work tiles, from the load warp
    kv       K and V of a work tile, from the load warp
    d_s      dS of a query tile, from all consumers to those that make dQ of it
    added    the place of a pair's staged dQ, which both warpgroups use in turn
    q        query tiles, from the load warp
    """

    work: Pipeline
    kv: Pipeline
    d_s: Pipeline
    added: Pipeline
    q: Pipeline


def key_pipelines(spec: SinkBackwardSpec) -> KeyPipelines:
    """The edges of the key-stationary kernel."""
    consumers = spec.consumers
    remote = 4 if spec.pair else 0  # a thread of each warp of the other CTA's warpgroup that has made dQ
    kv_consumers, kv_empty = consumers, "the last products that read K or V are complete"
    if spec.reuses:
        kv_consumers, kv_empty = 32, "the warp that stores dK and dV from their place is done"
    return KeyPipelines(
        work=_work(consumers),
        kv=Pipeline(
            "kv",
            producers=1,
            consumers=kv_consumers,
            bytes=spec.bytes_of_keys,
            full="K and V are loaded",
            empty=kv_empty,
        ),
        d_s=Pipeline(
            "ds",
            DS_STAGES,
            producers=consumers,
            consumers=128 + remote,
            bytes=2 * spec.keys_of_cta * QUERIES if spec.pair else 0,
            full="dS of a query tile is stored, by the pair's other CTA too",
            empty="whoever made dQ of it has read dS, in both CTAs of a pair",
        ),
        added=Pipeline("added", consumers=128 if spec.pair else 0, empty="the copy engine has read the staged dQ"),
        q=Pipeline(
            "q",
            spec.stages,
            producers=1,
            consumers=consumers,
            bytes=2 * QUERIES * spec.d * 2 + 2 * QUERIES * 4,
            full="Q, dO and the statistics of a query tile are loaded",
            empty="the last products that read the query tile are complete",
        ),
    )


def _work(readers: int) -> Pipeline:
    return Pipeline(
        "work",
        WORK_STAGES,
        producers=32,
        consumers=readers,
        full="the load warp has written the record of a work tile",
        empty="consumers have read it for the last time",
    )
