"""Check and measure everything on an SM90 GPU, and write the record to results/<card>.jsonl.

    python scripts/gpu_check.py                       all of it in one run
    python scripts/gpu_check.py --sections mla        some sections, to build/gpu_check_mla.jsonl
    python scripts/gpu_check.py --quick               few benchmark cases
    python scripts/gpu_check.py --sections mla --only ' dense '      cases whose name matches
    python scripts/gpu_check.py --merge results/h100.jsonl build/gpu_check_*.jsonl      one of parts; needs no GPU

A case whose check fails is recorded with its errors and without a speed. A run that leaves something out is written
below build/, not over the record, unless --out says where; `--merge` joins such parts, and cases of a later part
replace those of an earlier one. Exit status 1 when a test or a check failed, a sanitizer found something or did not
run, or a case misses a required figure. The last lines say which, and what was left out.
"""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final
from xml.etree import ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

import torch  # noqa: E402

from bench import cases, kernels_run, records, run, values  # noqa: E402
from bench.ceilings import measure_ceilings  # noqa: E402
from bench.fuzzing import strategies  # noqa: E402
from bench.peers import versions  # noqa: E402
from bench.progress import Progress  # noqa: E402
from bench.records import Record, case_name  # noqa: E402
from bench.sanitizing import tools as sanitize  # noqa: E402
from cute_kernels.runtime.arch import is_sm90  # noqa: E402
from cute_kernels.runtime.compile import precompile  # noqa: E402
from scripts import fuzz  # noqa: E402

SECTIONS: Final = {
    "tests": "tests/gpu",
    "sanitizer": "every kernel under compute-sanitizer, beside the tests",
    "random": "random calls, the short form of scripts/fuzz.py",
    "mla": "benchmarks of FP8 MLA decoding, its append, the merge",
    "gqa": "benchmarks of GQA decoding and its append",
    "sink": "benchmarks of sink attention",
    "values": "cases of all three over families of values",
}
TESTS_TIMEOUT_S: Final = 540.0  # 260 s on a usual host, 400 on the slowest so far
SHARDS: Final = 14
"""Processes of each GPU that share the tests: most of a test is work of the host. The largest need 8 GB each."""
STUCK_S: Final = 90
"""Seconds after which a running test prints its stack: one that waits for the GPU for ever can say nothing else."""
SHORT_FUZZ_ROUND: Final = 10**6
"""A round far from the first ones of `scripts/fuzz.py`."""
NOT_RUN: Final = {"passed": None, "failed": None, "skipped": None}


# ---- tests


def run_tests(seconds: float, shards: int | None = None, quiet_is_over: Callable[[], object] = lambda: None) -> Record:
    """Runs tests/gpu and counts: one process compiles, one runs tests that measure time, then several share the rest.

    Tests that have not ended after `seconds` are stopped, and fail. `quiet_is_over` is called once no test measures
    time any more.
    """
    deadline = time.monotonic() + seconds
    shards = shards or SHARDS * max(1, torch.cuda.device_count())
    parts = [["-m", "not alone", "--shard", f"{i}/{shards}"] for i in range(1, shards + 1)]
    with tempfile.TemporaryDirectory() as name:
        done: list[tuple[int | None, str | None]] = []
        for selections in ([["--compile-only"]], [["-m", "alone"]], parts):
            if selections is parts:
                quiet_is_over()
            found = run_pytest(selections, pathlib.Path(name), deadline)
            if selections != [["--compile-only"]]:
                done += found
            elif found[0][0] != 0:
                return count_tests(None)
    return sum_counts(done)


def run_pytest(
    selections: Sequence[Sequence[str]], folder: pathlib.Path, deadline: float
) -> list[tuple[int | None, str | None]]:
    """Runs tests/gpu once for each list of options, side by side: exit status (None: ran out of time) and JUnit report.

    Each process has all GPUs, starting with another one. Its output is shown when it ends, all of it if it failed.
    """
    every = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    gpus = every.split(",")
    cores = max(1, (os.cpu_count() or 1) // len(selections))
    running = []
    for i, options in enumerate(selections):
        report, output = folder / f"{i}.xml", folder / f"{i}.txt"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", str(ROOT / "tests" / "gpu"), "-q", "-p", "no:cacheprovider"]
        command += ["-o", f"faulthandler_timeout={STUCK_S}", f"--junitxml={report}", *options]
        visible = ",".join([*gpus[i % len(gpus) :], *gpus[: i % len(gpus)]])
        environment = {**os.environ, "OMP_NUM_THREADS": str(cores), "CUDA_VISIBLE_DEVICES": visible}
        with output.open("w") as stream:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT)
        running.append((process, report, output, options))
    done: list[tuple[int | None, str | None]] = []
    for process, report, output, options in running:
        status: int | None = None
        try:
            status = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            print(f"tests/gpu {shlex.join(options)}: not done in time", flush=True)
        said = output.read_text(errors="replace")
        print(said if status != 0 else said.strip().rpartition("\n")[2], flush=True)
        done.append((status, report.read_text(encoding="utf-8") if report.exists() else None))
    return done


def sum_counts(done: Sequence[tuple[int | None, str | None]]) -> Record:
    """Adds up counts of processes. One that did not end, or ended badly without a failed test, is a failure."""
    total = {"passed": 0, "failed": 0, "skipped": 0}
    for status, report in done:
        counts = count_tests(None if status is None else report)
        if status != 0 and not counts["failed"]:
            counts["failed"] = 1
        for key in total:
            total[key] += counts[key]
    return total


def count_tests(junit_xml: str | None) -> Record:
    """Counts passed, failed (or broken) and skipped tests of a JUnit report. No report or an empty one is a failure."""
    suites = [] if junit_xml is None else list(ElementTree.fromstring(junit_xml).iter("testsuite"))
    names = ("tests", "failures", "errors", "skipped")
    total, failures, errors, skipped = (sum(int(suite.get(name, 0)) for suite in suites) for name in names)
    if total == 0:
        return {"passed": 0, "failed": 1, "skipped": 0}
    failed = failures + errors
    return {"passed": total - failed - skipped, "failed": failed, "skipped": skipped}


# ---- one run


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.merge:
        record = records.joined(map(records.read, options.merge))
        return finish(record, options.out or records.RESULTS / f"{records.card_slug(record['card'])}.jsonl")
    if not torch.cuda.is_available() or not is_sm90(torch.device("cuda")):
        found = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
        print(f"gpu_check needs an SM90 GPU (Hopper, compute capability 9.0); found {found}", file=sys.stderr)
        return 2
    record = measured(options)
    whole = set(options.sections) == set(SECTIONS) and not options.quick and options.only is None
    partial = ROOT / "build" / f"gpu_check_{'_'.join(options.sections)}.jsonl"
    own = records.RESULTS / f"{records.card_slug(record['card'])}.jsonl" if whole else partial
    return finish(record, options.out or own)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the options; `sections` are those that run, in order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = "; ".join(f"{name}: {what}" for name, what in SECTIONS.items())
    parser.add_argument("--sections", metavar="NAME", nargs="+", choices=list(SECTIONS), help=known)
    parser.add_argument("--quick", action="store_true", help="few benchmark cases")
    parser.add_argument("--only", metavar="REGEX", help="benchmark cases whose name matches")
    parser.add_argument("--tests-timeout", metavar="SECONDS", type=float, default=TESTS_TIMEOUT_S)
    parser.add_argument("--bench-timeout", metavar="SECONDS", type=float, default=math.inf, help="begin no case later")
    parser.add_argument("--merge", metavar="RECORD", type=pathlib.Path, nargs="+", help="parts of one record; no GPU")
    parser.add_argument("--out", type=pathlib.Path, help="default: results/<card>.jsonl, below build/ for a part")
    options = parser.parse_args(arguments)
    options.sections = options.sections or list(SECTIONS)
    return options


def measured(options: argparse.Namespace) -> Record:
    """Makes the record of a run."""
    progress, sections = Progress(), options.sections
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    chosen = cases.choose(sections, options.quick, options.only)
    subjects = values.subjects(options.quick, options.only) if "values" in sections else []
    progress.say(f"sections {', '.join(sections)}; {len(chosen)} cases, {len(subjects)} over families of values")
    with progress.step("kernels"):
        precompile(needed(sections, [*(case for case, _ in chosen), *(subject.case for subject in subjects)], sms))
    record: Record = {**records.machine(), "peers": dict(versions()), "tests": check(options, progress)}
    if "random" in sections:
        with progress.step("random calls"):
            found = fuzz.short(SHORT_FUZZ_ROUND)
        fuzz.show_result(found)
        record["reliability"] = {key: value for key, value in found.items() if key not in ("findings", "fault_reports")}
    with progress.step("ceilings"):
        record["ceilings"] = measure_ceilings()
    record["cases"] = run.run_all(chosen, record["ceilings"], progress, options.bench_timeout)
    if subjects:
        record["values"] = values.run_all(subjects, min(values.SECONDS, options.bench_timeout), progress)
    return record


def needed(sections: Sequence[str], chosen: Sequence[Any], sms: int) -> list[Any]:
    """Returns the kernels of these sections and cases."""
    shipped = kernels_run.shipped_specs() if {"tests", "sanitizer"} & set(sections) else []
    random = strategies.kernel_specs() if "random" in sections else []
    return list(dict.fromkeys([*shipped, *random, *cases.specs(chosen, sms)]))


def check(options: argparse.Namespace, progress: Progress) -> Record:
    """Counts tests and findings of sanitizers, which run at the same time: both need the host most.

    Six host times were too long when sanitizers ran beside tests that measure time.
    """
    tests, quiet_is_over = dict(NOT_RUN), threading.Event()

    def look() -> list[sanitize.Finding]:
        quiet_is_over.wait()
        return sanitize.run_tools() if "sanitizer" in options.sections else []

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        try:
            if "tests" in options.sections:
                tests = run_tests(options.tests_timeout, quiet_is_over=quiet_is_over.set)
        finally:
            quiet_is_over.set()
        findings = looking.result()
    for finding in findings:
        if finding.errors != 0:
            print(f"{finding.tool}: {finding.reason or finding.errors}\n{finding.output[-2000:]}", flush=True)
            print("\n".join(sanitize.kinds(finding.output)), flush=True)
    progress.say("tests and sanitizers are done")
    return {**tests, "sanitizer": sanitizer_record(findings)}


def sanitizer_record(findings: Sequence[sanitize.Finding]) -> Record:
    """Returns counts by tool, under "reasons" why a count is missing, under "known" counts of known false reports."""
    record: Record = {**dict.fromkeys(records.SANITIZER_TOOLS), **{one.tool: one.errors for one in findings}}
    reasons = {finding.tool: finding.reason for finding in findings if finding.errors is None}
    known = {finding.tool: dict(finding.known) for finding in findings if finding.known}
    return {**record, **({"reasons": reasons} if reasons else {}), **({"known": known} if known else {})}


# ---- the verdict


def finish(record: Record, out: pathlib.Path) -> int:
    """Writes the record, prints cases, counts, what is left out and what is missing; returns the exit status."""
    records.write(record, out)
    print(run.table(record["cases"]))
    tests, ceilings = record["tests"], record["ceilings"]
    print(f"tests: {tests}; ceilings: {ceilings}\nwritten to {out}")
    if parts := left_out(record):
        print(f"left out: {', '.join(parts)}")
    found = shortcomings(record)
    for problem in found:
        print(f"NOT GOOD: {problem}")
    print(f"{len(found)} shortcomings" if found else "all that ran is good", flush=True)
    return int(bool(found))


def left_out(record: Mapping[str, Any]) -> list[str]:
    """Returns the parts that the record does not have."""
    there = {case["op"] for case in record["cases"]}
    absent = {
        "tests": record["tests"]["passed"] is None,
        "compute-sanitizer": record["tests"]["sanitizer"]["memcheck"] is None,
        "random calls": "reliability" not in record,
        "families of values": "values" not in record,
    }
    for name, section in cases.SECTIONS.items():
        absent[f"benchmarks of {name}"] = not any(case.name.partition(" ")[0] in there for case in section.cases)
    return [name for name, missing in absent.items() if missing]


def shortcomings(record: Mapping[str, Any]) -> list[str]:
    """Returns in words all reasons to end with status 1. Parts that were left out are not among them."""
    tests, random = record["tests"], record.get("reliability", {})
    sanitizer = tests["sanitizer"]
    found = [f"{tests['failed']} tests failed"] if tests["failed"] else []
    found += [f"{tool}: {sanitizer[tool]} errors" for tool in sanitize.TOOLS if sanitizer.get(tool)]
    found += [f"{tool} did not run: {reason}" for tool, reason in sanitizer.get("reasons", {}).items()]
    found += [f"random calls: {random[key]} {key}" for key in ("wrong", "faults", "out_of_memory") if random.get(key)]
    for entry in (*record["cases"], *record.get("values", ())):
        name = f"{'values, ' if 'values' in entry else ''}{case_name(entry)}"
        found += [f"{name}, {family}: {reason[:200]}" for family, reason in entry.get("wrong", {}).items()]
        if "failed" in entry:
            found.append(f"{name}: {entry['failed'][:200]}")
        elif entry.get("met") is False:
            found.append(f"{name}: misses {', '.join(f'{key} {limit}' for key, limit in entry['must'].items())}")
    return found


if __name__ == "__main__":
    sys.exit(main())
