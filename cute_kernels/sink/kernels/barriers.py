"""Barriers of the kernels of sink attention, as tables: initialization reads them, docstrings of kernels show them."""

from enum import IntEnum

from cute_kernels.device.barriers import MBarrier, Rings
from cute_kernels.sink.backward_spec import DS_STAGES, SinkBackwardSpec
from cute_kernels.sink.kernels.scheduler import WORK_STAGES
from cute_kernels.sink.spec import ROWS, SinkQuerySpec


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
    """Hardware barriers of a CTA; 0 is `sync_threads`. Consumer warpgroup w, of two, has SEND + w in a pair.

    STORE serves two waits, before and after dK and dV are written to shared memory, because the same threads wait at
    both, in the same order.
    """

    STORE = 3  # 256, all consumers: the TMA stores before have read dK and dV; dK and dV of this work tile are there
    SEND = 4  # 128, and 5: dS is in shared memory


def query_barriers(spec: SinkQuerySpec) -> Rings:
    """Returns the barriers of the query-stationary kernels, in the order of their initialization."""
    consumers = 128 * spec.warpgroups
    q_bytes, tile_bytes = spec.row_operands * ROWS * spec.d * 2, spec.tile * spec.d * 2
    q = "Q" if spec.row_operands == 1 else "Q and dO"
    rings = [
        _work(consumers),
        [
            MBarrier("q_full", 1, spec.q_stages, q_bytes, f"64 rows of {q} are loaded"),
            MBarrier("q_empty", 128, spec.q_stages, 0, "their warpgroup has read them for the last time"),
        ],
        [
            MBarrier("k_full", 1, spec.stages, tile_bytes, "a tile of K is loaded"),
            MBarrier("v_full", 1, spec.stages, tile_bytes, "a tile of V is loaded"),
            MBarrier("k_empty", consumers, spec.stages, 0, "every warpgroup has read K or skipped it"),
            MBarrier("v_empty", consumers, spec.stages, 0, "every warpgroup has read V or skipped it"),
        ],
    ]
    if spec.grouped:
        rings.append([MBarrier("kept", consumers, 1, 0, "nothing: takes the arrivals for tiles kept for more heads")])
    return rings


def key_barriers(spec: SinkBackwardSpec) -> Rings:
    """Returns the barriers of the key-stationary kernel, in the order of their initialization."""
    consumers, ds = spec.consumers, DS_STAGES
    q_bytes = 4 * spec.queries * (spec.d + 2)
    kv_empty = (
        MBarrier("kv_empty", 32, 1, 0, "the warp that stores dK and dV from their place is done")
        if spec.reuses
        else MBarrier("kv_empty", consumers, 1, 0, "the last products that read K or V are complete")
    )
    ds_bytes = 2 * spec.keys_of_cta * spec.queries if spec.pair else 0
    remote = 4 if spec.pair else 0  # a thread of each warp of the other CTA's warpgroup that has made dQ
    return [
        _work(consumers + 32 * spec.adders),
        [MBarrier("kv_full", 1, 1, spec.bytes_of_keys, "K and V are loaded"), kv_empty],
        [
            MBarrier("ds_full", consumers, ds, ds_bytes, "dS of a query tile is stored, by the pair's other CTA too"),
            MBarrier("ds_empty", 128 + remote, ds, 0, "whoever made dQ of it has read dS, in both CTAs of a pair"),
        ],
        [
            MBarrier("added_full", 128, spec.adders, 0, "dQ of a query tile is staged"),
            MBarrier("added_empty", 1, spec.adders, 0, "the copy engine has read it"),
        ],
        [
            MBarrier("q_full", 1, spec.stages, q_bytes, "Q, dO and the statistics of a query tile are loaded"),
            MBarrier("q_empty", consumers, spec.stages, 0, "the last products that read the query tile are complete"),
        ],
    ]


def _work(readers: int) -> list[MBarrier]:
    return [
        MBarrier("work_full", 32, WORK_STAGES, 0, "the load warp has written the record of a work tile"),
        MBarrier("work_empty", readers, WORK_STAGES, 0, "consumers have read it for the last time"),
    ]
