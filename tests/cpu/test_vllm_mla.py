"""bench/vllm_mla.py without vLLM and GPU: engines follow known tokens, runs are compared, calls are timed."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench import svg, vllm_choices, vllm_engine, vllm_mla
from bench.report import vllm
from fp8_mla import unpack
from tests.kit import tiny_models

ROOT = Path(__file__).resolve().parents[2]
Requests = list[tuple[list[int], list[int]]]


class Engine:
    """Continues a request's tokens, but says token 0 at some positions, by a score of `gap`."""

    def __init__(self, requests: Requests, wrong: dict[tuple[int, int], float]) -> None:
        self.requests, self.wrong, self.asked = requests, wrong, list[int]()

    def generate(self, prompts: list[dict[str, Any]], sampling: list[int], use_tqdm: bool) -> list[Any]:
        self.asked.append(len(prompts))
        return [self._output(p["prompt_token_ids"], n) for p, n in zip(prompts, sampling, strict=True)]

    def _output(self, prompt: list[int], tokens: int) -> Any:
        which = next(i for i, (p, truth) in enumerate(self.requests) if (p + truth)[: len(prompt)] == prompt)
        first, (before, truth) = len(prompt) - len(self.requests[which][0]), self.requests[which]
        assert first + tokens == len(truth) and before == prompt[: len(before)]
        said, scores, off = [], [], False
        for place in range(first, first + tokens):
            gap = self.wrong.get((which, place), 0.0)
            off = off or gap > 0  # after another token, an engine goes on from that one
            row = dict.fromkeys(range(tiny_models.VOCABULARY), -9.0) | {truth[place]: -0.5}
            if gap:
                row[0] = -0.5 + gap
            said.append(0 if off else truth[place])
            scores.append({token: SimpleNamespace(logprob=score) for token, score in row.items()})
        return SimpleNamespace(
            outputs=[SimpleNamespace(token_ids=said, logprobs=scores)], num_cached_tokens=len(prompt) // 2
        )


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    monkeypatch.setattr(vllm_engine, "sampling", lambda tokens, logprobs: tokens)
    return [([100 + i], [1 + (i + j) % 7 for j in range(10)]) for i in range(3)]


def run(requests: Requests, wrong: dict[tuple[int, int], float]) -> dict[str, Any]:
    return {"requests": list(range(len(requests))), **vllm_mla.led(Engine(requests, wrong), requests)}


def test_an_engine_is_led_along_the_truth(requests: Requests) -> None:
    engine = Engine(requests, {(0, 3): 1.0, (0, 4): 2.0, (2, 9): 1.0})
    settled: list[tuple[int, int]] = []
    found = vllm_mla.led(engine, requests, lambda prompt, last: settled.append((len(prompt), last - len(prompt) + 1)))
    assert [last for _, last in settled] == [3, 9, 9, 4, 9], "each turn settles what its tokens came from"
    assert engine.asked == [3, 1, 1] and found["turns"] == 3, "what is said after another token is not taken"
    truth = np.array([truth for _, truth in requests])
    assert {tuple(map(int, place)) for place in np.argwhere(found["chosen"] != truth)} == {(0, 3), (0, 4), (2, 9)}
    assert np.isfinite(found["logp"]).all() and found["cached"] == 0
    assert found["logp"][0, 4, 0] == pytest.approx(1.5)


def test_a_model_that_does_not_count_is_an_error(requests: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_mla, "MOST_TURNS", 3)
    with pytest.raises(RuntimeError, match="1 requests were not done after 3 turns"):
        run(requests, {(1, place): 1.0 for place in range(10)})


def test_near_ties_are_told_from_wrong_tokens(requests: Requests) -> None:
    runs = {
        ("ours-eager", "all"): run(requests, {}),
        ("ours-graphs", "all"): run(requests, {}),
        ("stock-eager", "all"): run(requests, {(1, 5): 0.25}),
        ("stock-graphs", "all"): run(requests, {}),
    }
    for key, change in (("ours-graphs", 0.5), ("stock-graphs", 0.125)):
        runs[key, "all"]["logp"][2, 2, requests[2][1][2]] += change
    runs["ours-graphs", "again"] = {
        k: v if k in ("turns", "cached") else v[:1] for k, v in runs["ours-graphs", "all"].items()
    }
    found = vllm_mla.cases(runs)
    by_name = {(case["a"], case["b"], case["round"]): case for case in found["cases"]}
    assert set(by_name) == {
        ("ours-eager", "stock-eager", "all"), ("ours-graphs", "stock-graphs", "all"),
        ("ours-eager", "ours-graphs", "all"), ("stock-eager", "stock-graphs", "all"),
        ("ours-graphs", "ours-graphs", "again, all"),
    }  # fmt: skip
    case = by_name["ours-eager", "stock-eager", "all"]
    # where the other token is said, its score was 8.5 lower in the other run
    assert (case["tokens"], case["differ"], case["wrong"], case["gap"]) == (30, 1, 0, 8.5) and found["near"] >= 8.5
    assert not by_name["ours-graphs", "stock-graphs", "all"]["differ"]
    assert by_name["ours-graphs", "ours-graphs", "again, all"]["tokens"] == 10
    assert vllm_mla.compared(runs["ours-eager", "all"], runs["stock-eager", "all"], 1.0)["wrong"] == 1
    del runs["stock-graphs", "all"]
    lone = {(case["a"], case["b"]): case for case in vllm_mla.cases(runs)["cases"]}
    assert lone["ours-eager", "stock-eager"]["wrong"] == 1, "of one engine alone eager and graph runs differ by 0.5"


def test_scores_that_are_no_numbers_are_wrong(requests: Requests) -> None:
    a, b = run(requests, {}), run(requests, {})
    a["logp"][1, 5] = np.nan
    found = vllm_mla.compared(a, b, 9.0)
    assert (found["differ"], found["wrong"], found["where"]) == (1, 1, [[1, 5, None]])
    assert found["scores"] == 0 and json.dumps(found, allow_nan=False)


def test_a_token_of_other_keys_is_told_from_a_wrong_one(requests: Requests) -> None:
    """A token is excused if our engine also says it once it gets the other engine's keys."""
    runs = {
        ("stock-eager", "all"): run(requests, {}),
        ("ours-eager", "all"): run(requests, {(1, 5): 2.0, (2, 3): 2.0}),
        ("ours-given", "all"): run(requests, {(2, 3): 2.0}),
    }
    by_name = {(case["a"], case["b"]): case for case in vllm_mla.cases(runs)["cases"]}
    case = by_name["ours-eager", "stock-eager"]
    assert (case["differ"], case["wrong"], case["otherwise"]) == (2, 1, 1)
    case = by_name["ours-given", "stock-eager"]
    assert (case["differ"], case["wrong"], case["otherwise"]) == (1, 1, 0), "with the same keys nothing is excused"


def test_with_the_same_keys_near_is_what_short_requests_say(
    requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_mla, "SHORT", [0, 1])
    names = ("ours-eager", "stock-eager", "ours-graphs", "stock-graphs")
    runs = {(name, "all"): run(requests, {}) for name in names}
    runs["ours-given", "all"] = run(requests, {(2, 3): 0.5})
    runs["stock-eager", "all"]["logp"][2, 7, requests[2][1][7]] += 20.0
    found = vllm_mla.cases(runs)
    assert found["near"] == pytest.approx(20) and found["sure"] == 0
    (case,) = (case for case in found["cases"] if case["a"] == "ours-given")
    assert (case["differ"], case["wrong"], case["where"][0][:2]) == (1, 1, [2, 3])


class Indexer(torch.nn.Module):
    """The indexer of a layer, with random choices."""

    prefix = "layer"

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.topk_indices_buffer = torch.full((rows, 4), -1, dtype=torch.int32)

    def forward(self) -> torch.Tensor:
        return self.topk_indices_buffer.copy_(torch.rand(len(self.topk_indices_buffer), 9).argsort(-1)[:, :4])


class DeepseekV32Indexer(Indexer):
    """The indexer of vLLM 0.33, which calls a function that replaces its forward."""

    k_cache = SimpleNamespace(prefix="layer.k_cache")


Step = tuple[list[str], list[int], list[int]]
"""Names of requests, how many of their tokens are computed, and their first rows."""


def first_runner(step: Step) -> tuple[Any, Any]:
    """A worker of vLLM 0.26, and what runs its step."""
    names, computed, starts = step
    model = Indexer(starts[-1])
    requests = {name: SimpleNamespace(prompt_token_ids=[ord(name)]) for name in "ab"}
    batch = SimpleNamespace(req_ids=names, num_computed_tokens_cpu=np.array(computed))
    loc = SimpleNamespace(np=np.array(starts))
    runner = SimpleNamespace(get_model=lambda: model, requests=requests, input_batch=batch, query_start_loc=loc)
    return SimpleNamespace(model_runner=runner), model


def second_runner(step: Step) -> tuple[Any, Any]:
    """A worker of vLLM 0.33, and what runs its step."""
    names, computed, starts = step
    model = DeepseekV32Indexer(starts[-1])
    caller = sys.modules[vllm_choices.CALLER]
    caller.sparse_attn_indexer = lambda hidden, prefix, buffer: model()  # type: ignore[attr-defined]
    batch = SimpleNamespace(
        req_ids=names, num_computed_tokens_np=np.array(computed), query_start_loc_np=np.array([*starts, starts[-1]])
    )
    added: list[Any] = []
    runner = SimpleNamespace(
        get_model=lambda: torch.nn.ModuleList([model]), add_requests=added.append, prepare_inputs=lambda step: batch
    )

    def run() -> torch.Tensor:
        new = [SimpleNamespace(req_id=name, prompt_token_ids=[ord(name)]) for name in names]
        runner.add_requests(SimpleNamespace(scheduled_new_reqs=new))
        assert runner.prepare_inputs(step) is batch and added
        caller.sparse_attn_indexer(None, "layer.k_cache", model.topk_indices_buffer)
        return model.topk_indices_buffer

    return SimpleNamespace(model_runner=runner), run


@pytest.mark.parametrize("made", [first_runner, second_runner])
def test_choices_are_kept_and_given_by_request_and_position(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, vllm_choices.CALLER, ModuleType(vllm_choices.CALLER))
    file = str(tmp_path / "choices")
    first, run = made((["a", "b"], [5, 8], [0, 3, 5]))
    vllm_choices.keep(first, 6)
    kept = run().clone().sort(-1).values
    vllm_choices.settle(first, [ord("b")], 9)
    newer = run()
    assert not torch.equal(first.chosen["layer", 6, (ord("a"),)], kept[1]), "a newer choice replaces it"
    assert torch.equal(first.chosen["layer", 8, (ord("b"),)], kept[3]), "b's are settled"
    assert torch.equal(newer[3:], kept[3:]), "what is computed again sees the same keys"
    kept[:3] = newer[:3].sort(-1).values
    assert vllm_choices.write(first, file) == 4, "a's position 5 is not beyond"
    second, run = made((["b", "a"], [8, 5], [0, 2, 5]))
    vllm_choices.take(second, file, 6)
    got = run()
    assert vllm_choices.taken(second) == 4
    assert torch.equal(got[[0, 1, 3, 4]], kept[[3, 4, 1, 2]])
    with pytest.raises(RuntimeError, match="no Indexer"):
        vllm_choices.keep(SimpleNamespace(model_runner=SimpleNamespace(get_model=torch.nn.Identity)), 6)


def test_sums_of_new_weights_land_where_graphs_read() -> None:
    """A graph of DeepSeek-V4's first layer keeps reading the tensor with which it was captured."""
    layers = [SimpleNamespace(hc_attn_fn=torch.ones(3, 8), hc_attn_fn_broadcast=None) for _ in range(2)]

    def finalize() -> None:
        layers[0].hc_attn_fn_broadcast = layers[0].hc_attn_fn.view(3, 4, 2).sum(1)

    model = SimpleNamespace(model=SimpleNamespace(layers=layers, finalize_mhc_broadcast_weights=finalize))
    vllm_engine.finish_weights(model)
    read = layers[0].hc_attn_fn_broadcast
    layers[0].hc_attn_fn.fill_(2)
    vllm_engine.finish_weights(model)
    assert layers[0].hc_attn_fn_broadcast is read and read.tolist() == [[8, 8]] * 3
    assert layers[1].hc_attn_fn_broadcast is None
    vllm_engine.finish_weights(torch.nn.Identity())


def test_what_is_asked_is_below_and_beyond_the_topk() -> None:
    asked = vllm_mla.asked()
    lengths = [len(prompt) for prompt, _ in asked]
    assert set(lengths) == {1, 17, 300, 4000} and all(len(truth) == vllm_mla.TOKENS for _, truth in asked)
    assert {lengths[i] for i in vllm_mla.SHORT} == {1, 17, 300}
    assert [len(which) for which in vllm_mla.ROUNDS.values()] == [1, 32, 8] and lengths[3] > vllm_mla.TOPK
    assert max(lengths) > vllm_mla.STEP_TOKENS, "prompts come in parts"


@pytest.mark.parametrize("name", ["v32-16", "glm5-64"])
def test_a_saved_model_says_what_the_engine_asks(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    model, loss = vllm_mla.train_model(name, "cpu", (vllm_mla.Stage(8, 2, 2, 1e-3),))
    assert 0 < loss < 9 and next(model.parameters()).dtype == torch.bfloat16
    vllm_mla.save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["index_topk"] == 2048 and config["num_nextn_predict_layers"] == 1
    assert config["first_k_dense_replace"] == config["num_hidden_layers"] + 1 == 3, "the layer that drafts is dense"
    assert config["indexer_rope_interleave"] is (name == "glm5-64")
    draft = safetensors.load_file(tmp_path / "draft.safetensors")
    state = safetensors.load_file(tmp_path / "model.safetensors")
    assert all(key.startswith("model.layers.2.") for key in draft) and not set(draft) & set(state)
    assert sum(".self_attn.indexer." in key for key in draft) == 5
    if importlib.util.find_spec("vllm") is not None:
        command = [sys.executable, "-m", "tests.kit.vllm_load", str(tmp_path), str(tmp_path / "store")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        classes = ["DeepseekV3ForCausalLM" if name == "v32-16" else "GlmMoeDsaForCausalLM", "DeepSeekMTP"]
        assert [line for line in done.stdout.splitlines() if line.startswith("loaded")] == [
            f"loaded {of}" for of in classes
        ], done.stderr[-2000:]


# ---- steps


def worker(layers: dict[str, Any], model: Any = None) -> Any:
    compilation = SimpleNamespace(static_forward_context=layers)
    config = SimpleNamespace(compilation_config=compilation)
    return SimpleNamespace(model_runner=SimpleNamespace(vllm_config=config, get_model=lambda: model))


def test_caches_hold_values_of_a_family() -> None:
    latents = torch.zeros(40, 64, 656, dtype=torch.uint8)
    index = torch.zeros(40, 64, 132, dtype=torch.uint8)
    layers = {"a": SimpleNamespace(kv_cache=latents), "b": SimpleNamespace(kv_cache=[index]), "c": SimpleNamespace()}
    vllm_mla.fill(worker(layers), "normal")
    assert unpack(latents, torch.float32).std() == pytest.approx(1, abs=0.01)
    rows = index.flatten(1)
    scales = rows[:, 64 * 128 :].contiguous().view(torch.float32)
    keys = rows[:, : 64 * 128].contiguous().view(torch.float8_e4m3fn).float().view(40, 64, 128) * scales.unsqueeze(-1)
    assert keys.std() == pytest.approx(1, abs=0.01) and (scales.log2() == scales.log2().round()).all()
    before = index.clone()
    vllm_mla.fill(worker(layers), "few small")
    sizes = unpack(latents, torch.float32).flatten(0, 1).abs().amax(-1)
    assert (sizes < 0.1).sum() == 40 and torch.equal(index, before), "one of 64 tokens is small"


def test_weights_keep_the_size_of_numbers() -> None:
    layer = torch.nn.Module()
    layer.norm, layer.embed_tokens = torch.nn.LayerNorm(256), torch.nn.Embedding(64, 256)
    layer.proj = torch.nn.Linear(256, 512, bias=False)
    layer.W_UK_T = torch.nn.Parameter(torch.zeros(4, 64, 512))
    layer.codes = torch.nn.Parameter(torch.zeros(256, 4096).to(torch.float8_e4m3fn), requires_grad=False)
    layer.weight_scale_inv = torch.nn.Parameter(torch.zeros(2, 32), requires_grad=False)
    layer.table = torch.nn.Parameter(torch.full((8, 6), 7, dtype=torch.int32), requires_grad=False)
    vllm_mla.draw_weights(worker({}, layer))
    with torch.no_grad():
        out = layer.proj(layer.norm(layer.embed_tokens(torch.arange(64))))
        absorbed = torch.bmm(torch.randn(4, 64, 64), layer.W_UK_T)
    assert (layer.codes.float() * layer.weight_scale_inv[0, 0]).std() == pytest.approx(4096**-0.5, rel=0.1)
    assert (layer.table == 7).all(), "experts of tokens stay"
    assert out.std() == pytest.approx(1, abs=0.1) and absorbed.std() == pytest.approx(1, abs=0.1)


def test_kernels_are_told_apart() -> None:
    names = {
        "indexer": "void deep_gemm::sm90_fp8_paged_mqa_logits<1u, 64u>",
        "top-k": "void vllm::persistent_topk_kernel<4>",
        "slots": "_convert_req_index_to_global_index_kernel",
        "attention": "kernel_cutlass_kernel_cute_kernelsmlakernelsdecodeMlaDecodeKernel_object_at_0",
        "rest": "void vllm::concat_and_cache_ds_mla_kernel<__nv_bfloat16>",
    }  # fmt: skip
    found = vllm_mla.shares([(name, 12e3 * (i + 1)) for i, name in enumerate(names.values())])
    assert found["shares_ms"] == {name: pytest.approx(1.0 * (i + 1)) for i, name in enumerate(names)}
    assert found["gpu_ms"] == pytest.approx(15.0) and len(found["kernels"]) == 5


# ---- tables


def step(ms: float, attention: float, batch: int = 16) -> dict[str, Any]:
    shares = {"attention": attention, "indexer": 0.3, "top-k": 0.05, "slots": 0.01, "rest": 1.0}
    case = {"family": "normal", "context": 8192, "batch": batch, "ms": ms}
    return {**case, "shares_ms": shares, "gpu_ms": sum(shares.values())}


def made_up() -> dict[str, Any]:
    case = {"a": "ours-eager", "b": "stock-eager", "tokens": 256, "differ": 2, "wrong": 0, "gap": 0.125, "scores": 0.5}
    more = {**case, "tokens": 8192, "differ": 0, "gap": 0.0, "scores": 0.25}
    engines = {
        "v32-16-ours-eager": {"start_s": 12.0, "cached": {"all": 64, "again": 8000}},
        "v32-16-ours-drafts": {"start_s": 31.0, "draft": 900.0, "accepted": 30.0},
    }
    backends = {"ours-16": [step(2.0, 0.5), step(3.0, 0.6, batch=64)], "stock-16": [step(2.5, 1.0)]}
    return {
        "card": "NVIDIA H100", "date": "2026-01-02", "versions": {"vllm": "0.26.0"},
        "mla-tokens": {
            "engines": engines,
            "models": {"v32-16": {"near": 0.25, "cases": [case, more, {**case, "b": "ours-graphs"}]}},
        },
        "mla-steps": {"layers": 4, "backends": {name: {"cases": cases} for name, cases in backends.items()}},
    }  # fmt: skip


def test_the_tables_show_both_engines() -> None:
    text, users = ("\n".join(made([made_up()])) for made in (vllm.page, vllm.mla))
    assert "| v32-16 | ours-eager, stock-eager | 8448 | 2 | 0 | 0 | 0.125 | 0.5 | 0.25 |" in text
    assert "| 0.26 | v32-16 | stock | 8448 | 2 | 0 | 0 |" in users and "ours-graphs" not in users
    assert "| 0.26 | v32-16 | stock | 16896 | 4 | 0 | 0 |" in vllm.mla([made_up(), made_up()])
    newer = "\n".join(vllm.mla([made_up(), {**made_up(), "versions": {"vllm": "0.33.0"}}]))
    assert newer.count("| stock | 8448 |") == 2 and "| 0.33 | v32-16 |" in newer
    assert "| 16, normal | 16 x 8192 | 2, 2.5 | 1.86, 2.36 | 0.5 | 1 | 2.00 x | 0.3 | 0.05 | 0.01 | 1 |" in text
    assert "16 x 8192" not in users, "results/README.md has the steps"
    said = "FlashMLA's attention takes 2.00 to 2.00 times as long as ours, in 1 cases."
    assert said in text
    assert "64 x 8192 | 3 |" not in text, "it has no pair"
    assert "started in 12 to 31 s. 8000 tokens came from the cache. 30 of 900 drafts were taken." in text
    assert vllm.mla([{}]) == []


def test_the_plot_of_a_step_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = svg.write({n: (lambda plt: vllm.steps_plot(made_up(), plt)) for n in ("a.svg", "b.svg")}, tmp_path)
    assert drawn == ["a.svg", "b.svg"]
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text() and "16 heads: ours, then FlashMLA" in text
    assert svg.write({"c.svg": lambda plt: vllm.steps_plot({}, plt)}, tmp_path) == []
