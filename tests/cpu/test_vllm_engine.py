"""vLLM's engine on a CPU serves the tokens of transformers; `make test-vllm` installs what this needs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17 or later")

from bench import vllm_models
from bench.vllm_pool import Job, Pool
from cute_kernels.integrations import transformers as cute
from tests.cpu import vllm_cpu_jobs
from tests.kit import tiny_models
from tests.kit.accuracy_table import int8_error
from tests.kit.threads import one_thread as one_thread

ROOT = Path(__file__).resolve().parents[2]
NEW = 12  # generated tokens
INT8 = "int8_per_token_head"
LENGTHS = (5, 12, 30, 40)  # of prompts; with 32 tokens a step, longer prompts come in parts and meet decoding requests


def prompts() -> list[list[int]]:
    return [tiny_models.sequences(50 + n, 1, n)[0].tolist() for n in LENGTHS]


JOBS: dict[str, dict[str, Any]] = {
    "llama-auto": {},
    f"llama-{INT8}": {"kv_cache_dtype": INT8},
    "llama-fp8": {"kv_cache_dtype": "fp8"},
    "llama-fp8_per_token_head": {"kv_cache_dtype": "fp8_per_token_head"},
    "llama-int4_per_token_head": {"kv_cache_dtype": "int4_per_token_head"},
    "gpt_oss-auto": {},
    f"gpt_oss-{INT8}": {"kv_cache_dtype": INT8},
    "llama-pages-of-256": {"kv_cache_dtype": INT8, "block_size": 256},
    "llama-pages-of-48": {"kv_cache_dtype": INT8, "block_size": 48},  # three kernel pages of 16
    "llama-speculative": {
        "kv_cache_dtype": INT8,
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 2,
        },
    },
    "llama-prefix": {"kv_cache_dtype": INT8, "enable_prefix_caching": True},
    "llama-auto-flash": {},
    f"llama-{INT8}-flash": {"kv_cache_dtype": INT8, "block_size": 48},
    "llama-fp8-flash": {"kv_cache_dtype": "fp8"},
    f"gpt_oss-{INT8}-flash": {"kv_cache_dtype": INT8},
    "gpt_oss-fp8_per_token_head-flash": {"kv_cache_dtype": "fp8_per_token_head"},
    "llama-int4_per_token_head-flash": {"kv_cache_dtype": "int4_per_token_head", "block_size": 48},
    "llama-prefix-flash": {"kv_cache_dtype": INT8, "enable_prefix_caching": True},
}
"""Engines; each name begins with that of a model. Prompts of "flash" engines run as on a GPU."""
if pytest.importorskip("vllm").__version__ >= "0.33":
    # 0.26 does not read a head dimension per layer, as transformers 5.17 has for Gemma 4
    JOBS |= {
        "gemma4-auto": {},
        f"gemma4-{INT8}": {"kv_cache_dtype": INT8},
        "gemma4-fp8": {"kv_cache_dtype": "fp8"},
    }


REPEATING = [tiny_models.sequences(50 + n, 1, n)[0].tolist() for n in (40, 45)]
"""Prompts longer than the vocabulary, from which vLLM drafts."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each engine generated. One process runs all of them, because importing vLLM takes longer than serving."""
    folder = tmp_path_factory.mktemp("vllm")
    models = {name: str(folder / name) for name in sorted({name.split("-")[0] for name in JOBS})}
    for name, path in models.items():
        vllm_models.save(tiny_models.trained(name), Path(path))
    jobs = []
    for name, options in JOBS.items():
        rounds = [prompts()]
        if name == "llama-speculative":
            rounds = [REPEATING]
        elif "prefix" in name:
            whole = tiny_models.sequences(90, 1, 100)[0].tolist()
            rounds = [[whole[:36]], [whole[:40], whole[:36]]]
        given = {"model": models[name.split("-")[0]], "max_num_batched_tokens": 32, "max_num_seqs": 4, **options}
        given.setdefault("enable_prefix_caching", False)
        flash = name.endswith("flash")
        jobs.append({"options": given, "rounds": rounds, "tokens": NEW, "logprobs": -1, "flash": flash})
    job, result = folder / "job.json", folder / "result.json"
    job.write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "tests.kit.vllm_engine", str(job), str(result)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(JOBS, json.loads(result.read_text()), strict=True))


def of_transformers(name: str, int8: bool, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and their logits (NEW, vocabulary), with eager attention or over `CuteInt8Cache`."""
    model = tiny_models.trained(name)
    ids = torch.tensor([prompt], dtype=torch.int64)
    model.set_attn_implementation("cute" if int8 else "eager")
    try:
        result = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None,
            pad_token_id=0, return_dict_in_generate=True, output_logits=True,
            past_key_values=cute.CuteInt8Cache(model.config) if int8 else None,
        )  # fmt: skip
    finally:
        model.set_attn_implementation("eager")
    return result.sequences[0, len(prompt) :].tolist(), torch.stack(result.logits, 1)[0].float()


def log_probabilities(request: dict[str, Any]) -> torch.Tensor:
    """(NEW, vocabulary) of a request that was served."""
    return torch.tensor([[step[str(t)] for t in range(tiny_models.VOCABULARY)] for step in request["logprobs"]])


@pytest.mark.parametrize("kind", [name for name in JOBS if "prefix" not in name and "speculative" not in name])
def test_tokens_and_logits_are_those_of_transformers(kind: str, served: dict[str, Any]) -> None:
    name, _, cache = kind.partition("-")
    int8 = JOBS[kind].get("kv_cache_dtype") == INT8
    for prompt, request in zip(prompts(), served[kind]["requests"], strict=True):
        tokens, logits = of_transformers(name, int8, prompt)
        assert tokens == vllm_models.counted_on(prompt, NEW), "the model has learned nothing to compare"
        assert request["tokens"] == tokens
        exact = logits.log_softmax(-1)
        error = (log_probabilities(request) - exact).norm() / exact.norm()
        # e4m3 keeps 3 bits of a number, INT8 up to 7; 4-bit codes have 15 steps, INT8 has 254
        more = {"fp8": 4, "int4": 17}.get(cache.split("_")[0], 1)
        assert error < int8_error() * more, f"{len(prompt)} tokens: {error:.1e}"


@pytest.mark.parametrize("kind", JOBS)
def test_our_operators_served_them(kind: str, served: dict[str, Any]) -> None:
    calls = served[kind]["calls"]
    scaled = JOBS[kind].get("kv_cache_dtype", "").endswith("_per_token_head")
    assert calls.pop("append_scaled" if scaled else "append_plain") > 0
    prompts_ran = "flash_attend" if kind.endswith("flash") else "prefill_in_pieces"
    assert calls.pop("decode") > calls.pop(prompts_ran) > 0
    # heads of 256 and 512 have no kernel for whole prompts
    assert (calls.pop("prefill_fresh", 0) > 0) != kind.startswith("gemma4") and calls == {}


def test_drafts_are_decoded_together(served: dict[str, Any]) -> None:
    """Repetitive prompts give drafts of three tokens, so there are fewer steps than tokens."""
    found = served["llama-speculative"]
    for prompt, request in zip(REPEATING, found["requests"], strict=True):
        assert request["tokens"] == vllm_models.counted_on(prompt, NEW) == of_transformers("llama", True, prompt)[0]
    layers = 2
    drafted = found["query_tokens"]["4"] // layers
    assert NEW / 4 <= drafted < NEW and "4" not in served[f"llama-{INT8}"]["query_tokens"]


@pytest.mark.parametrize("kind", [name for name in JOBS if "prefix" in name])
def test_a_prefix_is_served_from_the_cache(kind: str, served: dict[str, Any]) -> None:
    """The second round finds the pages that the first round filled, and continues from them."""
    first, longer, again = served[kind]["requests"]
    assert first["cached"] == 0 and longer["cached"] == again["cached"] == 32
    whole = tiny_models.sequences(90, 1, 100)[0].tolist()
    assert first["tokens"] == again["tokens"] == whole[36 : 36 + NEW] == of_transformers("llama", True, whole[:36])[0]
    assert longer["tokens"] == whole[40 : 40 + NEW]
    drift = (log_probabilities(again) - log_probabilities(first)).norm() / log_probabilities(first).norm()
    assert drift < int8_error(), "quantized keys of the prefix against keys as they came"


def test_the_jobs_of_vllm_check_serve_and_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """scripts/vllm_check.py runs them on a GPU in the same way, each forked from a process that has imported vLLM."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    vllm_models.save(tiny_models.trained("llama"), tmp_path / "llama")
    engine = {
        "model": str(tmp_path / "llama"), "kv_cache_dtype": INT8, "max_model_len": 512, "max_num_seqs": 4,
        "max_num_batched_tokens": 256, "attention_config": {"backend": "CUSTOM"}, "enforce_eager": True,
        "block_size": 16, "compilation_config": {"custom_ops": ["none"]}, "kv_cache_memory_bytes": 1 << 26,
    }  # fmt: skip
    jobs = [
        Job("serve", "serve", {"engine": engine, "rounds": [prompts()[:1], prompts()], "tokens": NEW}, seconds=600),
        Job(
            "measure", "measure", {"engine": engine, "contexts": [64], "batches": [1, 4], "profile": False}, seconds=600
        ),
        Job("first", "first", {"engine": engine, "prompts": [(1, 64), (2, 300)]}, seconds=600),
    ]
    events: list[tuple[str, str, Any]] = []
    pool = Pool(
        vllm_cpu_jobs.run, tmp_path, lambda job, event, data: events.append((job.name, event, data)),
        deadline=time.monotonic() + 600, preload=("tests.kit.vllm_engine",), slots=1,
    )  # fmt: skip
    assert pool.run(jobs) == {}
    assert not [data for _, event, data in events if event == "failed"]
    rounds = [data for name, event, data in events if event == "round"]
    expected = [vllm_models.counted_on(prompt, NEW) for prompt in prompts()]
    assert rounds == [expected[:1], expected]
    cases = [data for name, event, data in events if (name, event) == ("measure", "case")]
    assert [(case["context"], case["batch"]) for case in cases] == [(64, 1), (64, 4)]
    assert all(0 < case["ms"] < 1e4 and len(case["ms_all"]) == 3 for case in cases)
    calls = {name: data for name, event, data in events if event == "calls"}
    assert calls["serve"]["prefill_fresh"] > 0
    # prompts count as computed: all calls decode, and read what `fill` wrote
    assert set(calls["measure"]) == {"decode", "append_scaled"}
    cases = [data for name, event, data in events if (name, event) == ("first", "case")]
    assert [(case["requests"], case["tokens"]) for case in cases] == [(1, 64), (2, 300)]
    assert all(0 < case["ms"] < 1e5 and len(case["ms_all"]) == 3 for case in cases)
    assert calls["first"]["prefill_in_pieces"] > 0, "prompts longer than a step come in parts"
