"""scripts/vllm_check.py without vLLM and without a GPU: its processes, its plan, its file."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import vllm_engine, vllm_jobs, vllm_mla
from bench.vllm_pool import Job, Pool
from scripts import vllm_check
from tests.cpu import pool_jobs

Events = list[tuple[str, str, Any]]


def served(jobs: list[Job], folder: Path, seconds: float = 60.0, **options: Any) -> tuple[Events, dict[str, str]]:
    """What jobs sent, and what was left out."""
    events: Events = []
    pool = Pool(
        pool_jobs.run, folder, lambda job, event, data: events.append((job.name, event, data)),
        deadline=time.monotonic() + seconds, **options,
    )  # fmt: skip
    return events, pool.run(jobs)


@pytest.fixture(autouse=True)
def found_by_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes modules of jobs importable in processes."""
    root = str(Path(__file__).resolve().parents[2])
    monkeypatch.setenv("PYTHONPATH", root)


# ---- processes


def test_what_waits_for_something_that_does_not_come_is_left_out(tmp_path: Path) -> None:
    jobs = [Job("bad", "fail"), Job("orphan", "say", needs=("bad",)), Job("later", "say", phase=1)]
    events, left = served(jobs, tmp_path)
    assert left == {"orphan": "needs bad"}
    assert ("later", "done", None) in events


def test_a_failed_job_says_why_and_keeps_what_it_sent(tmp_path: Path) -> None:
    events, left = served([Job("bad", "fail"), Job("good", "say")], tmp_path)
    assert left == {}
    (failed,) = [data for name, event, data in events if event == "failed"]
    assert "it failed" in failed and "in the log" in (tmp_path / "bad.log").read_text()
    assert ("bad", "case", 1) in events and ("good", "done", None) in events


def test_a_process_that_dies_says_what_its_log_ends_with(tmp_path: Path) -> None:
    events, _ = served([Job("dead", "die"), Job("other", "say")], tmp_path)
    (failed,) = [data for _, event, data in events if event == "failed"]
    assert "last words" in failed
    assert ("other", "done", None) in events


def test_the_time_ends_what_runs_and_leaves_out_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "file"
    jobs = [
        Job("long", "child", {"file": str(file)}, least=0),
        Job("late", "say", needs=("long",), least=30),
        Job("never", "say", needs=("long",), least=0),
    ]
    events = []

    def receive(job: Job, event: str, data: Any) -> None:
        events.append(event)
        if event == "began":
            pool.deadline = time.monotonic()

    pool = Pool(pool_jobs.run, tmp_path, receive, deadline=time.monotonic() + 60)
    left = pool.run(jobs)
    assert "began" in events and "done" not in events
    assert left["long"] == "was not done in time"
    assert left["late"] == "needs 30 s, 0 s were left" and left["never"].startswith("needs")
    time.sleep(3)
    assert not file.exists(), "what a job has started outlives it"


# ---- the plan


def plan(tmp_path: Path, *arguments: str) -> dict[str, Job]:
    options = vllm_check.parser().parse_args(list(arguments))
    found = vllm_check.jobs(options, tmp_path)
    assert len({job.name for job in found}) == len(found)
    return {job.name: job for job in found}


def test_each_run_with_the_plugin_is_compared_with_one_without(tmp_path: Path) -> None:
    served = [
        job
        for job in plan(tmp_path, "--parts", "mla-tokens", "--models", ",".join(vllm_mla.MODELS)).values()
        if job.kind == "mla-serve"
    ]
    assert len(served) == 32 and all(job.options["plugin"] is ("ours" in job.name) for job in served)
    found = {job.name: job for job in served}
    assert found["v32-16-ours-given"].options["takes"] == found["v32-16-stock-eager"].options["keeps"]
    assert "v32-16-stock-eager" in found["v32-16-ours-given"].needs


# ---- what is found


def test_a_step_is_the_median_of_spans() -> None:
    marks = [0.0]
    for step in range(vllm_engine.STEPS - 1):
        slow = step < vllm_engine.FIRST or step >= vllm_engine.FIRST + 2 * vllm_engine.SPAN
        marks.append(marks[-1] + (0.5 if slow else 0.002 if step < vllm_engine.FIRST + vllm_engine.SPAN else 0.004))
    found = vllm_engine.per_token(marks)
    assert found["ms_all"] == pytest.approx([2.0, 4.0, 500.0]) and found["ms"] == pytest.approx(4.0)


def test_kernels_of_attention_are_told_from_appends() -> None:
    ours = "kernel_cutlass_kernel_cute_kernelsgqakernelsdecodeGqaDecodeKernel_object_at_0"
    append = "kernel_cutlass__kernel_cute_kernelsgqakernelsappendKvAppendKernel_object_at_0"
    events = [
        (append, 120.0), (ours, 1200.0), ("void vllm::reshape_and_cache_flash_kernel<x>", 60.0), ("gemm", 12000.0),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90>>", 600.0),
        ("kernel_unified_attention", 24.0), ("reduce_segments", 12.0),
    ]  # fmt: skip
    found = vllm_engine.shares(events)
    assert found["attention_ms"] == pytest.approx(1836 / vllm_engine.PROFILED / 1e3)
    assert found["gpu_ms"] == pytest.approx(14016 / vllm_engine.PROFILED / 1e3)
    assert found["kernels"][0] == ["gemm", pytest.approx(1.0)]


def test_the_file_holds_each_result_at_once_and_says_what_is_wrong(tmp_path: Path) -> None:
    options = vllm_check.parser().parse_args(
        ["--parts", "tokens,speed,first,sparse", "--backends", "cute-int8,flash-bf16"]
    )
    out = tmp_path / "found.json"
    report = vllm_check.Report(out, options)
    jobs = {job.name: job for job in vllm_check.jobs(options, tmp_path)}
    name = "llama-int8_per_token_head-graphs"
    report.receive(jobs["probe"], "card", {"name": "NVIDIA H200", "free_gb": 140.0, "sms": 132})
    report.receive(jobs[name], "started", 0)
    from bench import vllm_models

    for i, asked in enumerate(vllm_check.rounds(vllm_jobs.asked())):
        answers = [vllm_models.counted_on(prompt, vllm_check.TOKENS) for prompt in asked]
        if i == 1:
            answers[3] = answers[3][:-1] + [99]
        report.receive(jobs[name], "round", answers)
    assert json.loads(out.read_text())["tokens"]["engines"][name]["wrong_requests"] == [0, 1, 0]
    report.receive(jobs[name], "done", None)
    report.receive(jobs["cute-int8"], "started", 0)
    report.receive(jobs["cute-int8"], "case", {"context": 8192, "batch": 1, "ms": 1.0, "gpu_ms": 0.5})
    for case in ({"requests": 1, "tokens": 8192, "ms": 40.0}, {"requests": 4, "tokens": 8192, "ms": 90.0}):
        report.receive(jobs["first-cute-int8"], "started", 0)
        report.receive(jobs["first-cute-int8"], "case", case)
    report.receive(jobs["first-cute-int8"], "done", None)
    report.receive(jobs["flash-bf16"], "failed", "no engine")
    report.receive(jobs["sparse"], "case", {"heads": 8, "ours_us": 20.0, "flashmla_us": 40.0, "difference": 0.02})
    found = json.loads(out.read_text())
    assert found["card"] == "NVIDIA H200"
    assert found["speed"]["backends"]["cute-int8"]["cases"] == [{"context": 8192, "batch": 1, "ms": 1.0, "gpu_ms": 0.5}]
    assert found["speed"]["backends"]["flash-bf16"]["failed"] == "no engine"
    first = found["first"]["backends"]
    assert first == {"cute-int8": {"cases": [{"requests": 4, "tokens": 8192, "ms": 90.0}], "done": True}}
    wrong = report.end({"first-flash-bf16": "needs 25 s, 3 s were left"})
    assert [line.split(":")[0] for line in wrong] == [
        "first-flash-bf16", f"tokens, {name}", "speed, cute-int8", "speed, flash-bf16", "sparse",
    ]  # fmt: skip
    assert json.loads(out.read_text())["wrong"] == wrong


def test_runs_of_a_model_are_compared_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = vllm_check.parser().parse_args(["--parts", "mla-tokens,mla-steps"])
    report = vllm_check.Report(tmp_path / "found.json", options)
    jobs = {job.name: job for job in vllm_check.jobs(options, tmp_path)}
    chosen: Any = np.zeros((1, 4), np.int32)
    logp: Any = np.full((1, 4, 3), -2.0, np.float32)
    logp[..., 0] = -0.5
    for name, said in (("ours-eager", 0), ("stock-eager", 1)):
        other = chosen.copy()
        other[0, 2] = said
        job, data = jobs[f"v32-16-{name}"], {"requests": [3], "chosen": other, "logp": logp}
        report.receive(job, "engine", {"runner": 1, "start_s": 20.0, "said": [vllm_check.RUNS]})
        report.receive(job, "round", {"way": name, "name": "one", "cached": 64, "turns": 1, **data})
        report.receive(job, "done", None)
    report.receive(jobs["steps-ours-128"], "case", {"family": "normal", "context": 8192, "batch": 1, "ms": 1.0})
    found = json.loads((tmp_path / "found.json").read_text())
    (case,) = found["mla-tokens"]["models"]["v32-16"]["cases"]
    assert (case["a"], case["b"], case["differ"], case["wrong"], case["gap"]) == (
        "ours-eager",
        "stock-eager",
        1,
        1,
        1.5,
    )
    assert found["mla-tokens"]["engines"]["v32-16-ours-eager"] == {
        "runner": 1, "start_s": 20.0, "said": [vllm_check.RUNS], "cached": {"one": 64}, "turns": {"one": 1},
        "done": True,
    }  # fmt: skip
    assert found["mla-steps"]["backends"]["ours-128"]["cases"][0]["ms"] == 1.0
    wrong = report.end({})
    assert [line.split(":")[0] for line in wrong] == ["mla-tokens, v32-16", "mla-steps, ours-128"]


def test_an_engine_that_has_not_run_our_kernels_is_wrong(tmp_path: Path) -> None:
    """VLLM falls back silently if a hook no longer finds what it replaces."""
    options = vllm_check.parser().parse_args(["--parts", "mla-tokens"])
    report = vllm_check.Report(tmp_path / "found.json", options)
    jobs = {job.name: job for job in vllm_check.jobs(options, tmp_path)}
    active = [f"sparse MLA of 16 heads {vllm_check.RUNS}"]
    told: dict[str, dict[str, Any]] = {
        "ours-eager": {"said": active}, "ours-graphs": {"said": []}, "stock-eager": {"said": []},
        "ours-index": {"said": active, "shadow": {"calls": 0}},
    }  # fmt: skip
    for name, engine in told.items():
        report.receive(jobs[f"v32-16-{name}"], "engine", engine)
        report.receive(jobs[f"v32-16-{name}"], "done", None)
    assert report.end({}) == [
        f"mla-tokens, v32-16-{name}: ran without our kernels" for name in ("ours-graphs", "ours-index")
    ]
