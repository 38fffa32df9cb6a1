"""scripts/vllm_check.py without vLLM and without a GPU: its processes, its file."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import vllm_jobs
from bench.vllm_pool import Job, Pool
from scripts import vllm_check
from tests.cpu import pool_jobs


def test_jobs_that_fail_or_die_say_why_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for something that does not come is left out; what was sent before is kept."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))  # processes import what jobs are made of
    events: list[tuple[str, str, Any]] = []
    pool = Pool(
        pool_jobs.run, tmp_path, lambda job, event, data: events.append((job.name, event, data)),
        deadline=time.monotonic() + 60,
    )  # fmt: skip
    jobs = [Job("bad", "fail"), Job("dead", "die"), Job("good", "say")]
    jobs += [Job("orphan", "say", needs=("bad",)), Job("later", "say", phase=1)]
    assert pool.run(jobs) == {"orphan": "needs bad"}
    failed = {name: data for name, event, data in events if event == "failed"}
    assert sorted(failed) == ["bad", "dead"] and "it failed" in failed["bad"] and "last words" in failed["dead"]
    assert ("bad", "case", 1) in events and "in the log" in (tmp_path / "bad.log").read_text()
    assert {("good", "done", None), ("later", "done", None)} <= set(events)


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
        report.receive(job, "engine", {"runner": 1, "start_s": 20.0})
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
        "runner": 1, "start_s": 20.0, "cached": {"one": 64}, "turns": {"one": 1}, "done": True,
    }  # fmt: skip
    assert found["mla-steps"]["backends"]["ours-128"]["cases"][0]["ms"] == 1.0
    wrong = report.end({})
    assert [line.split(":")[0] for line in wrong] == ["mla-tokens, v32-16", "mla-steps, ours-128"]
