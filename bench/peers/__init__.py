"""Other libraries' kernels, which run the same cases in the same process.

A peer is a function in a file of this folder and an entry in `PEERS`. It takes a case of `bench`, the inputs of that
case and the caches of all cases, and returns an `Offer`, or None if it has no kernel for the case. `VERSIONS` has the
installed versions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from bench.in_layer import Graphs, Timing, prepare, prepare_eager
from bench.peers import cudnn, fa3, fa4, flash_mla, xqa
from bench.peers.offer import Offer

OURS: Final = "ours"
"""Name of our kernel among computations that are timed together."""
TIMES: Final = {
    "us": "ratio",
    "us_back_to_back": "ratio_back_to_back",
    "us_sustained": "ratio_sustained",
    "us_loaded_alone": "ratio_loaded_alone",
}
"""Times of a record, and the names of a peer's time divided by ours."""
PEERS: Final[Mapping[str, Mapping[str, Callable[..., Offer | None]]]] = {
    "mla_fp8_decode": {"flash_mla": flash_mla.sparse, "flash_mla_bf16": flash_mla.dense},
    "gqa_decode": {
        "cudnn_bf16": cudnn.decode,
        "fa3_bf16": functools.partial(fa3.decode, dtype="bf16"),
        "fa3_fp8": functools.partial(fa3.decode, dtype="fp8"),
        "xqa_fp8": xqa.decode,
    },
    "sink_attention": {"cudnn": cudnn.prefill, "fa3": fa3.prefill, "fa4": fa4.prefill},
}
"""The peers by operator of ours and by their names in a record."""
VERSIONS: Final[Mapping[str, Callable[[], str]]] = {
    "cudnn": cudnn.version,
    "flash_mla": flash_mla.version,
    "fa3": fa3.version,
    "fa4": fa4.version,
    "xqa": xqa.version,
}
"""The version of each library, or "missing" with the reason."""


@dataclass(frozen=True)
class Peer:
    """A peer that is ready to be timed, or why it is not.

    graphs   graphs that `time_together` replays
    rel_err  relative error of its output
    note     what was changed to make the case fit it
    failed   the reason; no graphs then
    """

    graphs: Graphs | None = None
    rel_err: float = 0.0
    note: str = ""
    failed: str = ""


@functools.cache
def versions() -> Mapping[str, str]:
    """Returns the top-level entry "peers" of a record; digests of libraries take seconds."""
    return {name: " ".join(version().split())[:300] for name, version in VERSIONS.items()}


def of_case(
    case: Any, inputs: Any, store: Any, error: Callable[[torch.Tensor, Any], float], limit: float = 1.0
) -> dict[str, Peer]:
    """Returns the peers that a case names and that are installed, prepared and checked.

    Args:
        case: with `op` and `peers`, names in `PEERS`.
        inputs: inputs of its calls.
        store: the caches that cases share.
        error: relative error of a peer's output for one of the inputs.
        limit: by how much more than usual a peer may be off.
    """
    found: dict[str, Peer] = {}
    for name in case.peers:
        if not versions()[_library(name)].startswith("missing"):
            peer = _ready(functools.partial(PEERS[case.op][name], case, inputs, store), error, limit)
            found |= {} if peer is None else {name: peer}
    return found


def _library(name: str) -> str:
    return next(library for library in VERSIONS if name.startswith(library))


def _ready(make: Callable[[], Offer | None], error: Callable[[torch.Tensor, Any], float], limit: float) -> Peer | None:
    """Returns a peer that computes the case. A failing peer must not stop a run."""
    try:
        offer = make()
        if offer is None:
            return None
        rel_err = error(offer.out, offer.input)
        if not rel_err < offer.limit * limit:
            return Peer(failed=f"relative error {rel_err:.3g}")
        try:
            return Peer(prepare(offer.calls), rel_err, offer.note)
        except RuntimeError as reason:
            if not offer.eager:
                raise
            note = f"eager, not captured: {_first_line(reason)[:120]}"
            return Peer(prepare_eager(offer.calls), rel_err, note)
    except Exception as reason:
        return Peer(failed=_first_line(reason)[:200])


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def graphs(peers: Mapping[str, Peer]) -> dict[str, Graphs]:
    """Returns the graphs of the peers that are ready, for `time_together`."""
    return {name: peer.graphs for name, peer in peers.items() if peer.graphs is not None}


def entries(peers: Mapping[str, Peer], timings: Mapping[str, Timing]) -> dict[str, Any]:
    """Returns the entry "peers" of a case."""
    ours, found = timings[OURS].as_record(), dict[str, Any]()
    for name, peer in peers.items():
        if name not in timings:
            found[name] = {"failed": peer.failed}
            continue
        own = timings[name].as_record()
        entry: dict[str, Any] = {key: own[key] for key in (*TIMES, "sm_mhz", "watts") if key in own}
        entry |= {ratio: round(own[key] / ours[key], 3) for key, ratio in TIMES.items() if key in own and key in ours}
        if (paired := timings[name].sustained_ratio(timings[OURS])) is not None:
            entry["ratio_sustained"] = round(paired, 3)
        entry["rel_err"] = float(f"{peer.rel_err:.3g}")
        found[name] = {**entry, "note": peer.note} if peer.note else entry
    return found
