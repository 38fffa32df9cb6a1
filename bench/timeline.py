"""One CTA's timeline by warp role, from timestamps that a kernel left.

What a kernel provides: an int64 tensor (ctas, roles + 1, steps, 2). One lane of each role stores clock64 before [0] and
after [1] each of its steps, in order; 0 stands where it had none. Row `roles` holds two anchors, (globaltimer, clock64)
at the start [0] and at the end [1] of the CTA, which turn clocks into nanoseconds. A copy or a wgmma is only issued at
its instruction: stamps around a wait tell when it was done.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

COLOURS = ("#3465a4", "#f2c6a0", "#73a35f", "#c05621", "#8e6bb0", "#a0aec0")


@dataclass(frozen=True)
class Span:
    """A step of a role, in nanoseconds since its CTA started."""

    role: str
    event: str
    start_ns: float
    end_ns: float


def spans(times: Sequence[Any], cta: int, roles: Sequence[str], events: Sequence[Sequence[str]]) -> list[Span]:
    """The steps of one CTA, in order of their start.

    Args:
        times: as above, as nested lists (`tensor.tolist()`).
        cta: which.
        roles: a name for each.
        events: of each role, names of its steps, which repeat.

    Raises:
        ValueError: the anchors are missing, or a step ends before it starts.
    """
    cta_times = times[cta]
    (start_ns, start_clock), (end_ns, end_clock) = cta_times[len(roles)][0], cta_times[len(roles)][1]
    if not (end_clock > start_clock and end_ns > start_ns > 0):
        raise ValueError(f"times: CTA {cta} has no anchors: {cta_times[len(roles)][:2]}")
    ns_per_clock = (end_ns - start_ns) / (end_clock - start_clock)
    found = []
    for role, steps, names in zip(roles, cta_times, events, strict=False):
        for place, (begin, end) in enumerate(steps):
            if begin == 0 and end == 0:
                continue
            if not start_clock <= begin <= end <= end_clock:
                raise ValueError(f"times: step {place} of {role} is from {begin} to {end}, its CTA from "
                                 f"{start_clock} to {end_clock}")  # fmt: skip
            first, last = ((clock - start_clock) * ns_per_clock for clock in (begin, end))
            found.append(Span(role, names[place % len(names)], first, last))
    return sorted(found, key=lambda span: (span.start_ns, span.end_ns))


def busy(found: Sequence[Span]) -> dict[tuple[str, str], float]:
    """Nanoseconds of each role and event."""
    total: dict[tuple[str, str], float] = {}
    for span in found:
        key = (span.role, span.event)
        total[key] = total.get(key, 0.0) + span.end_ns - span.start_ns
    return total


def draw(found: Sequence[Span], path: pathlib.Path, title: str) -> bool:
    """Write the timeline as SVG, a row for each role; False where matplotlib is missing or there is nothing to draw."""
    try:
        import matplotlib
    except ImportError:
        return False
    if not found:
        return False
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    roles, events = (list(dict.fromkeys(getattr(span, name) for span in found)) for name in ("role", "event"))
    with matplotlib.rc_context({"svg.hashsalt": "cute_kernels", "svg.fonttype": "none"}):
        figure, axis = plt.subplots(figsize=(12, 1.4 + 0.6 * len(roles)))
        for place, event in enumerate(events):
            colour = COLOURS[place % len(COLOURS)]
            for row, role in enumerate(roles):
                bars = [(s.start_ns, s.end_ns - s.start_ns) for s in found if (s.role, s.event) == (role, event)]
                if bars:
                    axis.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour)
            axis.broken_barh([], (0, 0), facecolors=colour, label=event)
        axis.set_yticks(range(len(roles)), roles)
        axis.invert_yaxis()
        axis.set_xlabel("ns since the CTA started")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.3), ncols=len(events))
        axis.set_title(title, fontsize=10)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None}, bbox_inches="tight")
        plt.close(figure)
    return True
