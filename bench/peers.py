"""Other libraries' kernels that run the same cases in the same process, their entries in a record, their versions."""

from __future__ import annotations

import importlib
import importlib.metadata
import pathlib
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from bench import flash_attention, xqa
from bench.in_layer import Graphs, Timing

PEER_LIMIT: Final = 0.02
"""A peer whose relative error is above this computes something else: no ratio."""
FP8_LIMIT: Final = 0.05
"""The same of a peer that rounds its probabilities to FP8, which alone is 0.027 in the mean."""
OURS: Final = "ours"
"""Name of our kernel among computations that are timed together."""
TIMES: Final = {
    "us": "ratio",
    "us_back_to_back": "ratio_back_to_back",
    "us_sustained": "ratio_sustained",
    "us_loaded_alone": "ratio_loaded_alone",
}
"""Times of a record, and what a peer's time divided by ours is called."""


@dataclass(frozen=True)
class Peer:
    """A peer that is ready to be timed, or why it is not.

    graphs   what `time_together` replays
    rel_err  of its output
    note     what was done to make the case fit it
    failed   the reason; no graphs then
    limit    of its relative error
    """

    graphs: Graphs | None = None
    rel_err: float = 0.0
    note: str = ""
    failed: str = ""
    limit: float = PEER_LIMIT


def ready(make: Callable[[], Peer]) -> Peer:
    """What `make` gives, unless it raises or computes something else: whatever a peer cannot do must not stop a run."""
    try:
        found = make()
    except Exception as error:
        return Peer(failed=f"{type(error).__name__}: {error}".splitlines()[0][:200])
    return found if found.failed or found.rel_err < found.limit else Peer(failed=f"relative error {found.rel_err:.3g}")


def ways(ours: Graphs, peers: Mapping[str, Peer]) -> dict[str, Graphs]:
    """What `time_together` takes: ours first, then the peers that are ready."""
    return {OURS: ours, **{name: peer.graphs for name, peer in peers.items() if peer.graphs is not None}}


def entries(peers: Mapping[str, Peer], timings: Mapping[str, Timing]) -> dict[str, Any]:
    """The entry "peers" of a case."""
    ours, found = timings[OURS].as_record(), {}
    for name, peer in peers.items():
        if name not in timings:
            found[name] = {"failed": peer.failed}
            continue
        entry: dict[str, Any] = {
            key: value for key, value in timings[name].as_record().items() if key in TIMES or key in ("sm_mhz", "watts")
        }
        entry |= {
            ratio: round(entry[key] / ours[key], 3) for key, ratio in TIMES.items() if key in entry and key in ours
        }
        if (paired := timings[name].sustained_ratio(timings[OURS])) is not None:
            entry["ratio_sustained"] = round(paired, 3)
        entry["rel_err"] = float(f"{peer.rel_err:.3g}")
        found[name] = {**entry, "note": peer.note} if peer.note else entry
    return found


def load(name: str) -> types.ModuleType | str:
    """A peer's module, or why there is none."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:  # a library built for another torch raises any of them
        return f"{name} cannot be imported: {error}"


def versions() -> dict[str, str]:
    """The top-level entry "peers" of a record: each peer's version, or "missing" with the reason."""
    flash_mla = load("flash_mla")
    return {
        "cudnn": f"{torch.backends.cudnn.version() or 'missing'}, in torch {torch.__version__}",
        "flash_mla": f"missing: {flash_mla}"[:300] if isinstance(flash_mla, str) else version_of(flash_mla),
        **flash_attention.versions(),
        "xqa": xqa.version(),
    }


def version_of(module: types.ModuleType) -> str:
    """What a module, its distribution, or else the digest of its compiled library says."""
    own = getattr(module, "__version__", None)
    if own is None:
        try:
            own = importlib.metadata.version(module.__name__)
        except importlib.metadata.PackageNotFoundError:
            pass
    libraries = sorted(pathlib.Path(module.__file__ or "").parent.glob("*.so"))
    digests = [f"{path.name} sha256 {flash_attention.digest([path])}" for path in libraries]
    return ", ".join([*([str(own)] if own else []), *digests]) or "unknown"
