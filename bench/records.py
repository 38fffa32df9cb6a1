"""The record of a GPU run: results/<card>.json.

A speed enters the record only with a correctness check that passed in the same run. `record_case` is the one way to
make an entry and enforces that; `validate` refuses a file in which anyone got around it.

A record names the machine code that it ran, so that changes which leave that alone leave the record valid. Records
from before that lack "kernels": of what they ran nothing is known.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from bench.timing import WrongReplay
from tests.kit.compare import Comparison

ROOT: Final = pathlib.Path(__file__).resolve().parents[1]
SOURCE_PACKAGES: Final = ("cute_kernels", "fp8_mla")
SPEED_KEYS: Final = (
    "us",
    "us_p10",
    "us_p90",
    "us_back_to_back",
    "us_sustained",
    "us_loaded_alone",
    "TFLOPs",
    "GBps",
    "read_fraction",
    "copy_fraction",
    "cycles_per_token",
)
"""What may not stand with a failed check."""
CEILING_KEYS: Final = ("read_GBps", "copy_GBps", "bf16_gemm_TFLOPs")
SANITIZER_TOOLS: Final = ("memcheck", "racecheck", "synccheck")
MORE_TOOLS: Final = ("initcheck",)
"""Tools that a record may have a count of."""
TEXT_KEYS: Final = ("card", "driver", "torch", "cutlass_dsl", "date", "source_digest")
MORE_TEXT_KEYS: Final = ("tvm_ffi", "cuda", "cudnn", "python")
"""Versions that records from before 2026-11-24 lack."""
RELIABILITY_COUNTS: Final = ("calls", "invalid_calls", "wrong", "faults")
UNKNOWN: Final = "unknown"
AT_MOST: Final = ("us", "us_sustained", "worst_ratio", "slow_ratio")
"""Figures of which less is better; of all others that a case must reach, more is."""


IDENTITY: Final = (
    *("op", "mode", "pass", "case", "kv_dtype", "scales", "layout", "page_size", "batch", "h_q", "h_kv", "s_q", "d"),
    *("topk", "s_k", "ragged", "tokens", "splits", "window", "deterministic", "scores"),
    *("cache_format", "cache_layout", "extra_cache_format", "extra_topk"),
)
"""Fields of which a case has some, and by which it is told from all others."""


class RecordError(ValueError):
    """A record that says more than was checked, or lacks what readers of it rely on."""


def kernel_id(sass: str, launch: str) -> str:
    """What names a kernel in a record: of the digests of its machine code and its launches, 16 hexadecimal digits."""
    return hashlib.sha256((sass + launch).encode()).hexdigest()[:16]


def source_digest(root: pathlib.Path = ROOT) -> str:
    """sha256 over the Python sources of `cute_kernels/` and `fp8_mla/`: sorted paths, each with its content.

    Without the cycle budget, which no kernel needs and whose constants come from the record.
    """
    digest = hashlib.sha256()
    found = (path for package in SOURCE_PACKAGES for path in (root / package).rglob("*.py"))
    files = sorted(path for path in found if "budget" not in path.relative_to(root).parts)
    for path in sorted(files, key=lambda path: path.relative_to(root).as_posix()):
        for part in (path.relative_to(root).as_posix().encode(), path.read_bytes()):
            digest.update(len(part).to_bytes(8, "little") + part)  # lengths keep "a" + "bc" apart from "ab" + "c"
    return digest.hexdigest()


def machine() -> dict[str, str]:
    """Card, driver and versions of this machine, and today's date (UTC)."""
    return {
        "card": torch.cuda.get_device_name(),
        "driver": _driver_version(),
        "torch": torch.__version__,
        "cutlass_dsl": _package_version("nvidia-cutlass-dsl"),
        "tvm_ffi": _package_version("apache-tvm-ffi"),
        "cuda": torch.version.cuda or UNKNOWN,
        "cudnn": str(torch.backends.cudnn.version() or UNKNOWN),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def record_case(key: Mapping[str, Any], check: Comparison, measure: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """One entry of "cases".

    Args:
        key: what names the case: op, mode, sizes.
        check: the outcome of its correctness check.
        measure: times it; called only when the check passed. What it has timed may turn out to be wrong: WrongReplay.

    Returns:
        The key, the errors, and the speeds; or the key, the errors and "failed" with the reason.
    """
    entry = {**key, "rel_err": _number(check.rel_err), "lse_err": _number(check.lse_err)}
    if not check:
        return {**entry, "failed": str(check)}
    try:
        return {**entry, **measure()}
    except WrongReplay as error:
        return {**entry, "failed": str(error)[:500]}


def card_slug(card: str) -> str:
    """File name for a card: "NVIDIA H200" -> "h200", "NVIDIA H100 80GB HBM3" -> "h100"."""
    model = re.search(r"\b[A-Z]+\d+\b", card)
    return (model.group() if model else card.replace(" ", "_")).lower()


def identity(case: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells a case from all others, the same in every record."""
    return tuple(case.get(key) for key in IDENTITY)


def attained(must: Mapping[str, float], record: Mapping[str, Any]) -> bool:
    """Whether a record has every figure that it must. What was not measured is missed.

    "ratio" and "ratio_sustained" are those of the fastest peer.
    """
    peers = (record.get("peers") or {}).values()
    ratios = {name: [peer[name] for peer in peers if name in peer] for name in ("ratio", "ratio_sustained")}
    figures = {**record, **{name: min(found, default=None) for name, found in ratios.items()}}
    return all(
        figures.get(name) is not None and (figures[name] <= limit if name in AT_MOST else figures[name] >= limit)
        for name, limit in must.items()
    )


def with_must(record: dict[str, Any], must: Mapping[str, float]) -> dict[str, Any]:
    """The record of a case, and whether it is good enough where something is asked of it."""
    return {**record, "must": dict(must), "met": "failed" not in record and attained(must, record)} if must else record


def assemble(
    *,
    machine: Mapping[str, str],
    digest: str,
    tests: Mapping[str, Any],
    ceilings: Mapping[str, float],
    cases: list[dict[str, Any]],
    kernels: Mapping[str, Mapping[str, str]] | None = None,
    toolchain: Mapping[str, str] | None = None,
    peers: Mapping[str, str] | None = None,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The whole record, validated.

    Args:
        machine: as `machine` gives it.
        digest: of the sources, for information.
        tests: counts.
        ceilings: as `timing.measure_ceilings` gives them.
        cases: as `record_case` gives them.
        kernels: the machine code that tests and cases ran, by `kernel_id`. None where it is not known.
        toolchain: what compiled it; comparisons need it to be the same.
        peers: versions of other libraries.
        more: entries of sections that not every run has, by name.

    Raises:
        RecordError: as `validate`.
    """
    record = {**machine, "source_digest": digest, "tests": dict(tests), "ceilings": dict(ceilings), "cases": cases}
    record |= {**({} if peers is None else {"peers": dict(peers)}), **(more or {})}
    if kernels is not None and toolchain is not None:
        record |= {"toolchain": dict(toolchain), "kernels": {name: dict(facts) for name, facts in kernels.items()}}
    validate(record)
    return record


def add_reliability(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Two entries of random calls as one.

    An entry has counts "calls" (valid ones), "invalid_calls", "wrong", "faults" and "out_of_memory", calls that were
    not made because the card's memory was full; "seconds", and "seeds", a list of [first, last]. "toolchain" and
    "kernels" are those of a record. Of other counts, such as that of different shapes, the larger one is kept, and of
    texts those that are the same.

    Raises:
        RecordError: an entry is none, both hold the same seed, or they ran other machine code.
    """
    problems = [*_reliability_problems(a), *_reliability_problems(b)]
    problems += [f"reliability.kernels: {name} ran other machine code" for name in other_code(a, b)]
    if a.get("toolchain") != b.get("toolchain"):
        problems.append(f"reliability.toolchain: got {b.get('toolchain')!r}, needs {a.get('toolchain')!r}")
    if problems:
        raise RecordError("; ".join(problems))
    seeds = sorted([*map(list, a["seeds"]), *map(list, b["seeds"])])
    joined: list[list[int]] = []
    for first, last in seeds:
        if joined and first <= joined[-1][1]:
            raise RecordError(f"reliability.seeds: {first} is in both, {joined[-1]} and {[first, last]}")
        if joined and first == joined[-1][1] + 1:
            joined[-1][1] = last
        else:
            joined.append([first, last])
    same = {name: value for name, value in a.items() if b.get(name) == value}
    larger = {name: max(a[name], b[name]) for name in a if name in b and _is_number(a[name]) and _is_number(b[name])}
    return {
        **same,
        **larger,
        **{name: a[name] + b[name] for name in RELIABILITY_COUNTS},
        "out_of_memory": a.get("out_of_memory", 0) + b.get("out_of_memory", 0),
        "seconds": round(a["seconds"] + b["seconds"], 1),
        "seeds": joined,
        "kernels": {**a["kernels"], **b["kernels"]},
    }


def read_reliability(paths: Sequence[pathlib.Path]) -> dict[str, Any]:
    """The entries of some files of random calls, added up. A file holds one entry, see `add_reliability`.

    Raises:
        RecordError: a file has no such entry, or as `add_reliability`.
    """
    entries = []
    for path in paths:
        try:
            entry = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise RecordError(f"{path}: {error}") from error
        if problems := _reliability_problems(entry):
            raise RecordError(f"{path}: {'; '.join(problems)}")
        entries.append(
            {
                name: value
                for name, value in entry.items()
                if name in ("seeds", "kernels", "toolchain") or _is_text(value) or _is_number(value)
            }
        )
    return functools.reduce(add_reliability, entries)


def other_code(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Specs that are in the "kernels" of both, with other machine code or other launches."""
    theirs = {facts["spec"]: name for name, facts in b.get("kernels", {}).items()}
    return [facts["spec"] for name, facts in a.get("kernels", {}).items() if theirs.get(facts["spec"], name) != name]


def with_reliability(record: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """The record with an entry of random calls, whose kernels join those of the record.

    Raises:
        RecordError: the entry is none, or it ran other machine code than the record, or it cannot be told.
    """
    problems = _reliability_problems(entry)
    problems += [f"reliability.kernels: {name} ran other machine code" for name in other_code(record, entry)]
    if "kernels" not in record or record.get("toolchain") != entry.get("toolchain"):
        got, needed = entry.get("toolchain"), record.get("toolchain")
        problems.append(f"reliability.toolchain: got {got!r}, needs that of the record, {needed!r}")
    if problems:
        raise RecordError("; ".join(problems))
    kept = {name: value for name, value in entry.items() if name != "toolchain"}
    whole = {
        **record,
        "kernels": {**record["kernels"], **entry["kernels"]},
        "reliability": {**kept, "kernels": list(entry["kernels"])},
    }
    validate(whole)
    return whole


def reliability_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of random calls as `with_reliability` takes it."""
    entry = record["reliability"]
    kernels = {name: record["kernels"][name] for name in entry["kernels"]}
    return {**entry, "toolchain": record["toolchain"], "kernels": kernels}


def validate(record: Mapping[str, Any]) -> None:
    """Check the keys that readers rely on, and that no speed stands without a passed check.

    Raises:
        RecordError: naming all that is wrong.
    """
    problems = [f"{key}: got {record.get(key)!r}, needs a text" for key in TEXT_KEYS if not _is_text(record.get(key))]
    digest = record.get("source_digest")
    if isinstance(digest, str) and (len(digest) != 64 or set(digest) - set("0123456789abcdef")):
        problems.append(f"source_digest: got {digest!r}, needs a sha256 in hexadecimal")
    problems += [
        f"{key}: got {record[key]!r}, needs a text"
        for key in MORE_TEXT_KEYS
        if key in record and not _is_text(record[key])
    ]
    peers = record.get("peers", {})
    if not isinstance(peers, Mapping) or not all(map(_is_text, peers.values())):
        problems.append(f"peers: got {peers!r}, needs a text for each library")
    problems += _test_problems(record.get("tests"))
    ceilings = record.get("ceilings")
    for key in CEILING_KEYS:
        if not isinstance(ceilings, Mapping) or not _is_positive(ceilings.get(key)):
            problems.append(f"ceilings.{key}: needs a positive number")
    cases = record.get("cases")
    if not isinstance(cases, list):
        problems.append(f"cases: got {type(cases).__name__}, needs a list")
        cases = []
    for place, case in enumerate(cases):
        problems += [f"cases[{place}]: {problem}" for problem in _case_problems(case)]
    values = record.get("values", [])
    for place, entry in enumerate(values):
        problems += [f"values[{place}]: {problem}" for problem in _value_problems(entry)]
    if "kernels" in record or "toolchain" in record:
        problems += _code_problems(record, [case for case in cases if isinstance(case, Mapping)])
    if problems:
        raise RecordError("; ".join(problems))


def write(record: Mapping[str, Any], path: pathlib.Path) -> None:
    """Validate, then write as JSON, whole or not at all: a reader never sees half a file.

    Raises:
        RecordError: as `validate`; the old file stays.
    """
    validate(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    draft.replace(path)


def read(path: pathlib.Path) -> dict[str, Any]:
    """Load a record and validate it.

    Raises:
        RecordError: it is not JSON, or as `validate`.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise RecordError(f"{path}: {error}") from error
    validate(record)
    return record


def _test_problems(tests: Any) -> list[str]:
    if not isinstance(tests, Mapping):
        return [f"tests: got {tests!r}, needs counts"]
    problems = [
        f"tests.{key}: got {tests.get(key)!r}, needs a count or null"
        for key in ("passed", "failed", "skipped")
        if key not in tests or not _is_count(tests[key])
    ]
    sanitizer = tests.get("sanitizer")
    if not isinstance(sanitizer, Mapping):
        return [*problems, f"tests.sanitizer: got {sanitizer!r}, needs a count a tool"]
    for tool in SANITIZER_TOOLS:
        if tool not in sanitizer or not _is_count(sanitizer[tool]):
            problems.append(f"tests.sanitizer.{tool}: got {sanitizer.get(tool)!r}, needs a count or null")
    for tool in MORE_TOOLS:
        if not _is_count(sanitizer.get(tool)):
            problems.append(f"tests.sanitizer.{tool}: got {sanitizer[tool]!r}, needs a count or null")
    return problems


def _code_problems(record: Mapping[str, Any], cases: list[Mapping[str, Any]]) -> list[str]:
    """What is wrong with "toolchain" and "kernels", and with what cases and the entry of random calls say of them."""
    problems = _kernel_problems(record.get("kernels"), record.get("toolchain"))
    if problems:
        return problems
    for place, case in enumerate(cases):
        if "failed" in case:
            continue
        if not isinstance(case.get("kernels"), list) or not all(name in record["kernels"] for name in case["kernels"]):
            problems.append(f"cases[{place}].kernels: got {case.get('kernels')!r}, needs names of kernels")
        if not _is_positive(case.get("sets_compared")):
            problems.append(f"cases[{place}].sets_compared: a speed needs a check of what was timed")
    if "reliability" in record:
        entry = record["reliability"]
        names = entry.get("kernels") if isinstance(entry, Mapping) else None
        if not isinstance(names, list) or not all(name in record["kernels"] for name in names):
            return [*problems, f"reliability.kernels: got {names!r}, needs names of kernels"]
        problems += _reliability_problems(reliability_of(record))
    return problems


def _kernel_problems(kernels: Any, toolchain: Any) -> list[str]:
    if not isinstance(toolchain, Mapping) or not toolchain or not all(map(_is_text, toolchain.values())):
        return [f"toolchain: got {toolchain!r}, needs versions"]
    if not isinstance(kernels, Mapping):
        return [f"kernels: got {type(kernels).__name__}, needs an object"]
    problems = []
    for name, facts in kernels.items():
        if not isinstance(facts, Mapping) or not _is_text(facts.get("spec")):
            problems.append(f"kernels.{name}: got {facts!r}, needs spec, sass and launch")
        elif name != kernel_id(str(facts.get("sass")), str(facts.get("launch"))):
            problems.append(f"kernels.{name}: does not name its sass and launch")
    return problems


def _reliability_problems(entry: Any) -> list[str]:
    if not isinstance(entry, Mapping):
        return [f"reliability: got {entry!r}, needs counts"]
    problems = [
        f"reliability.{key}: got {entry.get(key)!r}, needs a count"
        for key in RELIABILITY_COUNTS
        if entry.get(key) is None or not _is_count(entry[key])
    ]
    if not _is_positive(entry.get("seconds")):
        problems.append(f"reliability.seconds: got {entry.get('seconds')!r}, needs a positive number")
    seeds = entry.get("seeds")
    if not isinstance(seeds, list) or not seeds or not all(map(_is_range, seeds)):
        problems.append(f"reliability.seeds: got {seeds!r}, needs a list of [first, last]")
    own = _kernel_problems(entry.get("kernels"), entry.get("toolchain"))
    return problems + [f"reliability.{problem}" for problem in own]


def _is_range(value: Any) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    return all(_is_count(end) and end is not None for end in value) and value[0] <= value[1]


def _case_problems(case: Any) -> list[str]:
    if not isinstance(case, Mapping) or not _is_text(case.get("op")):
        return [f"got {case!r}, needs an object with an op"]
    speeds = [key for key in SPEED_KEYS if case.get(key) is not None]
    if "failed" in case:
        return [f"records {', '.join([*speeds, *(['peers'] if case.get('peers') else [])])} of a failed check"] * bool(
            speeds or case.get("peers")
        )
    problems = [f"{key}: got {case[key]!r}, needs a positive number" for key in speeds if not _is_positive(case[key])]
    if "us" not in speeds:
        problems.append("has neither a time nor the reason why its check failed")
    if not _is_number(case.get("rel_err")):
        problems.append(f"rel_err: got {case.get('rel_err')!r}, needs a number: a speed needs a check")
    for name, peer in (case.get("peers") or {}).items():
        if "failed" not in peer and not (_is_positive(peer.get("us")) and _is_positive(peer.get("ratio"))):
            problems.append(f"peers.{name}: got {peer!r}, needs us and ratio, or failed with the reason")
    return problems


def _value_problems(entry: Any) -> list[str]:
    """What is wrong with an entry of `values.run`: times of families, or why there are none."""
    if not isinstance(entry, Mapping) or not _is_text(entry.get("op")):
        return [f"got {entry!r}, needs an object with an op"]
    times = entry.get("values")
    if "failed" in entry:
        return ["records times of a case that failed"] if times else []
    if not isinstance(times, Mapping) or not times or not all(map(_is_positive, times.values())):
        return [f"values: got {times!r}, needs a positive number for each family"]
    both = sorted(set(times) & set(entry.get("wrong", {})))
    problems = [f"values: records times of {', '.join(both)}, whose check failed"] if both else []
    if entry.get("worst_family") not in times:
        problems.append(f"worst_family: got {entry.get('worst_family')!r}, needs a family that has a time")
    return problems


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_count(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)


def _number(value: float) -> float | None:
    """Three significant digits; None for what JSON cannot hold."""
    return float(f"{value:.3g}") if math.isfinite(value) else None


def _package_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN


def _driver_version() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return UNKNOWN
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    return lines[0] if lines else UNKNOWN
