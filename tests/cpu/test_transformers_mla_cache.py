"""`CuteMlaCache`, and what `attn_implementation="cute_mla"` relies on in transformers."""

import inspect
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17 or later")

import transformers
from transformers import cache_utils, masking_utils

from cute_kernels.integrations import transformers_cache, transformers_mla
from tests.kit import tiny_models
from tests.kit.kernel_place import printed
from tests.kit.threads import one_thread as one_thread
from tests.kit.transformers_calls import keywords_of_calls, moved
from tests.kit.transformers_mla import MODELS, attention_class

pytestmark = pytest.mark.xdist_group("transformers")  # its small models are trained once


# ---- the cache


def filled_layer() -> tuple[Any, torch.Tensor]:
    """A layer with 10 tokens of 3 sequences, and the indexer's part of them."""
    config = type("Config", (), {"_attn_implementation": "cute_mla"})()
    layer = transformers_mla.CuteMlaLayer(config, transformers_cache.Positions())
    torch.manual_seed(0)
    layer.update(*torch.randn(3, 1, 10, 576).bfloat16().split([512, 64], dim=-1))
    indexer_keys = torch.randn(3, 10, 128)
    layer.update_indexer(indexer_keys)
    return layer, indexer_keys


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
    assert printed(code).splitlines() == ["[False, False]", "[True, True]"]


# ---- what transformers calls, and is called with


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
    """The constructor of our layer does not call upstream's, so it must set the same attributes."""
    layer, _ = filled_layer()
    layer.reset()
    for name, value in vars(cache_utils.DynamicIndexedLayer()).items():
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
