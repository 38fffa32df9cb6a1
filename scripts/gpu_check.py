"""Check and measure everything on an SM90 GPU, and write the record to results/<card>.json.

    python scripts/gpu_check.py                       all of it, under 8 minutes on an H200
    python scripts/gpu_check.py --quick               few benchmark cases
    python scripts/gpu_check.py --only 'dense 1'      benchmark cases whose name matches
    python scripts/gpu_check.py --skip-tests --skip-sanitizer
    python scripts/gpu_check.py --skip-benchmarks --keep build/gpu_check_partial.json      all, in two runs

Two steps: tests/gpu, with every kernel under compute-sanitizer beside them; the benchmarks, each with its own
correctness check. A case whose check fails is recorded with its errors and without a speed. A run that leaves something
out is written below build/, not over the record, unless --out says where, or another run on the same card with the same
sources and versions has it (--keep). Exit status 1 when a test, a sanitizer or a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from xml.etree import ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

import torch  # noqa: E402

from cute_kernels.mla import spec as mla_spec  # noqa: E402
from cute_kernels.runtime.arch import is_sm90  # noqa: E402
from cute_kernels.runtime.compile import precompile  # noqa: E402
from cute_kernels.testing import evidence  # noqa: E402
from cute_kernels.testing.timing import measure_ceilings  # noqa: E402
from scripts import bench_gqa, bench_mla, bench_sink, sanitize  # noqa: E402

TESTS_TIMEOUT_S = 540  # 260 s on a usual host, 400 on the slowest so far
SHARDS = 14
"""Processes that share the tests: most of a test is work of the host. Their largest need 8 GB of the GPU each."""
PARTIAL_RESULT = ROOT / "build" / "gpu_check_partial.json"

Bench = tuple[str, Callable[[dict[str, float]], dict[str, Any]]]


class Progress:
    """Says what is going on and for how long it took: a live line where rich is installed, plain lines elsewhere."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._console: Any = None
        with contextlib.suppress(ImportError):
            from rich.console import Console

            self._console = Console(highlight=False)

    def say(self, text: str) -> None:
        """One line with the time since the start."""
        line = f"{time.monotonic() - self._started:6.1f} s  {text}"
        if self._console is None:
            print(line, flush=True)
        else:
            self._console.print(line, markup=False)

    @contextlib.contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Show `text` while the block runs."""
        if self._console is None or not self._console.is_terminal:
            self.say(text)
            yield
            return
        with self._console.status(text):
            yield
        self.say(text)


def run_tests(shards: int = SHARDS, beside: Callable[[], Any] | None = None) -> dict[str, int]:
    """Run tests/gpu and count: one process compiles, one runs tests that measure time, then several share the rest.

    `beside` is called while those run.
    """
    deadline = time.monotonic() + TESTS_TIMEOUT_S
    parts = [["-m", "not alone", "--shard", f"{i}/{shards}"] for i in range(1, shards + 1)]
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(1) as pool:
        folder = pathlib.Path(name)
        [(status, _)] = run_pytest([["--compile-only"]], folder, deadline)
        if status != 0:
            return count_tests(None)
        done = run_pytest([["-m", "alone"]], folder, deadline)
        other = pool.submit(beside or (lambda: None))
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
            print(f"tests/gpu {shlex.join(options)}: not done after {TESTS_TIMEOUT_S} s", flush=True)
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
    """Counts by tool, and under "reasons" why a count is missing."""
    record: dict[str, Any] = {finding.tool: finding.errors for finding in findings}
    reasons = {finding.tool: finding.reason for finding in findings if finding.errors is None}
    return {**record, "reasons": reasons} if reasons else record


def select_benches(quick: bool, only: str | None) -> tuple[list[Bench], int]:
    """The benchmarks to run, and the tokens of the FP8 cache that those of MLA share."""
    peer = bench_mla.import_peer()
    if isinstance(peer, str):
        print(f"no peer to compare with: {peer}", flush=True)

    def wanted(name: str) -> bool:
        return only is None or re.search(only, name) is not None

    decode = [bench for bench in bench_mla.DECODE_CASES if (bench.quick or not quick) and wanted(bench.name)]
    tokens = max((bench.cache_tokens for bench in decode), default=0)
    caches = bench_mla.Caches(tokens)
    benches: list[Bench] = [
        (bench.name, functools.partial(bench_mla.run_decode, bench, caches, peer)) for bench in decode
    ]
    others: list[Bench] = [("mla_fp8_append", bench_mla.run_append), ("merge_states", bench_mla.run_merge)]
    pool = bench_gqa.Pool()
    others += [
        (gqa.name, functools.partial(bench_gqa.run_decode, gqa, pool))
        for gqa in bench_gqa.DECODE_CASES
        if gqa.quick or not quick
    ]
    others += [
        (append.name, functools.partial(bench_gqa.run_append, append, pool.device))
        for append in bench_gqa.APPEND_CASES
        if append.quick or not quick
    ]
    others += [
        (sink.name, functools.partial(bench_sink.run, sink)) for sink in bench_sink.CASES if sink.quick or not quick
    ]
    others += [
        (routing.name, functools.partial(bench_sink.run_routing, routing))
        for routing in bench_sink.ROUTING_CASES
        if routing.quick or not quick
    ]
    return benches + [(name, run) for name, run in others if wanted(name)], tokens


def run_benches(benches: Sequence[Bench], ceilings: dict[str, float], progress: Progress) -> list[dict[str, Any]]:
    """Run each; one that raises is recorded as failed and the others go on."""
    cases = []
    for name, run in benches:
        with progress.step(name):
            try:
                cases.append(run(ceilings))
            except Exception as error:  # the record must say which case broke, whatever broke it
                op, _, sizes = name.partition(" ")
                cases.append({"op": op, "case": sizes, "failed": f"{type(error).__name__}: {error}"[:500]})
        torch.cuda.empty_cache()
    return cases


def table(cases: Sequence[dict[str, Any]]) -> str:
    """One line a case: what it was, time, rates, whether that is enough, the peer's time over ours, errors."""
    header = ("case", "us", "TFLOP/s", "GB/s", "of ceiling", "must", "cyc/token", "peer/ours", "rel err", "lse err")
    rows: list[tuple[str, ...]] = [(*header, "host us")]
    for case in cases:
        name = case_name(case)
        if "failed" in case:
            rows.append((name, "FAILED", case["failed"], *[""] * (len(rows[0]) - 3)))
            continue
        peers = " ".join(str(peer.get("ratio", "failed")) for peer in (case.get("peers") or {}).values())
        must = " ".join(f"{key} {limit}" for key, limit in (case.get("must") or {}).items())
        must += {True: " met", False: " MISSED", None: ""}[case.get("met")]
        figures = [case.get(key) for key in ("us", "TFLOPs", "GBps")]
        fraction = case.get("read_fraction", case.get("copy_fraction"))
        errors = [case.get(key) for key in ("rel_err", "lse_err", "host_us")]
        figures += [fraction, must, case.get("cycles_per_token"), peers]
        rows.append((name, *("" if value is None else str(value) for value in (*figures, *errors))))
    columns = range(len(header) + 1)
    widths = [max(len(row[column]) for row in rows if row[1] != "FAILED" or column < 2) for column in columns]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def case_name(case: dict[str, Any]) -> str:
    """What a case of the record was, in one line."""
    named = [str(case[key]) for key in ("op", "mode", "pass", "case", "kv_dtype", "scales", "layout") if case.get(key)]
    if "page_size" in case:
        named[-1] += f"_{case['page_size']}"
    if "batch" in case:
        named.append(f"{case['batch']}x{case['h_q']}x{case['s_q']}")
    sizes = [
        f"{key} {case[key]}"
        for key in ("topk", "s_k", "ragged", "d", "tokens", "splits", "window", "deterministic")
        if key in case
    ]
    return " ".join([*named, *sizes])


def card_slug(card: str) -> str:
    """File name for a card: "NVIDIA H200" -> "h200", "NVIDIA H100 80GB HBM3" -> "h100"."""
    model = re.search(r"\b[A-Z]+\d+\b", card)
    return (model.group() if model else card.replace(" ", "_")).lower()


def require_same(kept: dict[str, Any], here: Mapping[str, Any]) -> None:
    """Raises a ValueError where a record is of another card, or of other sources or versions, than this run."""
    for key in ("source_digest", "card", "driver", "torch", "cutlass_dsl"):
        if kept[key] != here[key]:
            raise ValueError(f"--keep: got {key} {kept[key]!r}, needs that of this run, {here[key]!r}")


def completed(record: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    """A record with the tests, sanitizers or benchmarks that it lacks, as another one has them.

    Raises:
        ValueError: as `require_same`.
    """
    require_same(kept, record)
    tests = dict(kept["tests"] if record["tests"]["passed"] is None else record["tests"])
    sanitizers = [one["tests"]["sanitizer"] for one in (record, kept)]
    ran = any(sanitizers[0][tool] is not None for tool in evidence.SANITIZER_TOOLS)
    whole = {**record, "tests": {**tests, "sanitizer": sanitizers[0] if ran else sanitizers[1]}}
    if not record["cases"]:
        whole.update(cases=kept["cases"], ceilings=kept["ceilings"])
    evidence.validate(whole)
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few benchmark cases")
    parser.add_argument("--only", metavar="REGEX", help="benchmark cases whose name matches")
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--skip-sanitizer", action="store_true")
    parser.add_argument("--skip-benchmarks", action="store_true")
    parser.add_argument("--keep", metavar="RECORD", type=pathlib.Path, help="which has what this run leaves out")
    parser.add_argument("--out", type=pathlib.Path, help="default: results/<card>.json, below build/ for a partial run")
    options = parser.parse_args(arguments)

    if not torch.cuda.is_available() or not is_sm90(torch.device("cuda")):
        found = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
        print(f"gpu_check needs an SM90 GPU (Hopper, compute capability 9.0); found {found}", file=sys.stderr)
        return 2

    progress = Progress()
    digest = evidence.source_digest()
    kept = None if options.keep is None else evidence.read(options.keep)
    if kept is not None:  # now, and not when all has run
        require_same(kept, {**evidence.machine(), "source_digest": digest})
    tests: dict[str, Any] = {"passed": None, "failed": None, "skipped": None}
    sanitizer: dict[str, Any] = {**dict.fromkeys(evidence.SANITIZER_TOOLS), "reasons": {"all": "left out of this run"}}
    findings: list[sanitize.Finding] = []

    def run_sanitizer() -> None:
        if not options.skip_sanitizer:
            findings.extend(sanitize.run_tools())
            progress.say("compute-sanitizer is done")

    def beside_tests() -> None:
        """What needs the host more than the GPU."""
        with ThreadPoolExecutor(1) as pool:
            specs: list[Any] = []
            if not options.skip_benchmarks:
                gqa = [bench.spec for bench in bench_gqa.DECODE_CASES]
                specs = [*gqa, *bench_sink.specs(), *mla_spec.shipped_specs()]
            processes = None if options.skip_tests else 4  # the tests have most of the cores
            kernels = pool.submit(precompile, specs, processes)
            run_sanitizer()
            kernels.result()

    progress.say("tests/gpu; beside them compute-sanitizer, kernels of the benchmarks")
    if options.skip_tests:
        beside_tests()
    else:
        tests = run_tests(beside=beside_tests)
    for finding in findings:
        if finding.errors != 0:
            print(f"{finding.tool}: {finding.reason or finding.errors}\n{finding.output[-2000:]}", flush=True)
    if findings:
        sanitizer = sanitizer_record(findings)
    if kept is not None and options.skip_benchmarks:
        ceilings = kept["ceilings"]  # those that its benchmarks are fractions of
    else:
        with progress.step("ceilings"):
            ceilings = measure_ceilings()
    benches, tokens = ([], 0) if options.skip_benchmarks else select_benches(options.quick, options.only)
    progress.say(
        f"{len(benches)} benchmark cases, MLA over a cache of {tokens * bench_mla.TOKEN_BYTES / 2**30:.1f} GiB"
    )
    cases = run_benches(benches, ceilings, progress)

    if evidence.source_digest() != digest:
        print("the sources changed while this ran: nothing is recorded", file=sys.stderr)
        return 1
    record = evidence.assemble(
        machine=evidence.machine(),
        digest=digest,
        tests={**tests, "sanitizer": sanitizer},
        ceilings=ceilings,
        cases=cases,
    )
    if kept is not None:
        record = completed(record, kept)
    tests, cases = record["tests"], record["cases"]
    sanitizer, ceilings = tests["sanitizer"], record["ceilings"]
    partial = options.quick or options.only is not None or (options.skip_sanitizer and kept is None)
    partial = partial or tests["passed"] is None or not cases
    out = options.out or (PARTIAL_RESULT if partial else ROOT / "results" / f"{card_slug(record['card'])}.json")
    evidence.write(record, out)

    progress.say(f"written to {out}; scripts/results_table.py puts results/h200.json into the pages")
    print(table(cases))
    counts = ", ".join(f"{tests[key]} {key}" for key in ("passed", "failed", "skipped"))
    print(f"tests: {counts}; sanitizer: {sanitizer}; ceilings: {ceilings}", flush=True)
    findings_left = any(sanitizer[tool] for tool in evidence.SANITIZER_TOOLS)
    return int(bool(tests["failed"]) or findings_left or any("failed" in case for case in cases))


if __name__ == "__main__":
    sys.exit(main())
