"""A timeline of one CTA of the MLA decode kernel by warp role, from the timestamps of `MlaDecodeSpec.trace`.

They are an int64 tensor (ctas, roles + 1, STEPS, 2) of clocks before [0] and after [1] each step of a role; 0 stands
where it had none. Row `roles` has (globaltimer, clock64) at the start [0] and at the end [1] of the CTA, which turn
clocks into nanoseconds. A copy or a wgmma is only issued at its instruction: the wait after it tells when it was done.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

import cute_kernels
from bench import mla, svg
from cute_kernels.mla.spec import EVENTS, ROLES, MlaDecodeSpec
from cute_kernels.runtime.compile import get_kernel
from cute_kernels.runtime.sources import parameters
from fp8_mla.formats import V3_2

SPEC: Final = MlaDecodeSpec(sparse=True, trace=True)
CASE: Final = mla.MlaCase("sparse", 64, 128, 1, 1024)
"""A wave of 128 CTAs, each with 16 key tiles."""
STEPS: Final = 64
"""Steps of a role; a copy of the number in `cute_kernels.device.trace`, which imports the DSL."""
COLOURS: Final = {"wait": "#e2e8f0", "load": "#3465a4", "softmax": "#c05621", "QK": "#73a35f", "store S": "#f2c6a0",
                  "PV": "#8e6bb0"}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A step of a role, in nanoseconds since its CTA started."""

    role: str
    event: str
    start_ns: float
    end_ns: float


def steps(times: Sequence[Any]) -> list[Step]:
    """Returns the steps of one CTA in order of their start, from nested lists (`tensor.tolist()`).

    Raises:
        ValueError: the anchors are missing, or a step ends before it starts.
    """
    (start_ns, start_clock), (end_ns, end_clock) = times[len(ROLES)][:2]
    if not (end_clock > start_clock and end_ns > start_ns > 0):
        raise ValueError(f"times: got a CTA without anchors: {times[len(ROLES)][:2]}")
    ns_per_clock = (end_ns - start_ns) / (end_clock - start_clock)
    found = []
    for role, stamps, events in zip(ROLES, times, EVENTS, strict=False):
        for place, (begin, end) in enumerate(stamps):
            if begin == end == 0:
                continue
            if not start_clock <= begin <= end:
                raise ValueError(f"times: step {place} of {role} is from {begin} to {end}, its CTA from {start_clock}")
            first, last = ((clock - start_clock) * ns_per_clock for clock in (begin, end))
            found.append(Step(role, events[place % len(events)], first, last))
    return sorted(found, key=lambda step: (step.start_ns, step.end_ns))


def busy(found: Sequence[Step]) -> list[str]:
    """Returns a line per role: nanoseconds of each kind of step."""
    lines = []
    for role, events in zip(ROLES, EVENTS, strict=True):
        ns = [sum(s.end_ns - s.start_ns for s in found if (s.role, s.event) == (role, event)) for event in events]
        lines.append(f"trace: {role}: " + ", ".join(f"{event} {n:.0f} ns" for event, n in zip(events, ns, strict=True)))
    return lines


def measure(device: str = "cuda") -> list[Step]:
    """Runs the traced kernel, and returns the steps of its first CTA.

    Raises:
        ValueError: its results differ from the shipped kernel's, or its timestamps are impossible.
    """
    (case, *_) = CASE.inputs(mla.Caches(device))
    assert case.indices is not None
    expected = cute_kernels.mla_fp8_decode(case.q, case.kv_cache, indices=case.indices, num_splits=1, return_lse=True)
    out, lse = (torch.full_like(tensor, float("nan")) for tensor in expected)
    ctas = CASE.batch * SPEC.head_blocks(CASE.h_q)
    times = torch.zeros((ctas, len(ROLES) + 1, STEPS, 2), dtype=torch.int64, device=device)
    page = V3_2.page_layout(case.kv_cache.shape[1])
    arguments: dict[str, Any] = {
        "mQ": case.q,
        "mKV": case.kv_cache,
        "mIndex": case.indices,
        "mLength": torch.full((CASE.batch, CASE.s_q), CASE.keys, dtype=torch.int32, device=device),
        **{"data_stride": page.data_stride, "scale_offset": page.scale_offset, "scale_stride": page.scale_stride},
        "mSink": torch.full((CASE.h_q,), -torch.inf, dtype=torch.float32, device=device),
        # one CTA has all keys, so there are no partials
        **{"mOut": out, "mLse": lse, "scratch": 0, "counters": 0},
        **{"softmax_scale": V3_2.d_qk**-0.5, "num_splits": 1, "merge_ctas": 1, "max_ctas": ctas, "causal": 0},
        "trace": times.data_ptr(),
    }
    names = parameters(SPEC.kernel)
    arguments |= {name: None for name in names if "extra" in name.lower()}  # there is no second cache
    kernel = get_kernel(SPEC)
    for _ in range(3):  # the first launch finds nothing in the caches
        kernel(*(arguments[name] for name in names))
    torch.cuda.synchronize()
    if not all(torch.equal(got, want) for got, want in zip((out, lse), expected, strict=True)):
        raise ValueError("the traced kernel has other results than the one that ships")
    return steps(times[0].tolist())


def draw(found: Sequence[Step], folder: pathlib.Path, card: str) -> list[str]:
    """Writes trace.svg, a row for each role; returns the names of written files: none without matplotlib."""

    def plot(plt: Any) -> Any:
        figure, axis = plt.subplots(figsize=(12, 3.6))
        for event, colour in COLOURS.items():
            for row, role in enumerate(ROLES):
                bars = [(s.start_ns, s.end_ns - s.start_ns) for s in found if (s.role, s.event) == (role, event)]
                axis.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour)
            axis.broken_barh([], (0, 0), facecolors=colour, label=event)
        axis.set_yticks(range(len(ROLES)), ROLES)
        axis.invert_yaxis()
        axis.set_xlabel("ns since the CTA started")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=len(COLOURS))
        axis.set_title(f"One CTA of {CASE.name}, on {card}", fontsize=10)
        return figure

    return svg.write({"trace.svg": plot}, folder)
