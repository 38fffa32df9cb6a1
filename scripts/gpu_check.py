"""Check and measure everything on an SM90 GPU, and write the record to results/<card>.json.

    python scripts/gpu_check.py                       all of it in one run
    python scripts/gpu_check.py --sections mla        some sections; each run writes what it has
    python scripts/gpu_check.py --sections values --only 'sparse 128' --values-timeout 300      families of values
    python scripts/gpu_check.py --quick               few benchmark cases
    python scripts/gpu_check.py --only 'dense 1'      benchmark cases whose name matches
    python scripts/gpu_check.py --sections mla --only ' dense ' --out build/part.json      a part of a section, to merge
    python scripts/gpu_check.py --skip-benchmarks --keep build/part.json       with what other runs have
    python scripts/gpu_check.py --merge build/gpu_check_*.json                 one record of such parts; needs no GPU
    python scripts/gpu_check.py --reliability build/fuzz_*.json                with what random calls have found

Sections: tests/gpu, and every kernel under compute-sanitizer at the same time; random calls, the short form of
scripts/fuzz.py; the benchmarks of each system, each case with its own correctness check; cases over families of values;
the table of accuracy. A case whose check fails is recorded with its errors and without a speed. A run that leaves
something out is written below build/, not over the record, unless --out says where, or other runs on the same card with
the same machine code and versions have it (--keep, --merge). The record is written whatever was found; exit status 1
when a test or a check failed, a sanitizer found something or did not run, a case misses what it must reach, or the
machine code is not known. The last lines say which, and what was left out.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from xml.etree import ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

import torch  # noqa: E402

from bench import accuracy, kernels_run, records  # noqa: E402
from bench import gqa as bench_gqa  # noqa: E402
from bench import mla as bench_mla  # noqa: E402
from bench import sink as bench_sink  # noqa: E402
from bench import values as bench_values  # noqa: E402
from bench.cases import card_slug, case_name, name_kernels, run_benches, select_benches, table  # noqa: E402
from bench.ceilings import measure_ceilings  # noqa: E402
from bench.parts import LEFT_OUT, SECTIONS, completed, fewer_cases, left_out, merged, partial, require_same  # noqa: E402
from bench.peers import versions  # noqa: E402
from bench.progress import Progress  # noqa: E402
from bench.sanitizing import tools as sanitize  # noqa: E402
from cute_kernels.mla import spec as mla_spec  # noqa: E402
from cute_kernels.mla.crossover import spec as crossover_spec  # noqa: E402
from cute_kernels.runtime.arch import is_sm90  # noqa: E402
from scripts import fuzz  # noqa: E402

TESTS_TIMEOUT_S = 540  # 260 s on a usual host, 400 on the slowest so far
SHARDS = 14
"""Processes that share the tests: most of a test is work of the host. Their largest need 8 GB of the GPU each."""
STUCK_S = 90
"""After which a test that is still running says where: one that waits for the GPU for ever has nothing else to say."""
SHORT_FUZZ_SEED = 10**9
"""Far from the seeds of recorded runs of `scripts/fuzz.py`, which begin at 0."""
PARTIAL_RESULT = ROOT / "build" / "gpu_check_partial.json"


def run_tests(
    shards: int = SHARDS, meanwhile: Callable[[], Any] | None = None, seconds: float = TESTS_TIMEOUT_S
) -> dict[str, int]:
    """Run tests/gpu and count: one process compiles, one runs tests that measure time, then several share the rest.

    `meanwhile` is called while those run. What has not come to its end after `seconds` is stopped, and is a failure.
    """
    deadline = time.monotonic() + seconds
    parts = [["-m", "not alone", "--shard", f"{i}/{shards}"] for i in range(1, shards + 1)]
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(1) as pool:
        folder = pathlib.Path(name)
        [(status, _)] = run_pytest([["--compile-only"]], folder, deadline)
        if status != 0:
            return count_tests(None)
        done = run_pytest([["-m", "alone"]], folder, deadline)
        other = pool.submit(meanwhile or (lambda: None))
        done += run_pytest(parts, folder, deadline)
        other.result()
    return sum_counts(done)


def run_pytest(
    selections: Sequence[Sequence[str]], folder: pathlib.Path, deadline: float
) -> list[tuple[int | None, str | None]]:
    """Run tests/gpu once for each list of options, side by side: exit status (None: ran out of time) and JUnit report.

    What a process said is shown when it ends, all of it if it failed.
    """
    cores = max(1, (os.cpu_count() or 1) // len(selections))
    running = []
    for i, options in enumerate(selections):
        report, output = folder / f"{i}.xml", folder / f"{i}.txt"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", str(ROOT / "tests" / "gpu"), "-q", "-p", "no:cacheprovider"]
        command += ["-o", f"faulthandler_timeout={STUCK_S}"]
        with output.open("w") as stream:
            process = subprocess.Popen(
                [*command, f"--junitxml={report}", *options],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": str(cores)},
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
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


def sum_counts(done: Sequence[tuple[int | None, str | None]]) -> dict[str, int]:
    """Counts over processes. One that did not come to its end, or ended badly with no failure to show, is a failure."""
    total = {"passed": 0, "failed": 0, "skipped": 0}
    for status, report in done:
        counts = count_tests(None if status is None else report)
        if status != 0 and not counts["failed"]:
            counts["failed"] = 1
        for key in total:
            total[key] += counts[key]
    return total


def count_tests(junit_xml: str | None) -> dict[str, int]:
    """Passed, failed (or broken) and skipped tests of a JUnit report. No report, or an empty one, is a failure."""
    nothing = {"passed": 0, "failed": 1, "skipped": 0}
    if junit_xml is None:
        return nothing
    suites = list(ElementTree.fromstring(junit_xml).iter("testsuite"))
    total, failures, errors, skipped = (
        sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "failures", "errors", "skipped")
    )
    if total == 0:
        return nothing
    failed = failures + errors
    return {"passed": total - failed - skipped, "failed": failed, "skipped": skipped}


def sanitizer_record(findings: Sequence[sanitize.Finding]) -> dict[str, Any]:
    """Counts by tool, under "reasons" why a count is missing, under "known" reports that are known to be false."""
    record: dict[str, Any] = {finding.tool: finding.errors for finding in findings}
    reasons = {finding.tool: finding.reason for finding in findings if finding.errors is None}
    known = {finding.tool: dict(finding.known) for finding in findings if finding.known}
    return {**record, **({"reasons": reasons} if reasons else {}), **({"known": known} if known else {})}


def shortcomings(record: Mapping[str, Any]) -> list[str]:
    """In words, all that a record lacks for which `gpu_check` ends with status 1. What was left out is none of it."""
    tests = record["tests"]
    found = [f"{tests['failed']} tests failed"] if tests["failed"] else []
    sanitizer = tests["sanitizer"]
    reasons = sanitizer.get("reasons", {})
    for tool in (*records.SANITIZER_TOOLS, *records.MORE_TOOLS):
        if sanitizer.get(tool):
            found.append(f"{tool}: {sanitizer[tool]} errors")
        elif tool in sanitizer and sanitizer[tool] is None and reasons.get("all") != LEFT_OUT:
            found.append(f"{tool} did not run: {reasons.get(tool, 'no reason is known')}")
    for case in record["cases"]:
        if "failed" in case:
            found.append(f"{case_name(case)}: {case['failed'][:200]}")
        elif case.get("met") is False:
            must = ", ".join(f"{key} {limit}" for key, limit in case["must"].items())
            found.append(f"{case_name(case)}: misses {must}")
        elif "kernels" in record and not case["kernels"]:
            found.append(f"{case_name(case)}: ran no kernel that is known")
    for entry in record.get("values", []):
        name = f"values, {case_name(entry)}"
        found += [f"{name}, {family}: {reason[:200]}" for family, reason in entry.get("wrong", {}).items()]
        if "failed" in entry:
            found.append(f"{name}: {entry['failed'][:200]}")
        elif entry.get("met") is False:
            must = ", ".join(f"{key} {limit}" for key, limit in entry["must"].items())
            found.append(f"{name}: misses {must}")
    if "kernels" not in record:
        found.append("the machine code that ran is not known")
    for key in ("wrong", "faults"):
        if count := record.get("reliability", {}).get(key):
            found.append(f"random calls: {count} {key}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.merge:
        return merge(options)
    if not torch.cuda.is_available() or not is_sm90(torch.device("cuda")):
        found = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
        print(f"gpu_check needs an SM90 GPU (Hopper, compute capability 9.0); found {found}", file=sys.stderr)
        return 2

    progress = Progress()
    digest = records.source_digest()
    kept = [records.read(path) for path in options.keep]
    random_calls = None if options.reliability is None else records.read_reliability(options.reliability)
    peers = versions()
    for other in kept:  # now, and not when all has run
        require_same(other, {**records.machine(), "source_digest": digest, "peers": peers})
    code = kernels_run.machine_code()
    tests, sanitizer = check(options, code, progress)
    problems: list[str] = []
    if "random" in options.sections:
        with progress.step("random calls"):
            fuzzed = fuzz.short(first_seed=SHORT_FUZZ_SEED)
        fuzz.show_result(fuzzed)
        if not fuzz.sound(fuzzed, fuzz.SHORT):
            problems.append(f"random calls: {fuzzed['wrong']} wrong, {fuzzed['faults']} faults")
    with progress.step("ceilings"):
        ceilings = measure_ceilings()
    more: dict[str, Any] = {}
    if "accuracy" in options.sections:
        with progress.step("accuracy of scores, accumulator of the FP8 tensor core"):
            more, wrong = accuracy.measure()
        problems += wrong
    benches, tokens = select_benches(options.quick, options.only, options.sections)
    progress.say(
        f"{len(benches)} benchmark cases, MLA over a cache of {tokens * bench_mla.TOKEN_BYTES / 2**30:.1f} GiB"
    )
    ran: list[list[Any]] = []
    cases = run_benches(benches, ceilings, progress, ran)
    if "values" in options.sections:
        more["values"], ran_values = bench_values.run_all(
            bench_values.benches(options.quick, options.only), options.values_timeout
        )
        ran += ran_values
    facts: dict[str, Any] = {}
    try:
        with progress.step("digests of machine code"):
            shipped = kernels_run.shipped_specs() if "tests" in options.sections else []
            facts = name_kernels([*cases, *more.get("values", [])], ran, shipped, code)
    except Exception as error:  # what was measured is recorded whatever a disassembler says
        print(f"no digests of machine code: {type(error).__name__}: {error}", flush=True)

    if records.source_digest() != digest:
        print("the sources changed while this ran: nothing is recorded", file=sys.stderr)
        return 1
    record = records.assemble(
        machine=records.machine(),
        digest=digest,
        tests={**tests, "sanitizer": sanitizer},
        ceilings=ceilings,
        cases=cases,
        peers=peers,
        more=more,
        **facts,
    )
    for other in kept:
        record = completed(record, other)
    return finish(record, options, problems, random_calls, some_cases=options.quick or options.only is not None)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; `sections` are those that run, in order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = "; ".join(f"{name}: {what}" for name, what in SECTIONS.items())
    parser.add_argument("--sections", metavar="NAME", nargs="+", choices=list(SECTIONS), help=known)
    parser.add_argument("--quick", action="store_true", help="few benchmark cases")
    parser.add_argument("--only", metavar="REGEX", help="benchmark cases whose name matches")
    parser.add_argument(
        "--tests-timeout", metavar="SECONDS", type=float, default=TESTS_TIMEOUT_S, help=f"of tests ({TESTS_TIMEOUT_S})"
    )
    seconds = bench_values.SECONDS
    parser.add_argument(
        "--values-timeout",
        metavar="SECONDS",
        type=float,
        default=seconds,
        help=f"of families of values ({seconds:.0f})",
    )
    parser.add_argument("--skip-tests", action="store_true", help="nor random calls")
    parser.add_argument("--skip-sanitizer", action="store_true")
    parser.add_argument("--skip-benchmarks", action="store_true", help="nor accuracy")
    parser.add_argument(
        "--keep", metavar="RECORD", type=pathlib.Path, nargs="+", default=[], help="which have what this run leaves out"
    )
    parser.add_argument("--merge", metavar="RECORD", type=pathlib.Path, nargs="+", help="parts of one record; no GPU")
    parser.add_argument(
        "--reliability", metavar="FILE", type=pathlib.Path, nargs="+", help="what random calls have found, added up"
    )
    parser.add_argument("--out", type=pathlib.Path, help="default: results/<card>.json, below build/ for a partial run")
    options = parser.parse_args(arguments)
    options.part = "_".join(options.sections or ())
    skipped = {
        *(("tests", "random") if options.skip_tests else ()),
        *(("sanitizer",) if options.skip_sanitizer else ()),
        *(("mla", "gqa", "sink", "values", "accuracy") if options.skip_benchmarks else ()),
    }
    options.sections = [name for name in options.sections or SECTIONS if name not in skipped]
    return options


def merge(options: argparse.Namespace) -> int:
    """One record of several parts."""
    random_calls = None if options.reliability is None else records.read_reliability(options.reliability)
    record = merged([records.read(path) for path in options.merge])
    names = [name for name, _ in select_benches(False, None, tuple(SECTIONS))[0]]
    if fewer := fewer_cases(record, names):
        print(f"not all cases: {', '.join(fewer)}", flush=True)
    return finish(record, options, [], random_calls, some_cases=bool(fewer))


def finish(
    record: dict[str, Any],
    options: argparse.Namespace,
    problems: list[str],
    random_calls: dict[str, Any] | None,
    *,
    some_cases: bool,
) -> int:
    """Writes the record where it belongs, and reports; the exit status."""
    out = options.out
    if out is None and partial(record, some_cases):
        out = PARTIAL_RESULT.with_name(f"gpu_check_{options.part}.json") if options.part else PARTIAL_RESULT
    elif out is None:
        out = ROOT / "results" / f"{card_slug(record['card'])}.json"
    records.write(record, out)  # before random calls may be refused
    kernels_run.older_file(out).unlink(missing_ok=True)  # what just ran is built
    if random_calls is not None:
        try:
            record = records.with_reliability(record, random_calls)
            records.write(record, out)
        except records.RecordError as error:
            problems.append(f"random calls are not in the record: {error}")
    print(f"written to {out}; scripts/results_table.py puts the records of results/ into the pages", flush=True)
    return report(record, problems, some_cases)


def check(options: argparse.Namespace, code: Any, progress: Progress) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tests and sanitizers: the counts of both. Meanwhile the kernels of the benchmarks are compiled."""
    tests: dict[str, Any] = {"passed": None, "failed": None, "skipped": None}
    sanitizer: dict[str, Any] = {**dict.fromkeys(records.SANITIZER_TOOLS), "reasons": {"all": LEFT_OUT}}
    findings: list[sanitize.Finding] = []

    def during_tests() -> None:
        """What needs the host more than the GPU."""
        with ThreadPoolExecutor(1) as pool:
            processes = 4 if "tests" in options.sections else None  # the tests have most of the cores
            kernels = pool.submit(code.precompile, benchmark_specs(options.sections), processes=processes)
            if "sanitizer" in options.sections:
                findings.extend(sanitize.run_tools())
                progress.say("compute-sanitizer is done")
            kernels.result()

    progress.say(f"sections: {', '.join(options.sections)}; kernels are compiled first")
    if "tests" not in options.sections:
        during_tests()
    else:
        # keeps their digests, which tests that compile do not: random calls would compile theirs once more
        code.precompile([*kernels_run.shipped_specs(), *fuzz.kernel_specs()])
        tests = run_tests(meanwhile=during_tests, seconds=options.tests_timeout)
    for finding in findings:
        if finding.errors != 0:
            said = "\n".join((finding.output[-2000:], *sanitize.kinds(finding.output)))
            print(f"{finding.tool}: {finding.reason or finding.errors}\n{said}", flush=True)
    return tests, sanitizer_record(findings) if findings else sanitizer


def benchmark_specs(sections: Collection[str]) -> list[Any]:
    """The kernels of the benchmarks of these sections."""
    made: dict[str, Callable[[], list[Any]]] = {
        "mla": lambda: [*mla_spec.shipped_specs(), *crossover_spec.shipped_specs()],
        "gqa": lambda: [bench.spec for bench in bench_gqa.DECODE_CASES],
        "sink": lambda: list(bench_sink.specs()),
        "values": bench_values.all_specs,
        "accuracy": accuracy.kernel_specs,
    }
    return list(dict.fromkeys(spec for name, specs in made.items() if name in sections for spec in specs()))


def report(record: Mapping[str, Any], problems: Sequence[str], some_cases: bool) -> int:
    """Prints the cases, the counts, what is left out and what is lacking; the exit status."""
    tests = record["tests"]
    print(table(record["cases"]))
    counts = ", ".join(f"{tests[key]} {key}" for key in ("passed", "failed", "skipped"))
    print(f"tests: {counts}; sanitizer: {tests['sanitizer']}; ceilings: {record['ceilings']}")
    if parts := left_out(record, some_cases):
        print(f"left out: {', '.join(parts)}")
    found = [*shortcomings(record), *problems]
    for problem in found:
        print(f"NOT GOOD: {problem}")
    print(f"{len(found)} shortcomings" if found else "all that ran is good", flush=True)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
