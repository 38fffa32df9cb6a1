"""Run every kernel once on small shapes under NVIDIA's compute-sanitizer: memcheck, racecheck, synccheck.

    python scripts/sanitize.py                    all tools, one line each; exit status 1 on any finding
    python scripts/sanitize.py --tool memcheck    one of them
    python scripts/sanitize.py --worker mla       a part of the calls alone, as the tools run them

The worker compares its results with the oracle as well, so "no errors" cannot come from kernels that did not run.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

TOOLS = ("memcheck", "racecheck", "synccheck")
PARTS = ("mla", "gqa", "sink")  # of the calls, which run side by side: most of a run is work of the host
FINDINGS_EXIT = 99
WORKER_DONE = "sanitize worker: done"
TIMEOUT_S = 240
PLACES_TO_LOOK = ("/usr/local/cuda/bin", "/opt/cuda/bin")
# racecheck ends with "RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)", the others with "ERROR SUMMARY: 3
# errors"
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) errors?)|(?:RACECHECK SUMMARY: (\d+) hazards?)")


@dataclass(frozen=True)
class Finding:
    """What one tool found: `errors`, or None with the `reason` why it did not get to look."""

    tool: str
    errors: int | None
    reason: str = ""
    output: str = ""


def find_sanitizer() -> str | None:
    """Path of compute-sanitizer, or None."""
    places = os.pathsep.join((os.environ.get("PATH", ""), *PLACES_TO_LOOK))
    return shutil.which("compute-sanitizer", path=places)


def parse(tool: str, output: str, status: int) -> Finding:
    """Read a tool's output. Only a worker that came to its end under a tool that summed up counts as looked at."""
    totals = [int(first or second) for first, second in SUMMARY.findall(output)]
    errors = max(totals, default=0)
    if errors or status == FINDINGS_EXIT:
        return Finding(tool, max(errors, 1), output=output)
    if not totals:
        return Finding(tool, None, f"no summary, exit status {status}: {_last_line(output)}", output)
    if WORKER_DONE not in output:
        return Finding(tool, None, f"the worker did not finish, exit status {status}: {_last_line(output)}", output)
    return Finding(tool, 0, output=output)


def run_worker(under: Sequence[str], part: str) -> subprocess.CompletedProcess[str]:
    """Run a part of the calls behind the words of `under`; its two output streams come back as one."""
    return subprocess.run(
        [*under, sys.executable, str(pathlib.Path(__file__).resolve()), "--worker", part],
        # Without torch's caching allocator every tensor is an allocation of its own: reads past its end are seen.
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )


def run_tool(tool: str, part: str) -> Finding:
    """Run a part of the calls under one tool."""
    sanitizer = find_sanitizer()
    if sanitizer is None:
        return Finding(tool, None, "compute-sanitizer is not installed")
    try:
        done = run_worker([sanitizer, "--tool", tool, "--error-exitcode", str(FINDINGS_EXIT)], part)
    except subprocess.TimeoutExpired:
        return Finding(tool, None, f"{part}: not done after {TIMEOUT_S} s")
    return parse(tool, done.stdout, done.returncode)


def join(tool: str, findings: Sequence[Finding]) -> Finding:
    """What a tool found in all parts; a part that it did not get to look at leaves no number."""
    output = "\n".join(finding.output for finding in findings)
    reasons = [finding.reason for finding in findings if finding.errors is None]
    if reasons:
        return Finding(tool, None, "; ".join(reasons), output)
    return Finding(tool, sum(finding.errors or 0 for finding in findings), output=output)


def run_tools(tools: Sequence[str] = TOOLS) -> list[Finding]:
    """Run each part by itself, which also compiles what is not on disk; if it comes to its end, then under the tools.

    All run side by side.
    """

    def look(part: str) -> list[Finding]:
        try:
            alone = run_worker([], part)
        except subprocess.TimeoutExpired:
            return [Finding(tool, None, f"{part} alone was not done after {TIMEOUT_S} s") for tool in tools]
        if WORKER_DONE not in alone.stdout:
            reason = f"{part} fails by itself: {_last_line(alone.stdout)}"
            return [Finding(tool, None, reason, alone.stdout) for tool in tools]
        with ThreadPoolExecutor(len(tools)) as pool:
            return list(pool.map(run_tool, tools, [part] * len(tools)))

    with ThreadPoolExecutor(len(PARTS)) as pool:
        of_parts = list(pool.map(look, PARTS))
    return [join(tool, findings) for tool, findings in zip(tools, zip(*of_parts, strict=True), strict=True)]


def worker(part: str) -> None:
    """Call every kernel of a part on small shapes and check what it returns.

    Inputs are made on the CPU: every kernel of torch that runs here is one more for the tools to follow.
    """
    import dataclasses

    import torch

    import cute_kernels
    import fp8_mla
    from cute_kernels.gqa.reference import reference_append
    from cute_kernels.mla.spec import EXCHANGES
    from cute_kernels.testing.compare import check_decode
    from cute_kernels.testing.gqa import GqaCase, check_gqa, gqa_case
    from cute_kernels.testing.inputs import DecodeCase, dense_case, generator, sparse_case, strided
    from cute_kernels.testing.sink import SinkExpectation, sink_case

    def on_gpu(case: DecodeCase | GqaCase) -> dict[str, Any]:
        return {
            field: value.cuda() if isinstance(value, torch.Tensor) else value
            for field, value in case.arguments().items()
        }

    def decode(case: DecodeCase, name: str, num_splits: int | None) -> None:
        for exchange in EXCHANGES if num_splits else ("none",):  # shares, where no splits are asked for
            forced: dict[str, Any] = {"num_splits": num_splits, "exchange": exchange}
            out, lse = cute_kernels.mla_fp8_decode(**on_gpu(case), **forced, return_lse=True)
            form = f"{name}, {num_splits or 'no'} splits, exchange of {exchange}"
            print(check_decode(out.cpu(), lse.cpu(), name=form, **case.arguments()).require())

    def gqa(name: str, *, splits: Sequence[int | None] = (None, 1), **options: Any) -> None:
        case = gqa_case(**{"seqlens": [0, 1, 65, 300], "h_q": 8, "h_kv": 2, **options})
        for num_splits in splits:
            out, lse = cute_kernels.gqa_decode(**on_gpu(case), num_splits=num_splits, return_lse=True)
            print(check_gqa(out.cpu(), lse.cpu(), case, name=f"{name}, {num_splits or 'planned'} splits").require())

    def sink(name: str, *, deterministic: bool = False, **options: Any) -> None:
        case = sink_case(**options, padded=False, device="cpu")
        expected = SinkExpectation.of(case)
        call: dict[str, Any] = {
            key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in case.arguments().items()
        }
        inputs = [call[key].requires_grad_() for key in ("q", "k", "v", "s_aux")]
        out, lse = cute_kernels.sink_attention(**call, deterministic=deterministic, return_lse=True)
        gradients = torch.autograd.grad(out, inputs, case.d_out.cuda())
        print(expected.check_forward(out.detach().cpu(), lse.cpu(), name=f"sink_attention, {name}").require())
        expected.require_gradients(*(gradient.cpu() for gradient in gradients))

    gen = generator(0)
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

        kv = strided(torch.randn((100, fp8_mla.QK_DIM), generator=gen).bfloat16())
        slots = torch.randperm(128, generator=gen)[:100]
        slots[::9] = -1
        cache = torch.zeros((8, 16, fp8_mla.TOKEN_BYTES), dtype=torch.uint8)
        on_gpu_cache = cache.cuda()
        cute_kernels.mla_fp8_append(kv.cuda(), on_gpu_cache, slots.cuda())
        cache.view(128, -1)[slots[slots >= 0]] = fp8_mla.pack(kv[slots >= 0])
        if not torch.equal(on_gpu_cache.cpu(), cache):
            raise AssertionError("mla_fp8_append: the cache differs from fp8_mla.pack")

        outs, lses = torch.randn((3, 2, 2, 5, 512), generator=gen), torch.randn((3, 2, 2, 5), generator=gen)
        lses[0, 0] = -torch.inf
        merged, merged_lse = cute_kernels.merge_states(outs.cuda(), lses.cuda())
        expected = (torch.softmax(lses.double(), dim=0).unsqueeze(-1) * outs.double()).sum(dim=0)
        torch.testing.assert_close(merged.cpu().double(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(merged_lse.cpu(), torch.logsumexp(lses, dim=0))

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
        for layout, all_shapes in shapes.items():
            host: dict[str, Any] = {
                name: torch.zeros(shape, dtype=torch.int8) if name.endswith("cache") else torch.full(shape, 0.02)
                for name, shape in zip(names, all_shapes, strict=True)
            }
            gpu = {name: tensor.cuda() for name, tensor in host.items()}
            cute_kernels.kv_int8_append(k.cuda(), v.cuda(), **gpu, slot_mapping=slots.cuda(), layout=layout)
            reference_append(k, v, **host, slot_mapping=slots, layout=layout)
            if not all(torch.equal(gpu[name].cpu(), host[name]) for name in names):
                raise AssertionError(f"kv_int8_append, {layout}: differs from the reference")

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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", choices=TOOLS, action="append", help="default: all")
    parser.add_argument("--worker", choices=PARTS, help="make a part of the calls in this process, without a tool")
    options = parser.parse_args(arguments)
    if options.worker:
        worker(options.worker)
        return 0
    findings = run_tools(options.tool or TOOLS)
    for finding in findings:
        print(f"{finding.tool}: {finding.reason if finding.errors is None else f'{finding.errors} errors'}")
        if finding.errors != 0:
            print(finding.output)
    return int(any(finding.errors != 0 for finding in findings))


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


if __name__ == "__main__":
    sys.exit(main())
