"""compute-sanitizer: runs the calls of `bench.sanitizing.calls` under each tool, and reads the tools' reports."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "sanitize.py"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
# every report is read, see KNOWN; thousands of host stacks take minutes
OPTIONS = {"initcheck": ("--print-limit", "100000", "--show-backtrace", "no")}
FINDINGS_EXIT = 99
WORKER_DONE = "sanitize worker: done"
TIMEOUT_S = 240
NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"
PLACES_TO_LOOK = ("/usr/local/cuda/bin", "/opt/cuda/bin")
# racecheck ends with "RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)", the others with "ERROR SUMMARY: 3
# errors"
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) errors?)|(?:RACECHECK SUMMARY: (\d+) hazards?)")


# the beginning of a report of initcheck or racecheck; it ends at a line without text
REPORT = re.compile(
    r"^========= (?:Uninitialized|Host API memory access error|(?:Error|Warning): Race).*?(?=^=========\s*$|\Z)",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Part:
    """Calls that run in a process of their own, at the same time as the others: most of a run is work of the host.

    name           name of the calls
    default_dtype  default dtype of torch while the ops are called
    caching        with torch's caching allocator, which graphs need. Without, every tensor is an allocation of its own,
                   so reads past its end are seen
    tools          tools that run the calls
    """

    name: str
    default_dtype: str = "float32"
    caching: bool = False
    tools: tuple[str, ...] = TOOLS


# initcheck needs separate allocations, and does not depend on dtypes
PARTS = (
    Part("sink", tools=TOOLS[:3]),  # the longest first
    Part("few sinks", tools=TOOLS[3:]),  # initcheck takes minutes for calls that take the others one
    Part("mla"),
    Part("latent", tools=TOOLS[:3]),
    Part("gqa"),
    Part("index", tools=TOOLS[3:]),  # the other tools see these calls among the samples
    Part("graphs", caching=True, tools=TOOLS[:3]),
    Part("sample", default_dtype="bfloat16", tools=TOOLS[:3]),
)


@dataclass(frozen=True)
class Known:
    """A false report of a tool.

    tool    the tool that makes it
    report  pattern in the text of the report
    why     it is false
    show    calls, by a name of SHOWS, under which the tool makes it although their results are right
    parts   parts whose calls may cause it; elsewhere it is a finding
    """

    tool: str
    report: str
    why: str
    show: str
    parts: tuple[str, ...]


SHOWS = ("tma-stores", "votes")
KNOWN: Mapping[str, Known] = {
    "host reads what TMA stored": Known(
        "initcheck",
        r"Host API memory access error at host access.*\n.*Uninitialized access to \w+ on access by cudaMemcpy source",
        "sink attention stores its output and its gradients by TMA, which initcheck does not see; what is copied is "
        "compared with the oracle, so an element that nobody had written would show there",
        "tma-stores",
        ("few sinks", "tma-stores"),
    ),
    "lanes that a vote joins": Known(
        "racecheck",
        r"Warning: Race reported between Read access at \S*MlaDecodeKernel.*\n.*and Write access at \S*MlaDecodeKernel",
        "all lanes of a softmax warp read its flags, and the exponents of its units, before lane 0 stores new ones; a "
        "vote or a reduction of the warp stands between, which racecheck does not take for a barrier (its warnings are "
        "of threads of one warp). A barrier there costs registers that are not there: ptxas then serializes wgmma",
        "votes",
        ("mla", "latent", "graphs", "sample", "votes"),
    ),
}
"""Known false reports by name. An entry belongs here only after `--show` has shown the report with right results."""


@dataclass(frozen=True)
class Finding:
    """The result of one tool: `errors`, or None with the `reason` why it did not run.

    Reports that are `known` to be false are counted by name and are not errors.
    """

    tool: str
    errors: int | None
    reason: str = ""
    output: str = ""
    known: Mapping[str, int] = field(default_factory=dict)


def find_sanitizer() -> str | None:
    """Returns the path of compute-sanitizer, or None."""
    places = os.pathsep.join((os.environ.get("PATH", ""), *PLACES_TO_LOOK))
    return shutil.which("compute-sanitizer", path=places)


def parse(tool: str, output: str, status: int, part: str = "") -> Finding:
    """Reads a tool's output. Only a worker that came to its end under a tool that summed up counts as checked."""
    totals = [int(first or second) for first, second in SUMMARY.findall(output)]
    errors = max(totals, default=0)
    known = known_reports(tool, output, part)
    if errors and errors == sum(known.values()) and WORKER_DONE in output:
        return Finding(tool, 0, output=output, known=known)
    if errors or status == FINDINGS_EXIT:
        return Finding(tool, max(errors - sum(known.values()), 1), output=output, known=known)
    if not totals:
        return Finding(tool, None, f"no summary, exit status {status}: {_last_line(output)}", output)
    if WORKER_DONE not in output:
        return Finding(tool, None, f"the worker did not finish, exit status {status}: {_last_line(output)}", output)
    return Finding(tool, 0, output=output)


def known_reports(tool: str, output: str, part: str) -> dict[str, int]:
    """Returns how many reports of a tool each entry of the list explains."""
    entries = {name: entry for name, entry in KNOWN.items() if entry.tool == tool and part in entry.parts}
    found: Counter[str] = Counter()
    for report in REPORT.findall(output):
        found.update([name for name, entry in entries.items() if re.search(entry.report, report)][:1])
    return dict(found)


def kinds(output: str) -> list[str]:
    """Returns initcheck's reports, most frequent first: what was read and by whom, without threads and addresses."""
    found: Counter[str] = Counter()
    for report in REPORT.findall(output):
        lines = [line.removeprefix("=========").strip() for line in report.splitlines()[:2]]
        found[re.sub(r"0x[0-9a-f]+", "...", ", ".join(lines))] += 1
    return [f"{count} x {kind}" for kind, count in found.most_common()]


def run_worker(tool_command: Sequence[str], part: Part) -> subprocess.CompletedProcess[str]:
    """Runs a part of the calls as a command that `tool_command` begins; joins stdout and stderr."""
    environment = {name: value for name, value in os.environ.items() if name != NO_CACHING}
    # oracles run on the CPU; all parts and tools run side by side
    environment["OMP_NUM_THREADS"] = "2"
    if not part.caching:
        environment[NO_CACHING] = "1"
    return subprocess.run(
        [*tool_command, sys.executable, str(SCRIPT), "--worker", part.name, "--default-dtype", part.default_dtype],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )


def run_tool(tool: str, part: Part) -> Finding:
    """Runs a part of the calls under one tool."""
    sanitizer = find_sanitizer()
    if sanitizer is None:
        return Finding(tool, None, "compute-sanitizer is not installed")
    tool_command = [sanitizer, "--tool", tool, *OPTIONS.get(tool, ()), "--error-exitcode", str(FINDINGS_EXIT)]
    try:
        done = run_worker(tool_command, part)
    except subprocess.TimeoutExpired:
        return Finding(tool, None, f"{part.name}: not done after {TIMEOUT_S} s")
    return parse(tool, done.stdout, done.returncode, part.name)


def join(tool: str, findings: Sequence[Finding]) -> Finding:
    """Joins the findings of a tool in all parts; a part that it did not check leaves no number."""
    output = "\n".join(finding.output for finding in findings)
    known: Counter[str] = Counter()
    for finding in findings:
        known.update(finding.known)
    reasons = [finding.reason for finding in findings if finding.errors is None]
    if reasons:
        return Finding(tool, None, "; ".join(reasons), output, dict(known))
    return Finding(tool, sum(finding.errors or 0 for finding in findings), output=output, known=dict(known))


def run_tools(tools: Sequence[str] = TOOLS) -> list[Finding]:
    """Runs each part alone, which also compiles missing kernels; if it comes to its end, then under the tools.

    All parts run side by side.
    """

    def look(part: Part) -> list[Finding]:
        wanted = [tool for tool in tools if tool in part.tools]
        try:
            alone = run_worker([], part)
        except subprocess.TimeoutExpired:
            return [Finding(tool, None, f"{part.name} alone was not done after {TIMEOUT_S} s") for tool in wanted]
        if WORKER_DONE not in alone.stdout:
            reason = f"{part.name} fails by itself: {_last_line(alone.stdout)}"
            return [Finding(tool, None, reason, alone.stdout) for tool in wanted]
        with ThreadPoolExecutor(len(wanted) or 1) as pool:
            return list(pool.map(run_tool, wanted, [part] * len(wanted)))

    with ThreadPoolExecutor(len(PARTS)) as pool:
        found = [finding for findings in pool.map(look, PARTS) for finding in findings]
    return [join(tool, [finding for finding in found if finding.tool == tool]) for tool in tools]


def show(name: str) -> int:
    """Runs the calls of a false report under the tools that make it, and prints their reports."""
    status = 0
    for tool in sorted({entry.tool for entry in KNOWN.values() if entry.show == name}) or ["initcheck"]:
        finding = run_tool(tool, Part(name))
        print(finding.output)
        print(f"{tool}: {finding.reason or f'{finding.errors} errors'}, known to be false: {dict(finding.known)}")
        status |= int(WORKER_DONE not in finding.output)
    return status


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
