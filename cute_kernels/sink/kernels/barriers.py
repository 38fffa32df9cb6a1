"""Barriers of the kernels of sink attention, as tables: initialization reads them, docstrings of kernels show them."""

from enum import IntEnum

from cute_kernels.device.barriers import MBarrier, Rings
from cute_kernels.sink.backward_spec import QUERIES, SinkBackwardSpec, SinkQueryGradSpec
from cute_kernels.sink.kernels.scheduler import WORK_STAGES
from cute_kernels.sink.spec import ROWS, SinkForwardSpec


class ForwardNamedBarrier(IntEnum):
    """Barrier 0 is that of all threads of the CTA. Consumer warpgroup w has TURN + w and STORE + w."""

    TURN = 1  # 256 threads: w, which waits for its turn to issue products, and the warpgroup before it, which gives it
    STORE = 5  # w: O in shared memory may be overwritten, or is complete


class QueryGradNamedBarrier(IntEnum):
    """Barrier 0 is that of all threads of the CTA. Consumer warpgroup w has STORE + w."""

    STORE = 1  # w: dQ in shared memory may be overwritten, or is complete


class KeyGradNamedBarrier(IntEnum):
    """Barrier 0 is that of all threads of the CTA. Consumer warpgroup w has ADD + w."""

    STORE = 3  # all consumers: dK and dV in shared memory may be overwritten, or are complete
    ADD = 4  # w: its dQ in shared memory may be overwritten, or is complete; in a pair also: its dS is stored


def query_barriers(spec: SinkForwardSpec | SinkQueryGradSpec) -> Rings:
    """Of the query-stationary kernels, in the order of their initialization."""
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
    """Of the key-stationary kernel, in the order of their initialization."""
    consumers = spec.consumers
    q_bytes = 2 * QUERIES * spec.d * 2 + 2 * QUERIES * 4
    kv_empty = (
        MBarrier("kv_empty", 32, 1, 0, "the warp that stores dK and dV from their place is done")
        if spec.reuses
        else MBarrier("kv_empty", consumers, 1, 0, "the last products that read K or V are complete")
    )
    ds_bytes = 2 * spec.keys_of_cta * QUERIES if spec.pair else 0
    remote = 4 if spec.pair else 0  # a thread of each warp of the other CTA's warpgroup that has made dQ
    return [
        _work(consumers),
        [MBarrier("kv_full", 1, 1, spec.bytes_of_keys, "K and V are loaded"), kv_empty],
        [
            MBarrier("ds_full", consumers, 2, ds_bytes, "dS of a query tile is stored, by the pair's other CTA too"),
            MBarrier("ds_empty", 128 + remote, 2, 0, "whoever made dQ of it has read dS, in both CTAs of a pair"),
        ],
        *([[MBarrier("added_empty", 128, 1, 0, "the copy engine has read the staged dQ")]] if spec.pair else []),
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
