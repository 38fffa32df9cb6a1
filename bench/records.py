"""The record of a card: results/<card>.jsonl, one line a case.

A speed enters the record only with a correctness check that passed in the same run. `record_case` is the only way to
make an entry and enforces that; `validate` refuses a file that circumvents it. Each case names the machine code that it
ran, so a change that leaves this code alone leaves the case valid.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import pathlib
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch

from bench import jsonl
from bench.timing import WrongReplay
from tests.kit.compare import Comparison

ROOT: Final = pathlib.Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "results"
SPEED_KEYS: Final = (
    *("us", "us_p10", "us_p90", "us_back_to_back", "us_sustained", "us_loaded_alone"),
    *("TFLOPs", "GBps", "read_fraction", "copy_fraction", "cycles_per_token"),
)
"""Entries that a case with a failed check may not have."""
CEILING_KEYS: Final = ("read_GBps", "copy_GBps", "bf16_gemm_TFLOPs")
SANITIZER_TOOLS: Final = ("memcheck", "racecheck", "synccheck")
MORE_TOOLS: Final = ("initcheck",)
"""Tools for which older records have no count."""
SAME_MACHINE: Final = ("card", "driver", "torch", "cutlass_dsl", "tvm_ffi", "cuda", "python")
"""Entries that parts of one record must agree on."""
UNKNOWN: Final = "unknown"
AT_MOST: Final = ("us", "us_sustained", "worst_ratio", "slow_ratio")
"""Figures for which less is better; for all others that a case must reach, more is."""
IDENTITY: Final = (
    *("op", "mode", "pass", "kv_dtype", "scales", "layout", "page_size", "batch", "h_q", "h_kv", "s_q", "d"),
    *("topk", "s_k", "ragged", "tokens", "splits", "window", "deterministic"),
    *("cache_format", "cache_layout", "extra_cache_format", "extra_topk"),
)
"""The fields that identify a case; each case has some of them."""
NAMED: Final = ("op", "mode", "pass", "cache_format", "kv_dtype", "scales", "layout")
SIZED: Final = (
    *("topk", "extra_cache_format", "extra_topk", "s_k", "ragged", "d", "tokens", "splits", "window", "blocks"),
    "deterministic",
)
Record = dict[str, Any]


class RecordError(ValueError):
    """A record claims more than was checked, or lacks entries that readers need."""


def machine() -> dict[str, str]:
    """Returns card, driver and versions of this machine, and today's date (UTC)."""
    return {
        "card": torch.cuda.get_device_name(),
        "driver": _driver_version(),
        "torch": torch.__version__,
        "cutlass_dsl": package_version("nvidia-cutlass-dsl"),
        "tvm_ffi": package_version("apache-tvm-ffi"),
        "cuda": torch.version.cuda or UNKNOWN,
        "cudnn": str(torch.backends.cudnn.version() or UNKNOWN),
        "python": platform.python_version(),
        "date": today(),
    }


def today() -> str:
    """Returns today's date (UTC)."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def record_case(key: Mapping[str, Any], check: Comparison, measure: Callable[[], Mapping[str, Any]]) -> Record:
    """Makes the entry of a case.

    Args:
        key: entries that identify the case: op, mode, sizes.
        check: the outcome of its correctness check.
        measure: times the case; called only if the check passed. It may raise WrongReplay for what it has timed.

    Returns:
        The key, the errors, and the speeds; or the key, the errors and "failed" with the reason.
    """
    entry = {**key, "rel_err": _rounded(check.rel_err), "lse_err": _rounded(check.lse_err)}
    if not check:
        return {**entry, "failed": str(check)}
    try:
        return {**entry, **measure()}
    except WrongReplay as error:
        return {**entry, "failed": str(error)[:500]}


def card_slug(card: str) -> str:
    """Returns the file name for a card: "NVIDIA H200" -> "h200", "NVIDIA H100 80GB HBM3" -> "h100"."""
    model = re.search(r"\b[A-Z]+\d+\b", card)
    return (model.group() if model else card.replace(" ", "_")).lower()


def identity(case: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the entries that distinguish a case from all others, the same in every record."""
    return tuple(case.get(key) for key in IDENTITY)


def find_case(record: Record, key: Mapping[str, Any]) -> Record | None:
    """Returns the case with this key; None if the record has none."""
    wanted = identity(key)
    return next((case for case in record["cases"] if identity(case) == wanted), None)


def case_name(case: Mapping[str, Any]) -> str:
    """Describes a case of a record in one line."""
    named = [str(case[key]) for key in NAMED if case.get(key)]
    if "page_size" in case:
        named[-1] += f"_{case['page_size']}"
    if "batch" in case:
        named.append("x".join(str(case[key]) for key in ("batch", "h_q", "s_q") if key in case))
    sizes = (key if case[key] is True else f"{key} {case[key]}" for key in SIZED if key in case)
    return " ".join([*named, *sizes])


def attained(must: Mapping[str, float], case: Mapping[str, Any]) -> bool:
    """Returns whether a case reaches every required figure. A figure that was not measured counts as missed.

    "ratio" and "ratio_sustained" are compared with the fastest peer.
    """
    peers = (case.get("peers") or {}).values()
    ratios = {name: [peer[name] for peer in peers if name in peer] for name in ("ratio", "ratio_sustained")}
    figures = {**case, **{name: min(found, default=None) for name, found in ratios.items()}}
    return all(
        figures.get(name) is not None and (figures[name] <= limit if name in AT_MOST else figures[name] >= limit)
        for name, limit in must.items()
    )


def with_must(case: Record, must: Mapping[str, float]) -> Record:
    """Returns the case, and whether it reaches its required figures, if any."""
    return {**case, "must": dict(must), "met": "failed" not in case and attained(must, case)} if must else case


def joined(parts: Iterable[Mapping[str, Any]]) -> Record:
    """Joins several records of the same card and versions; if two have the same entry, the later one counts.

    Raises:
        RecordError: cards or versions differ, or the whole is not a valid record.
    """
    whole: Record = {}
    for part in parts:
        for key in SAME_MACHINE:
            if key in whole and whole[key] != part[key]:
                raise RecordError(f"{key}: got {part[key]!r}, needs that of the other parts, {whole[key]!r}")
        for name, value in part.items():
            if name in ("cases", "values"):
                entries = {identity(case): case for case in (*whole.get(name, ()), *value)}
                whole[name] = list(entries.values())
            elif isinstance(value, Mapping) and name != "reliability":
                whole[name] = _filled(whole.get(name, {}), value)
            else:
                whole[name] = value
    validate(whole)
    return whole


def _filled(old: Mapping[str, Any], new: Mapping[str, Any]) -> Record:
    """Joins two entries; the new one's values count if it has some."""
    filled = {**new, **old}
    for key, value in new.items():
        if isinstance(value, Mapping):
            filled[key] = _filled(old.get(key) or {}, value)
        elif value is not None:
            filled[key] = value
    return filled


def validate(record: Mapping[str, Any]) -> None:
    """Checks the keys that readers rely on, and that no speed stands without a passed check.

    Raises:
        RecordError: names everything that is wrong.
    """
    problems = [f"{key}: needs a text" for key in (*SAME_MACHINE, "date") if not isinstance(record.get(key), str)]
    tests, ceilings = record.get("tests", {}), record.get("ceilings", {})
    counts = {**tests, **tests.get("sanitizer", {})}
    for key in ("passed", "failed", "skipped", *SANITIZER_TOOLS):
        if key not in counts or not (counts[key] is None or _is_count(counts[key])):
            problems.append(f"tests.{key}: got {counts.get(key)!r}, needs a count or null")
    missing = [key for key in CEILING_KEYS if not _is_positive(ceilings.get(key))]
    problems += [f"ceilings.{key}: needs a positive number" for key in missing]
    for case in record.get("cases", ()):
        problems += [f"{case_name(case)}: {problem}" for problem in _case_problems(case)]
    for entry in record.get("values", ()):
        times = entry.get("values") or {}
        if "failed" in entry and times or set(times) & set(entry.get("wrong", {})):
            problems.append(f"values, {case_name(entry)}: records times of a failed check")
    if problems:
        raise RecordError("; ".join(problems))


def _case_problems(case: Mapping[str, Any]) -> list[str]:
    speeds = [key for key in SPEED_KEYS if case.get(key) is not None]
    if "failed" in case:
        return [f"records {', '.join([*speeds, 'peers'])} of a failed check"] * bool(speeds or case.get("peers"))
    problems = [f"{key}: got {case[key]!r}, needs a positive number" for key in speeds if not _is_positive(case[key])]
    if "us" not in speeds:
        problems.append("has neither a time nor the reason why its check failed")
    if not _is_positive(case.get("sets_compared")) or not _is_number(case.get("rel_err")):
        problems.append("rel_err, sets_compared: a speed needs a check of what was timed")
    if not isinstance(case.get("kernels"), Mapping):
        problems.append(f"kernels: got {case.get('kernels')!r}, needs the machine code of each specification")
    for name, peer in (case.get("peers") or {}).items():
        if "failed" not in peer and not (_is_positive(peer.get("us")) and _is_positive(peer.get("ratio"))):
            problems.append(f"peers.{name}: got {peer!r}, needs us and ratio, or failed with the reason")
    return problems


def write(record: Mapping[str, Any], path: pathlib.Path) -> None:
    """Validates, then writes; raises as `validate`, and the old file stays."""
    validate(record)
    jsonl.write(record, path)


def read(path: pathlib.Path) -> Record:
    """Reads and validates a record; raises RecordError if it is invalid."""
    try:
        record = {"cases": [], **jsonl.read(path)}
    except ValueError as error:
        raise RecordError(f"{path}: {error}") from error
    validate(record)
    return record


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _rounded(value: float) -> float | None:
    """Rounds to three significant digits; None for values that JSON cannot hold."""
    return float(f"{value:.3g}") if math.isfinite(value) else None


def package_version(name: str) -> str:
    """Returns the version of an installed package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    return lines[0] if lines else UNKNOWN
