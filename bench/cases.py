"""All cases of all operators, and the caches that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from bench import gqa, gqa_blocks, mla, sink
from bench.run import Case, selected


class Section(NamedTuple):
    """The cases of a section of `gpu_check.py`, and a function that makes their shared caches on a device."""

    cases: Sequence[Case]
    store: Callable[[str], Any]


SECTIONS: Final[Mapping[str, Section]] = {
    "mla": Section(mla.CASES, mla.Caches),
    "gqa": Section((*gqa.CASES, *gqa_blocks.CASES), gqa.Pool),
    "sink": Section(sink.CASES, str),
}


def choose(sections: Sequence[str], quick: bool, only: str | None, device: str = "cuda") -> list[tuple[Case, Any]]:
    """Returns the cases of some sections, each with its store."""
    found: list[tuple[Case, Any]] = []
    for name in sections:
        if name in SECTIONS:
            store = SECTIONS[name].store(device)
            found += [(case, store) for case in selected(SECTIONS[name].cases, quick, only)]
    return found


def specs(cases: Sequence[Case], num_sms: int) -> list[Any]:
    """Returns the kernels of cases."""
    return list(dict.fromkeys(spec for case in cases for spec in case.specs(num_sms)))
