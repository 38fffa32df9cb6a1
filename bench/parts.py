"""Records of which each has a part: sections of a run, and putting parts together. Needs no GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from bench import kernels_run, records
from bench.runs import joined

SECTIONS: Final = {
    "tests": "tests/gpu",
    "sanitizer": "every kernel under compute-sanitizer, beside the tests",
    "random": "random calls, the short form of scripts/fuzz.py",
    "mla": "benchmarks of FP8 MLA decoding, its append, the merge",
    "gqa": "benchmarks of GQA decoding and its append",
    "sink": "benchmarks of sink attention",
    "values": "cases of all three over families of values",
    "accuracy": "errors of `mla_fp8_decode` and FlashMLA, and what the FP8 accumulator keeps",
}
"""What a run consists of."""
OPS: Final = {
    "mla": ("mla_fp8_decode", "mla_fp8_append", "merge_states"),
    "gqa": ("gqa_decode", "kv_int8_append"),
    "sink": ("sink_attention",),
}
"""The operations of each section of benchmarks, in the order of a record."""
LEFT_OUT: Final = "left out of this run"
KEPT_KEYS: Final = ("card", "driver", "torch", "cutlass_dsl", *records.MORE_TEXT_KEYS)
"""What runs must have in common that share a record."""
FRACTIONS: Final = {"read_fraction": "read_GBps", "copy_fraction": "copy_GBps"}
MORE: Final = ("accuracy", "accumulator")
"""Entries of a record that the section "accuracy" makes."""
MISSING: Final = "missing"


def changed_code(kept: Mapping[str, Any]) -> list[str]:
    """In words, what of a record's machine code is no longer built, or why that cannot be said. May compile."""
    code = kernels_run.machine_code()
    if reason := kernels_run.not_comparable(kept, code.toolchain()):
        return [reason]
    names = kernels_run.no_longer_built(kept["kernels"], code.digests_of_specs, kernels_run.shipped_specs)
    return [f"{kept['kernels'][name]['spec']} is built to other code now" for name in names]


def require_same(
    kept: Mapping[str, Any],
    here: Mapping[str, Any],
    changed: Callable[[Mapping[str, Any]], Sequence[str]] = changed_code,
) -> None:
    """Raises a ValueError where a record is of another card, or of other machine code or versions, than this run.

    Machine code is looked at where the sources are not the same; versions that the record does not name are not.
    """
    for key in KEPT_KEYS:
        if key in kept and kept[key] != here[key]:
            raise ValueError(f"--keep: got {key} {kept[key]!r}, needs that of this run, {here[key]!r}")
    for name, version in here.get("peers", {}).items():
        other = kept.get("peers", {}).get(name, MISSING)
        if not version.startswith(MISSING) and not other.startswith(MISSING) and version != other:
            raise ValueError(f"--keep: got {name} {other!r}, needs that of this run, {version!r}")
    if kept["source_digest"] != here["source_digest"] and (found := changed(kept)):
        raise ValueError(f"--keep: got a record of other sources: {'; '.join(found)}")


def completed(record: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    """A record with the tests, sanitizers, cases, accuracy or random calls that it lacks, as another one has them.

    Ceilings are the better ones of both, and fractions of all cases those of them.

    Args:
        record: of this run; where both have something, this one's is taken. Cases that both have of the same machine
            code keep the runs of both; see `runs`.
        kept: that `require_same` has passed.
    """
    tests = dict(kept["tests"] if record["tests"]["passed"] is None else record["tests"])
    sanitizers = [one["tests"]["sanitizer"] for one in (record, kept)]
    ran = any(sanitizers[0][tool] is not None for tool in records.SANITIZER_TOOLS)
    whole = {**record, "tests": {**tests, "sanitizer": sanitizers[0] if ran else sanitizers[1]}}
    # a run without cases has no use for its ceilings
    with_cases = [one for one in (record, kept) if one["cases"]] or [record]
    names = {name: None for one in with_cases for name in one["ceilings"]}
    whole["ceilings"] = {name: max(one["ceilings"].get(name, 0.0) for one in with_cases) for name in names}
    dates = record["date"], kept["date"]
    cases = [rescaled(case, record["ceilings"], whole["ceilings"]) for case in record["cases"]]
    others = {records.identity(case): rescaled(case, kept["ceilings"], whole["ceilings"]) for case in kept["cases"]}
    known = set(map(records.identity, cases))
    cases = [joined(case, others.get(records.identity(case), {}), dates) for case in cases]
    cases += [case for identity, case in others.items() if identity not in known]
    ranks = {op: place for place, op in enumerate(op for ops in OPS.values() for op in ops)}
    whole["cases"] = sorted(cases, key=lambda case: ranks.get(case["op"], len(ranks)))
    if peers := {**kept.get("peers", {}), **record.get("peers", {})}:
        there = {k: v for k, v in kept.get("peers", {}).items() if not v.startswith(MISSING)}
        whole["peers"] = {name: there.get(name, text) for name, text in peers.items()}
    whole |= {name: kept[name] for name in MORE if name in kept and name not in record}
    if "values" in record or "values" in kept:
        entries = {records.identity(entry): entry for one in (kept, record) for entry in one.get("values", [])}
        whole["values"] = list(entries.values())
    # cases name kernels of both: without those of one nothing is said of any
    if "kernels" in record and "kernels" in kept:
        whole["kernels"] = {**kept["kernels"], **record["kernels"]}
        if "reliability" in kept and "reliability" not in record:
            whole["reliability"] = kept["reliability"]
    else:
        whole = {key: value for key, value in whole.items() if key not in ("kernels", "toolchain", "reliability")}
    records.validate(whole)
    return whole


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One record of several parts of the same card, versions and machine code; the first one's where two have the same.

    Raises:
        ValueError: they are not of the same, see `require_same`.
        RecordError: the whole is no record.
    """
    whole = parts[0]
    for part in parts[1:]:
        require_same(part, whole)
        whole = completed(whole, part)
    return whole


def rescaled(case: dict[str, Any], then: Mapping[str, float], now: Mapping[str, float]) -> dict[str, Any]:
    """A case whose fractions were of the ceilings `then`, with those of the ceilings `now`."""
    changes = {
        key: round(case[key] * then[ceiling] / now[ceiling], 3)
        for key, ceiling in FRACTIONS.items()
        if key in case and then[ceiling] != now[ceiling]
    }
    if not changes:
        return case
    return records.with_must({**case, **changes}, case.get("must") or {})


def fewer_cases(record: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """In words, the operations of which a record has some of their cases, but fewer than there are.

    Args:
        record: whole, or of some sections.
        names: of all cases; an operation and a space begin them.
    """
    there = Counter(case["op"] for case in record["cases"])
    wanted = Counter(name.partition(" ")[0] for name in names)
    return [f"{there[op]} of {count} cases of {op}" for op, count in wanted.items() if 0 < there[op] < count]


def left_out(record: Mapping[str, Any], some_cases: bool) -> list[str]:
    """What the caller left out and no other run has."""
    tests, ops = record["tests"], {case["op"] for case in record["cases"]}
    parts = {
        "tests": tests["passed"] is None,
        "compute-sanitizer": tests["sanitizer"].get("reasons", {}).get("all") == LEFT_OUT,
        "benchmarks": not ops,
        **{f"benchmarks of {name}": bool(ops) and not ops & set(OPS[name]) for name in OPS},
        "some benchmark cases": bool(ops) and some_cases,
        "random calls": "reliability" not in record,
        "accuracy": not all(name in record for name in MORE),
        "families of values": "values" not in record,
    }
    return [name for name, missing in parts.items() if missing]


def partial(record: Mapping[str, Any], some_cases: bool) -> bool:
    """Whether a record lacks what one in results/ needs; random calls, accuracy and values may be added later."""
    return bool(set(left_out(record, some_cases)) - {"random calls", "accuracy", "families of values"})
