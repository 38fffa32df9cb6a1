"""The record of a GPU run: results/<card>.json.

A speed enters the record only beside a correctness check that passed in the same run. `record_case` is the one way to
make an entry and enforces that; `validate` refuses a file in which anyone got around it.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import shutil
import subprocess
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from cute_kernels.testing.compare import Comparison
from cute_kernels.testing.timing import WrongReplay

ROOT: Final = pathlib.Path(__file__).resolve().parents[2]
SOURCE_PACKAGES: Final = ("cute_kernels", "fp8_mla")
SPEED_KEYS: Final = ("us", "us_p10", "us_p90", "TFLOPs", "GBps", "read_fraction", "copy_fraction", "cycles_per_token")
"""What may not stand beside a failed check."""
CEILING_KEYS: Final = ("read_GBps", "copy_GBps", "bf16_gemm_TFLOPs")
SANITIZER_TOOLS: Final = ("memcheck", "racecheck", "synccheck")
TEXT_KEYS: Final = ("card", "driver", "torch", "cutlass_dsl", "date", "source_digest")
UNKNOWN: Final = "unknown"
AT_MOST: Final = ("us",)
"""Figures of which less is better; of all others that a case must reach, more is."""


class EvidenceError(ValueError):
    """A record that says more than was checked, or lacks what readers of it rely on."""


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


def attained(must: Mapping[str, float], record: Mapping[str, Any]) -> bool:
    """Whether a record has every figure that it must; "ratio" is that of the peer. What was not measured is missed."""
    ratios = [peer["ratio"] for peer in (record.get("peers") or {}).values() if "ratio" in peer]
    figures = {**record, "ratio": min(ratios, default=None)}
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
) -> dict[str, Any]:
    """The whole record, validated.

    Raises:
        EvidenceError: as `validate`.
    """
    record = {**machine, "source_digest": digest, "tests": dict(tests), "ceilings": dict(ceilings), "cases": cases}
    validate(record)
    return record


def validate(record: Mapping[str, Any]) -> None:
    """Check the keys that readers rely on, and that no speed stands without a passed check.

    Raises:
        EvidenceError: naming all that is wrong.
    """
    problems = [f"{key}: got {record.get(key)!r}, needs a text" for key in TEXT_KEYS if not _is_text(record.get(key))]
    digest = record.get("source_digest")
    if isinstance(digest, str) and (len(digest) != 64 or set(digest) - set("0123456789abcdef")):
        problems.append(f"source_digest: got {digest!r}, needs a sha256 in hexadecimal")
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
    if problems:
        raise EvidenceError("; ".join(problems))


def write(record: Mapping[str, Any], path: pathlib.Path) -> None:
    """Validate, then write as JSON, whole or not at all: a reader never sees half a file.

    Raises:
        EvidenceError: as `validate`; the old file stays.
    """
    validate(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    draft.replace(path)


def read(path: pathlib.Path) -> dict[str, Any]:
    """Load a record and validate it.

    Raises:
        EvidenceError: it is not JSON, or as `validate`.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise EvidenceError(f"{path}: {error}") from error
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
    return problems


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
