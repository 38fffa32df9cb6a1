"""Run every kernel once on small shapes under compute-sanitizer: memcheck, racecheck, synccheck, initcheck.

    python scripts/sanitize.py                    all tools, one line each; exit status 1 on any finding
    python scripts/sanitize.py --tool memcheck    one of them
    python scripts/sanitize.py --worker mla       a part of the calls alone, as the tools run them
    python scripts/sanitize.py --worker sample --default-dtype bfloat16      with another default dtype of torch

The worker compares its results with the oracle as well, so "no errors" cannot come from kernels that did not run.

initcheck does not see what TMA writes, and reports who reads it. The calls that it looks at copy such tensors to the
host and back at once: the copy to the host is reported and listed in `KNOWN`, the copy back makes the memory known, so
a report of any kernel is a finding. `--show tma-stores` runs calls that show the listed report to be false.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
# every report is read, see KNOWN; thousands of stacks of the host take minutes
OPTIONS = {"initcheck": ("--print-limit", "100000", "--show-backtrace", "no")}
FINDINGS_EXIT = 99
WORKER_DONE = "sanitize worker: done"
TIMEOUT_S = 240
NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"
PLACES_TO_LOOK = ("/usr/local/cuda/bin", "/opt/cuda/bin")
# racecheck ends with "RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)", the others with "ERROR SUMMARY: 3
# errors"
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) errors?)|(?:RACECHECK SUMMARY: (\d+) hazards?)")


# a report of initcheck begins so and ends at a line without text
REPORT = re.compile(
    r"^========= (?:Uninitialized|Host API memory access error).*?(?=^=========\s*$|\Z)", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Part:
    """Calls that run in a process of their own, beside the others: most of a run is work of the host.

    name           of the calls
    default_dtype  of torch while the ops are called
    caching        with torch's caching allocator, which graphs need. Without, every tensor is an allocation of its own,
                   so reads past its end are seen
    tools          that look at it
    """

    name: str
    default_dtype: str = "float32"
    caching: bool = False
    tools: tuple[str, ...] = TOOLS


# initcheck asks for allocations of their own, and says nothing of dtypes
PARTS = (
    Part("sink", tools=TOOLS[:3]),  # the longest first
    Part("few sinks", tools=TOOLS[3:]),  # initcheck takes minutes for what the others do in one
    Part("mla"),
    Part("gqa"),
    Part("graphs", caching=True, tools=TOOLS[:3]),
    Part("sample", default_dtype="bfloat16", tools=TOOLS[:3]),
)


@dataclass(frozen=True)
class Known:
    """A false report of a tool.

    tool    that makes it
    report  pattern in the text of the report
    why     it is false
    show    calls, of SHOWS, under which the tool makes it although their results are right
    parts   whose calls may cause it; elsewhere it is a finding
    """

    tool: str
    report: str
    why: str
    show: str
    parts: tuple[str, ...]


SHOWS = ("tma-stores",)
KNOWN: Mapping[str, Known] = {
    "host reads what TMA stored": Known(
        "initcheck",
        r"Host API memory access error at host access.*\n.*Uninitialized access to \w+ on access by cudaMemcpy source",
        "sink attention stores its output and its gradients by TMA, which initcheck does not see; what is copied is "
        "compared with the oracle, so an element that nobody had written would show there",
        "tma-stores",
        ("few sinks", "tma-stores"),
    ),
}
"""By name. An entry belongs here when `--show` has shown the report beside right results, and not before."""


@dataclass(frozen=True)
class Finding:
    """What one tool found: `errors`, or None with the `reason` why it did not get to look.

    Reports that are `known` to be false, counted by name, are none of the errors.
    """

    tool: str
    errors: int | None
    reason: str = ""
    output: str = ""
    known: Mapping[str, int] = field(default_factory=dict)


def find_sanitizer() -> str | None:
    """Path of compute-sanitizer, or None."""
    places = os.pathsep.join((os.environ.get("PATH", ""), *PLACES_TO_LOOK))
    return shutil.which("compute-sanitizer", path=places)


def parse(tool: str, output: str, status: int, part: str = "") -> Finding:
    """Read a tool's output. Only a worker that came to its end under a tool that summed up counts as looked at."""
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
    """How many reports of a tool each entry of the list explains."""
    entries = {name: entry for name, entry in KNOWN.items() if entry.tool == tool and part in entry.parts}
    found: Counter[str] = Counter()
    for report in REPORT.findall(output):
        found.update([name for name, entry in entries.items() if re.search(entry.report, report)][:1])
    return dict(found)


def kinds(output: str) -> list[str]:
    """What initcheck reports, most frequent first: what was read and by whom, without threads and addresses."""
    found: Counter[str] = Counter()
    for report in REPORT.findall(output):
        lines = [line.removeprefix("=========").strip() for line in report.splitlines()[:2]]
        found[re.sub(r"0x[0-9a-f]+", "...", ", ".join(lines))] += 1
    return [f"{count} x {kind}" for kind, count in found.most_common()]


def run_worker(under: Sequence[str], part: Part) -> subprocess.CompletedProcess[str]:
    """Run a part of the calls behind the words of `under`; its two output streams come back as one."""
    environment = {name: value for name, value in os.environ.items() if name != NO_CACHING}
    # oracles on the CPU; all parts and tools run side by side
    environment["OMP_NUM_THREADS"] = "2"
    if not part.caching:
        environment[NO_CACHING] = "1"
    script = str(pathlib.Path(__file__).resolve())
    return subprocess.run(
        [*under, sys.executable, script, "--worker", part.name, "--default-dtype", part.default_dtype],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )


def run_tool(tool: str, part: Part) -> Finding:
    """Run a part of the calls under one tool."""
    sanitizer = find_sanitizer()
    if sanitizer is None:
        return Finding(tool, None, "compute-sanitizer is not installed")
    under = [sanitizer, "--tool", tool, *OPTIONS.get(tool, ()), "--error-exitcode", str(FINDINGS_EXIT)]
    try:
        done = run_worker(under, part)
    except subprocess.TimeoutExpired:
        return Finding(tool, None, f"{part.name}: not done after {TIMEOUT_S} s")
    return parse(tool, done.stdout, done.returncode, part.name)


def join(tool: str, findings: Sequence[Finding]) -> Finding:
    """What a tool found in all parts; a part that it did not get to look at leaves no number."""
    output = "\n".join(finding.output for finding in findings)
    known: Counter[str] = Counter()
    for finding in findings:
        known.update(finding.known)
    reasons = [finding.reason for finding in findings if finding.errors is None]
    if reasons:
        return Finding(tool, None, "; ".join(reasons), output, dict(known))
    return Finding(tool, sum(finding.errors or 0 for finding in findings), output=output, known=dict(known))


def run_tools(tools: Sequence[str] = TOOLS) -> list[Finding]:
    """Run each part by itself, which also compiles what is not on disk; if it comes to its end, then under the tools.

    All run side by side.
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
    """Runs the calls of a false report under the tools that make it, and says what they report."""
    status = 0
    for tool in sorted({entry.tool for entry in KNOWN.values() if entry.show == name}) or ["initcheck"]:
        finding = run_tool(tool, Part(name))
        print(finding.output)
        print(f"{tool}: {finding.reason or f'{finding.errors} errors'}, known to be false: {dict(finding.known)}")
        status |= int(WORKER_DONE not in finding.output)
    return status


def worker(part: str, default_dtype: str = "float32") -> None:
    """Call every kernel of a part on small shapes and check what it returns.

    Inputs are made on the CPU: every kernel of torch that runs here is one more for the tools to follow. They and the
    oracles are float32 whatever the default dtype, which holds while ops are called.
    """
    import dataclasses

    import torch

    import cute_kernels
    import fp8_mla
    from cute_kernels.gqa.reference import reference_append
    from cute_kernels.mla.spec import EXCHANGES
    from tests.support.compare import check_decode
    from tests.support.gqa_cases import GqaCase, check_gqa, gqa_case
    from tests.support.mla_cases import DecodeCase, dense_case, generator, sparse_case, strided
    from tests.support.sink_cases import SinkExpectation, sink_case

    ops = _Ops(getattr(torch, default_dtype))

    def on_gpu(case: DecodeCase | GqaCase) -> dict[str, Any]:
        return {
            field: value.cuda() if isinstance(value, torch.Tensor) else value
            for field, value in case.arguments().items()
        }

    def decode(case: DecodeCase, name: str, num_splits: int | None) -> None:
        for exchange in EXCHANGES if num_splits else ("none",):  # shares, where no splits are asked for
            forced: dict[str, Any] = {"num_splits": num_splits, "exchange": exchange}
            out, lse = ops.call(cute_kernels.mla_fp8_decode, **on_gpu(case), **forced, return_lse=True)
            form = f"{name}, {num_splits or 'no'} splits, exchange of {exchange}"
            print(check_decode(out.cpu(), lse.cpu(), name=form, **case.arguments()).require())

    def gqa(name: str, *, splits: Sequence[int | None] = (None, 1), **options: Any) -> None:
        case = gqa_case(**{"seqlens": [0, 1, 65, 300], "h_q": 8, "h_kv": 2, **options})
        for num_splits in splits:
            forced: dict[str, Any] = {"num_splits": num_splits}
            out, lse = ops.call(cute_kernels.gqa_decode, **on_gpu(case), **forced, return_lse=True)
            print(check_gqa(out.cpu(), lse.cpu(), case, name=f"{name}, {num_splits or 'planned'} splits").require())

    def known_to_initcheck(*stored: torch.Tensor) -> None:
        if part == "few sinks":
            for tensor in stored:
                tensor.data.copy_(tensor.detach().cpu())
            torch.cuda.synchronize()  # without, one of two runs had reports of the next kernel

    def sink(name: str, *, deterministic: bool = False, **options: Any) -> None:
        case = sink_case(**options, padded=False, device="cpu")
        expected = SinkExpectation.of(case)
        call: dict[str, Any] = {
            key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in case.arguments().items()
        }
        inputs = [call[key].requires_grad_() for key in ("q", "k", "v", "s_aux")]
        out, lse = ops.call(cute_kernels.sink_attention, **call, deterministic=deterministic, return_lse=True)
        known_to_initcheck(out)
        gradients = ops.call(torch.autograd.grad, out, inputs, case.d_out.cuda())
        known_to_initcheck(*gradients)
        print(expected.check_forward(out.detach().cpu(), lse.cpu(), name=f"sink_attention, {name}").require())
        expected.require_gradients(*(gradient.cpu() for gradient in gradients))

    gen = generator(0)

    def append_mla() -> None:
        kv = strided(torch.randn((100, fp8_mla.QK_DIM), generator=gen).bfloat16())
        slots = torch.randperm(128, generator=gen)[:100]
        slots[::9] = -1
        cache = torch.zeros((8, 16, fp8_mla.TOKEN_BYTES), dtype=torch.uint8)
        on_gpu_cache = cache.cuda()
        ops.call(cute_kernels.mla_fp8_append, kv.cuda(), on_gpu_cache, slots.cuda())
        cache.view(128, -1)[slots[slots >= 0]] = fp8_mla.pack(kv[slots >= 0])
        if not torch.equal(on_gpu_cache.cpu(), cache):
            raise AssertionError("mla_fp8_append: the cache differs from fp8_mla.pack")

    def merge() -> None:
        outs, lses = torch.randn((3, 2, 2, 5, 512), generator=gen), torch.randn((3, 2, 2, 5), generator=gen)
        lses[0, 0] = -torch.inf
        merged, merged_lse = ops.call(cute_kernels.merge_states, outs.cuda(), lses.cuda())
        expected = (torch.softmax(lses.double(), dim=0).unsqueeze(-1) * outs.double()).sum(dim=0)
        torch.testing.assert_close(merged.cpu().double(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(merged_lse.cpu(), torch.logsumexp(lses, dim=0))

    def append_gqa(layouts: Sequence[str]) -> None:
        k, v = strided(torch.randn((2, 21, 3, 64), generator=gen).bfloat16()).unbind()
        slots = torch.randperm(32, generator=gen)[:21]
        slots[::5] = -1
        slots[1] = 2**40
        shapes: dict[str, list[tuple[int, ...]]] = {
            "paged_vllm": [(4, 3, 4, 8, 16), (4, 3, 64, 8), (4, 3, 8), (4, 3, 2, 8)],
            "paged_NHD": [(4, 8, 3, 64), (4, 8, 3, 64), (4, 8), (3,)],
            "BNSH": [(4, 3, 8, 64), (4, 3, 8, 64), (), (4, 3, 8)],
        }
        names = ("k_cache", "v_cache", "k_scale", "v_scale")
        for layout in layouts:
            host: dict[str, Any] = {
                name: torch.zeros(shape, dtype=torch.int8) if name.endswith("cache") else torch.full(shape, 0.02)
                for name, shape in zip(names, shapes[layout], strict=True)
            }
            gpu: dict[str, Any] = {name: tensor.cuda() for name, tensor in host.items()}
            append: Callable[..., Any] = cute_kernels.kv_int8_append
            ops.call(append, k.cuda(), v.cuda(), **gpu, slot_mapping=slots.cuda(), layout=layout)
            reference_append(k, v, **host, slot_mapping=slots, layout=layout)
            if not all(torch.equal(gpu[name].cpu(), host[name]) for name in names):
                raise AssertionError(f"kv_int8_append, {layout}: differs from the reference")

    if part == "mla":
        # 130 keys: two whole tiles of 64 and a rest; 96 heads: one CTA of 64 and one half empty
        sparse = sparse_case(
            batch=2, h_q=96, s_q=2, topk=130, num_slots=512, page_size=61, lengths="query", sink="finite", padded=False
        )
        dense = dense_case(seqlens=[0, 1, 65, 200], h_q=16, s_q=2, page_size=16, padded=False)
        wild = sparse_case(batch=1, h_q=64, topk=70, num_slots=256, scales="mixed", padded=False)
        for num_splits in (1, 3, None):
            decode(sparse, "sparse", num_splits)
            decode(dense, "dense", num_splits)
        decode(dataclasses.replace(wild, s_aux=torch.zeros(64)), "scales of very different size", 1)
        append_mla()
        merge()

    if part == "gqa":
        # tiles are of 128 keys: three of the longest sequence, which three CTAs merge
        scales: dict[str, Any] = {
            "k_scales": "per_token_head",
            "v_scales": "per_token_head",
            "scale_dtype": torch.float16,
        }
        heads: dict[str, Any] = {"k_scales": "per_head", "v_scales": "per_tensor"}
        groups: dict[str, Any] = {"k_scales": "per_group_32", "v_scales": "per_group_64"}
        gqa("int8, scales of tokens", **scales, splits=(None, 1, 3))
        gqa("int8, three queries", **scales, s_q=3)
        gqa("int8, pages", **heads, layout="paged_NHD", page_size=16, bad_entries=True, splits=(None, 1, 3))
        gqa("int8, packed pages", **heads, layout="paged_vllm", page_size=8)
        gqa("fp8, scales of groups", **groups, kv_dtype="fp8")
        gqa("bfloat16, window", kv_dtype="bf16", window=100, sink="inf")
        modifiers: dict[str, Any] = {"s_q": 3, "softcap": 15.0, "alibi": "batch", "q_dtype": torch.float16}
        gqa("int8, softcap and ALiBi", **heads, **modifiers)
        append_gqa(("paged_vllm", "paged_NHD", "BNSH"))

    if part == "sample":
        # split and not, with sinks and without, lse wanted and not: where an absent argument has a constant instead
        small: dict[str, Any] = {"batch": 1, "h_q": 128, "topk": 300, "num_slots": 512, "page_size": 61}
        for sinks in ("none", "finite"):
            case = sparse_case(**small, sink=sinks, padded=False)
            decode(case, f"sparse, sinks {sinks}", 3)
            alone = ops.call(cute_kernels.mla_fp8_decode, **on_gpu(case), num_splits=3)
            print(check_decode(alone.cpu(), None, name="without lse", **case.arguments()).require())
        decode(dense_case(seqlens=[0, 65, 200], h_q=16, s_q=2, page_size=16, padded=False), "dense", None)
        append_mla()
        merge()
        token_scales: dict[str, Any] = {"k_scales": "per_token_head", "v_scales": "per_token_head"}
        gqa("int8, scales of tokens", **token_scales, scale_dtype=torch.float16, splits=(None, 3))
        gqa("bfloat16, window", kv_dtype="bf16", window=100, sink="inf")
        append_gqa(("paged_NHD",))
        sink("whole", lengths=[(100, 160)])
        sink("packed, window, deterministic", lengths=[(3, 70), (64, 64)], packed=True, window=40, deterministic=True)

    if part == "few sinks":
        sink("whole", lengths=[(70, 80)], h_q=2, h_kv=1)
        sink("packed, window, deterministic", lengths=[(3, 70), (64, 64)], packed=True, window=40, deterministic=True)

    if part == "graphs":
        _replay_graphs()

    if part == "tma-stores":
        # the forward stores its output by TMA; a copy to the host reads it
        stored = sink_case(lengths=[(200, 260)], padded=False, device="cpu")
        arguments: dict[str, Any] = {
            key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in stored.arguments().items()
        }
        out, lse = cute_kernels.sink_attention(**arguments, return_lse=True)
        print(SinkExpectation.of(stored).check_forward(out.cpu(), lse.cpu(), name="stored by TMA").require())

    if part == "sink":
        # several blocks of rows and of keys, gradients added up in memory and apart, two heads to a head of the keys
        ragged = [(1, 1), (130, 260), (0, 5), (64, 0), (3, 70)]
        sink("whole", lengths=[(200, 260)] * 2)
        sink("deterministic", lengths=[(200, 260)], d=128, deterministic=True)
        sink("window", lengths=[(300, 300)], window=70, sinks="extreme")
        sink("wide window", lengths=[(100, 700)], d=128, window=600)
        sink("packed", lengths=ragged, packed=True)
        sink("packed, window", lengths=ragged, packed=True, d=128, window=70)
    torch.cuda.synchronize()
    print(WORKER_DONE)


class _Ops:
    """Makes calls under a default dtype of torch, and leaves the default as it was."""

    def __init__(self, default_dtype: Any) -> None:
        self.default_dtype = default_dtype

    def call(self, op: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """What `op` returns."""
        with default_dtype(self.default_dtype):
            return op(*arguments, **options)


@contextlib.contextmanager
def default_dtype(dtype: Any) -> Iterator[None]:
    """Inside of the block torch makes floating-point tensors of this dtype where none is named."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


GRAPHS = 8


def _replay_graphs() -> None:
    """Captures graphs of three ops each, keeps all, and replays them two at a time on two streams.

    Every replay must leave the bits of eager calls, which are held to the oracle.
    """
    import torch

    import cute_kernels
    from scripts.bench import timing
    from tests.support.compare import check_decode
    from tests.support.gqa_cases import check_gqa, gqa_case
    from tests.support.mla_cases import sparse_case
    from tests.support.sink_cases import SinkExpectation, sink_case

    names = ("mla out", "mla lse", "gqa out", "gqa lse", "sink out", "sink lse")
    graphs: list[tuple[torch.cuda.CUDAGraph, list[Any], timing.Expected]] = []
    inputs: list[Any] = []  # of living graphs, which have nothing but addresses
    for seed in range(GRAPHS):
        # 130 keys in three splits, 300 in three: both merge, with counters that are 0 between launches
        mla = sparse_case(batch=2, h_q=64, topk=130, num_slots=256, sink="finite", padded=False, seed=seed)
        lengths: dict[str, Any] = {"seqlens": [1, 65, 300], "h_q": 8, "h_kv": 2, "kv_dtype": "bf16"}
        gqa = gqa_case(**lengths, padded=False, seed=seed)
        sink = sink_case(lengths=[(70, 130)], padded=False, seed=seed, device="cpu")
        arguments = [
            {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in case.arguments().items()}
            for case in (mla, gqa, sink)
        ]

        def calls(of: list[dict[str, Any]] = arguments) -> tuple[torch.Tensor, ...]:
            return (
                *cute_kernels.mla_fp8_decode(**of[0], num_splits=3, return_lse=True),
                *cute_kernels.gqa_decode(**of[1], num_splits=3, return_lse=True),
                *cute_kernels.sink_attention(**of[2], return_lse=True),
            )

        expected = timing.Expected.of(names, [calls])
        out, lse, gqa_out, gqa_lse, sink_out, sink_lse = (t.cpu() for t in expected.results[0])
        check_decode(out, lse, name="mla_fp8_decode", **mla.arguments()).require()
        check_gqa(gqa_out, gqa_lse, gqa).require()
        SinkExpectation.of(sink).check_forward(sink_out, sink_lse, name="sink_attention").require()
        inputs.append(arguments)
        graph, results = timing.capture([calls])
        graphs.append((graph, results, expected))

    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for first in range(GRAPHS):
        pair = [graphs[first], graphs[(first + 1 + first % 3) % GRAPHS]]
        for _, results, _ in pair:
            timing.poison(results[0])
        torch.cuda.synchronize()
        for _ in range(2):
            for (graph, _, _), own in zip(pair, streams, strict=True):
                with torch.cuda.stream(own):
                    graph.replay()
        torch.cuda.synchronize()
        for _, results, expected in pair:
            if problems := expected.problems(results):
                raise AssertionError("; ".join(problems))
    print(f"{GRAPHS} graphs, replayed two at a time")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", choices=TOOLS, action="append", help="default: all")
    names = (*(part.name for part in PARTS), *SHOWS)
    parser.add_argument("--worker", choices=names, help="make a part of the calls in this process, without a tool")
    parser.add_argument("--default-dtype", choices=("float32", "bfloat16", "float16", "float64"), default="float32")
    parser.add_argument("--show", choices=SHOWS, help="the calls of a known false report, under the tool that makes it")
    options = parser.parse_args(arguments)
    if options.worker:
        worker(options.worker, options.default_dtype)
        return 0
    if options.show:
        return show(options.show)
    findings = run_tools(options.tool or TOOLS)
    for finding in findings:
        known = f", known to be false: {dict(finding.known)}" if finding.known else ""
        print(f"{finding.tool}: {finding.reason if finding.errors is None else f'{finding.errors} errors'}{known}")
        if finding.errors != 0:
            print(finding.output)
            print("\n".join(kinds(finding.output)))
    return int(any(finding.errors != 0 for finding in findings))


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


if __name__ == "__main__":
    sys.exit(main())
