"""`CuteMlaCache`, and what `attn_implementation="cute_mla"` relies on in transformers."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17 or later")

import transformers
from transformers import cache_utils, masking_utils

import fp8_mla
from cute_kernels.integrations import transformers as cute
from cute_kernels.integrations import transformers_cache, transformers_mla
from tests.kit import tiny_models
from tests.kit.threads import one_thread as one_thread
from tests.kit.transformers_calls import counted_on, generate, keywords_of_calls, moved
from tests.kit.transformers_mla import MODELS, attention_class
from tests.kit.transformers_mla import said as said

ROOT = Path(__file__).resolve().parents[2]


# ---- the cache


@pytest.mark.parametrize("options", [{"max_length": 64}, {}], ids=str)
def test_a_cache_grows_or_has_its_length(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(transformers_cache, "FIRST_CAPACITY", 4)
    model, ids = tiny_models.trained("deepseek_v32"), tiny_models.sequences(21, 2, 20)
    cache = cute.CuteMlaCache(model.config, **options)
    assert torch.equal(generate(model, "cute_mla", ids, cache)[0], counted_on(ids)) and said == []
    layer = cache.layers[0]
    assert cache.get_seq_length() == 31 and layer.keys.shape == (2, 64 if "max_length" in options else 32, 656)
    assert cache.get_max_length() == options.get("max_length", -1)


def test_tokens_stay_when_a_layer_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_cache, "FIRST_CAPACITY", 4)
    layer, _ = filled_layer()
    before = torch.cat(layer.latents(torch.float32), -1)
    assert layer.capacity == 16
    layer.update(*torch.randn(3, 1, 7, 576).bfloat16().split([512, 64], dim=-1))
    assert layer.capacity == 32 and before.abs().max() > 1
    assert torch.equal(torch.cat(layer.latents(torch.float32), -1)[:, :, :10], before)


def test_a_full_cache_says_so() -> None:
    model, ids = tiny_models.trained("deepseek_v32"), tiny_models.sequences(22, 1, 20)
    with pytest.raises(ValueError, match="max_length: got 24; needs 25"):
        generate(model, "cute_mla", ids, cute.CuteMlaCache(model.config, max_length=24))
    with pytest.raises(ValueError, match="max_length: got 0"):
        cute.CuteMlaCache(model.config, max_length=0)


@pytest.mark.parametrize("options", [{"max_length": 64}, {}], ids=str)
@pytest.mark.parametrize("first, second", [(1, 3), (3, 1), (2, 2)])
def test_a_cache_is_reset_for_another_batch(first: int, second: int, options: dict[str, Any], said: list[str]) -> None:
    model = tiny_models.trained("glm_moe_dsa")
    cache = cute.CuteMlaCache(model.config, **options)
    for seed, batch in enumerate((first, second)):
        ids = tiny_models.sequences(25 + seed, batch, 20)
        cache.reset()
        assert torch.equal(generate(model, "cute_mla", ids, cache)[0], counted_on(ids))
        assert cache.layers[0].keys.shape[0] == batch and cache.layers[0].indexer_keys.shape[:2] == (batch, 31)
    assert said == []


def filled_layer() -> tuple[Any, torch.Tensor]:
    """A layer with 10 tokens of 3 sequences, and what the indexer keeps of them."""
    config = type("Config", (), {"_attn_implementation": "cute_mla"})()
    layer = transformers_mla.CuteMlaLayer(config, transformers_cache.Positions())
    torch.manual_seed(0)
    layer.update(*torch.randn(3, 1, 10, 576).bfloat16().split([512, 64], dim=-1))
    indexer_keys = torch.randn(3, 10, 128)
    layer.update_indexer(indexer_keys)
    return layer, indexer_keys


def test_sequences_are_chosen_and_tokens_forgotten() -> None:
    layer, indexer_keys = filled_layer()
    before = torch.cat(layer.latents(torch.float32), -1)

    def check(sequences: list[int], tokens: int) -> None:
        assert torch.equal(torch.cat(layer.latents(torch.float32), -1), before[sequences, :, :tokens])
        assert torch.equal(layer.indexer_keys, indexer_keys[sequences, :tokens])
        assert type(layer.get_seq_length()) is int and layer.get_mask_sizes(3) == (tokens + 3, 0)

    check([0, 1, 2], 10)
    layer.batch_repeat_interleave(2)
    check([0, 0, 1, 1, 2, 2], 10)
    layer.reorder_cache(torch.tensor([5, 0, 2]))
    check([2, 0, 1], 10)
    layer.batch_select_indices(torch.tensor([2, 0]))
    check([1, 2], 10)
    layer.crop(torch.tensor(-4))
    check([1, 2], 6)
    new = torch.randn(2, 1, 2, 576).bfloat16()
    layer.update(*new.split([512, 64], dim=-1))
    assert torch.equal(torch.cat(layer.latents(torch.float32), -1)[:, :, :6], before[[1, 2], :, :6])
    expected = fp8_mla.unpack(fp8_mla.pack(new), torch.float32)
    assert torch.equal(torch.cat(layer.latents(torch.float32), -1)[:, :, 6:], expected)
    with pytest.raises(ValueError, match="tokens_to_remove: got 2"):
        layer.crop(2)


@pytest.mark.parametrize("forget", ["reset", "crop"])
def test_a_layer_without_tokens_takes_another_batch(forget: str) -> None:
    layer, _ = filled_layer()
    if forget == "reset":
        layer.reset()
    else:
        layer.crop(-10)
    assert layer.get_seq_length() == 0
    layer.update(*torch.randn(2, 1, 4, 576).bfloat16().split([512, 64], dim=-1))
    assert layer.update_indexer(torch.ones(2, 4, 128)).shape == (2, 4, 128)


@pytest.mark.parametrize("batch", [1, 4])
def test_tokens_of_another_batch_are_refused(batch: int) -> None:
    layer, _ = filled_layer()
    with pytest.raises(ValueError, match=f"key_states: got a batch of {batch}; needs 3 sequences.* the cache"):
        layer.update(*torch.randn(batch, 1, 1, 576).bfloat16().split([512, 64], dim=-1))
    assert layer.get_seq_length() == 10


# ---- expand_kv


@pytest.mark.parametrize("name", MODELS)
def test_latents_pass_for_our_attention_alone(name: str) -> None:
    attention, model = attention_class(name), tiny_models.untrained(name)
    expand_kv = attention.expand_kv
    transformers_mla.pass_latents(sys.modules[attention.__module__])
    assert attention.expand_kv is expand_kv, "once is enough"
    module, latents = model.model.layers[1].self_attn, torch.randn(2, 1, 3, 576).split([512, 64], dim=-1)
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        assert [t.shape for t in module.expand_kv(*latents)] == [(2, 4, 3, 128), (2, 4, 3, 64)]
    model.set_attn_implementation("cute_mla")
    assert module.expand_kv(*latents) == latents


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_models_are_not_loaded_before_they_are_used() -> None:
    code = (
        "import sys; import cute_kernels.integrations.transformers as cute\n"
        "from cute_kernels.integrations import transformers_mla as mla\n"
        "name = 'transformers.models.{0}.modeling_{0}'.format\n"
        "print([name(m) in sys.modules for m in mla.ATTENTIONS])\n"
        "import transformers\n"
        "models = transformers.DeepseekV32ForCausalLM, transformers.GlmMoeDsaForCausalLM\n"
        "print([hasattr(getattr(sys.modules[name(m)], c).expand_kv, mla.ORIGINAL) for m, c in mla.ATTENTIONS.items()])"
    )
    assert run(code).splitlines() == ["[False, False]", "[True, True]"]


def test_the_package_does_not_load_transformers() -> None:
    assert run("import sys, cute_kernels, cute_kernels.integrations; print('transformers' in sys.modules)") == "False"


# ---- what transformers calls, and is called with


INDEXED = cache_utils.DynamicIndexedLayer
UPSTREAM: list[tuple[Callable[..., Any], tuple[str, ...]]] = [
    (masking_utils.sdpa_mask, ("batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function")),
    (INDEXED.update_indexer, ("indexer_key_states",)),
    (INDEXED.lazy_initialization_indexer, ("indexer_key_states",)),
    (INDEXED.update, ("key_states", "value_states", "args", "kwargs")),
    (INDEXED.reorder_cache, ("beam_idx",)),
    (INDEXED.crop, ("tokens_to_remove",)),
    (INDEXED.batch_repeat_interleave, ("repeats",)),
    (INDEXED.batch_select_indices, ("indices",)),
    (INDEXED.reset, ()),
]


@pytest.mark.parametrize("function, parameters", UPSTREAM, ids=lambda value: getattr(value, "__qualname__", ""))
def test_functions_of_transformers_are_where_they_were(function: Any, parameters: tuple[str, ...]) -> None:
    assert moved(inspect.unwrap(function), parameters) == [], f"transformers {transformers.__version__}"


@pytest.mark.parametrize("name", MODELS)
def test_models_call_what_they_did(name: str) -> None:
    attention, version = attention_class(name), transformers.__version__
    modeling = sys.modules[attention.__module__]
    original = getattr(attention.expand_kv, transformers_mla.ORIGINAL)
    assert moved(original, ("kv_nope", "k_rot")) == [], f"transformers {version}"
    wanted = ("module", "query", "key", "value", "attention_mask", "scaling", "dropout")
    assert moved(modeling.eager_attention_forward, wanted) == [], f"transformers {version}"
    known = set(inspect.signature(transformers_mla.cute_mla_attention).parameters)
    found = list(keywords_of_calls(inspect.unwrap(attention.forward), "attention_interface"))
    assert found and all(args == 5 for args, _ in found), f"transformers {version}: module, query, key, value, mask"
    for _, given in found:
        assert {"dropout", "scaling", "indices"} <= given, f"transformers {version} passes {sorted(given)}"
        assert given <= known, f"transformers {version} passes {sorted(given - known)}, which is ignored"


def test_our_layer_has_all_that_indexed_layers_have() -> None:
    """Its constructor does not call upstream's."""
    layer, _ = filled_layer()
    layer.reset()
    for name, value in vars(INDEXED()).items():
        assert hasattr(layer, name), f"transformers {transformers.__version__} has {name}"
        assert "indexer" not in name or getattr(layer, name) == value
    order = [c.__name__ for c in transformers_mla.CuteMlaLayer.__mro__]
    assert order[1:4] == ["DynamicIndexedLayer", "GrowingLayer", "DynamicLayer"]


@pytest.mark.parametrize("tokens", [1, 3, 12])
def test_masks_are_bool_and_always_there(tokens: int) -> None:
    given = {
        "batch_size": 2, "q_length": tokens, "kv_length": 12, "q_offset": 12 - tokens, "kv_offset": 0,
        "mask_function": masking_utils.causal_mask_function, "attention_mask": None, "allow_is_causal_skip": True,
        "allow_is_bidirectional_skip": True, "dtype": torch.bfloat16,
    }  # fmt: skip
    mask = transformers_mla.cute_mla_mask(**given)
    position = torch.arange(12)
    assert torch.equal(mask, (position <= position[-tokens:, None]).expand(2, 1, tokens, 12))


def test_the_adapter_is_short() -> None:
    assert len(inspect.getsource(transformers_mla).splitlines()) < 400
