"""`CuteInt8Cache` and `CuteMlaCache` in models of transformers: they grow, are copied, reordered, reset and moved."""

import inspect
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17 or later")

import transformers
from transformers import cache_utils, masking_utils

from cute_kernels.integrations import transformers as cute
from cute_kernels.integrations import transformers_cache, transformers_mla
from tests.kit import tiny_models
from tests.kit.threads import one_thread as one_thread
from tests.kit.transformers_calls import COPIES, counted, counted_on, generate, moved
from tests.kit.transformers_calls import said as said
from tests.kit.transformers_mla import CACHES_LATENTS, eager

pytestmark = pytest.mark.xdist_group("transformers")  # its small models are trained once


class Kind(NamedTuple):
    """A kind of cache and what it is used with.

    model      name of a trained model
    attention  name of the attention that reads the cache
    cache      class of the cache
    layer      class of its layers
    axis       axis of tokens in what a layer stores
    states     (batch, tokens) -> what a layer is updated with
    stored     what a layer holds as float32, (batch, heads, tokens, d)
    """

    model: str
    attention: str
    cache: Any
    layer: Any
    axis: int
    states: Callable[[int, int], Any]
    stored: Callable[[Any], torch.Tensor]

    def empty(self) -> Any:
        config = type("Config", (), {"_attn_implementation": self.attention})()
        return self.layer(config, transformers_cache.Positions())

    def filled(self) -> Any:
        layer = self.empty()
        torch.manual_seed(0)
        layer.update(*self.states(3, 10))
        return layer

    def expected(self, model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        """Tokens of eager attention over values with the cache's precision."""
        if self.cache is LATENT.cache:
            return eager(self.model, model, ids, **options)[0]
        return generate(model, "eager", ids, **options)[0]


INT8 = Kind(
    "llama", "cute", cute.CuteInt8Cache, transformers_cache.CuteInt8Layer, 2,
    lambda batch, n: torch.randn(2, batch, 2, n, 64).bfloat16().unbind(),
    lambda layer: layer.dense_keys(torch.float32),
)  # fmt: skip
LATENT = Kind(
    "deepseek_v32", "cute_mla", cute.CuteMlaCache, transformers_mla.CuteMlaLayer, 1,
    lambda batch, n: torch.randn(batch, 1, n, 576).bfloat16().split([512, 64], dim=-1),
    lambda layer: torch.cat(layer.latents(torch.float32), -1),
)  # fmt: skip
EACH = pytest.mark.parametrize("kind", [INT8, LATENT], ids=["int8", "latent"])
LENGTHS = pytest.mark.parametrize("options", [{"max_length": 64}, {}], ids=str)


# ---- models


@pytest.mark.parametrize(
    ("kind", "options"),
    [*itertools.product((INT8, LATENT), ({"max_length": 64}, {})), (INT8, {"scale_dtype": torch.float16})],
)
def test_a_cache_grows_or_has_its_length(
    kind: Kind, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(transformers_cache, "FIRST_CAPACITY", 4)
    model, ids = tiny_models.trained(kind.model), tiny_models.sequences(21, 2, 20)
    cache = kind.cache(model.config, **options)
    assert torch.equal(generate(model, kind.attention, ids, cache)[0], counted_on(ids)) and said == []
    assert cache.get_seq_length() == 31
    assert cache.layers[0].keys.shape[kind.axis] == (64 if "max_length" in options else 32)
    assert cache.get_max_length() == options.get("max_length", -1)
    assert kind is LATENT or cache.layers[0].key_scales.dtype is options.get("scale_dtype", torch.float32)


@EACH
def test_a_full_cache_says_so(kind: Kind) -> None:
    model, ids = tiny_models.trained(kind.model), tiny_models.sequences(22, 1, 20)
    with pytest.raises(ValueError, match="max_length: got 24; needs 25"):
        generate(model, kind.attention, ids, kind.cache(model.config, max_length=24))
    with pytest.raises(ValueError, match="max_length: got 0"):
        kind.cache(model.config, max_length=0)


@pytest.mark.parametrize(
    ("kind", "attention"), [(INT8, "cute"), (INT8, "eager"), (LATENT, "cute_mla")], ids=["int8", "eager", "latent"]
)
@LENGTHS
@pytest.mark.parametrize("first, second", [(1, 3), (3, 1)])
def test_a_cache_is_reset_for_another_batch(
    first: int, second: int, options: dict[str, Any], kind: Kind, attention: str
) -> None:
    model = tiny_models.trained(kind.model)
    cache = kind.cache(model.config, **options)
    for batch in (first, second):
        ids = tiny_models.sequences(25 + batch, batch, 20)
        cache.reset()
        assert torch.equal(generate(model, attention, ids, cache)[0], counted_on(ids))
        assert cache.layers[0].keys.shape[0] == batch
        assert kind is INT8 or cache.layers[0].indexer_keys.shape[:2] == (batch, 31)


@pytest.mark.parametrize("kind", [INT8, LATENT, LATENT._replace(model="glm_moe_dsa")], ids=lambda kind: kind.model)
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 4}], ids=str)
def test_beams_and_speculation(
    kind: Kind, options: dict[str, Any], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beams reorder the cache, and wrongly guessed tokens are cropped."""
    name = "reorder_cache" if "num_beams" in options else "crop"
    calls = counted(monkeypatch, (kind.layer, name))
    model, ids = tiny_models.trained(kind.model), tiny_models.sequences(24, 1, 20)
    expected = kind.expected(model, ids, **options)
    found, _ = generate(model, kind.attention, ids, kind.cache(model.config), **options)
    assert torch.equal(found, expected) and said == [] and calls[name] > 0


@EACH
@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("other", [False, True], ids=["ours", "eager"])
def test_a_copied_cache_serves_the_attention_that_is_on(
    kind: Kind, other: bool, copy: Callable[[Any], Any], said: list[str]
) -> None:
    """The attention may also change after the copy was made."""
    if other and kind is LATENT and not CACHES_LATENTS:
        pytest.skip("this transformers caches keys and values for eager attention, which the cache refuses")
    model = tiny_models.trained(kind.model)
    prompt, *steps = tiny_models.sequences(7, 2, 23).split([20, 1, 1, 1], dim=1)
    attention = "eager" if other else kind.attention
    caches = [kind.cache(model.config)]
    try:
        with torch.no_grad():
            model.set_attn_implementation(kind.attention)
            model(prompt, past_key_values=caches[0])
            caches.append(copy(caches[0]))
            for step, name in zip(steps, (attention, kind.attention, attention), strict=True):
                model.set_attn_implementation(name)
                expected, found = (model(step, past_key_values=cache).logits for cache in caches)
                assert torch.equal(found, expected)
    finally:
        model.set_attn_implementation("eager")
    assert said == []
    assert all(layer.serves("eager") for layer in caches[1].layers), "its config is the model's again"


@EACH
def test_a_static_cache_runs_in_plain_torch(kind: Kind, said: list[str]) -> None:
    model, ids = tiny_models.trained(kind.model), tiny_models.sequences(12, 2, 20)
    cache = cache_utils.StaticCache(config=model.config, max_cache_len=64)
    found, _ = generate(model, kind.attention, ids, cache, disable_compile=True)
    assert torch.equal(found, counted_on(ids)) and said


# ---- layers


@EACH
def test_tokens_stay_when_a_layer_grows(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_cache, "FIRST_CAPACITY", 4)
    layer = kind.filled()
    before = kind.stored(layer)
    assert layer.capacity == 16
    layer.update(*kind.states(3, 7))
    assert layer.capacity == 32 and before.abs().max() > 1
    assert torch.equal(kind.stored(layer)[:, :, :10], before)


@EACH
@pytest.mark.parametrize("batch", [1, 4])
def test_tokens_of_another_batch_are_refused(kind: Kind, batch: int) -> None:
    layer = kind.filled()
    with pytest.raises(ValueError, match=f"key_states: got a batch of {batch}; needs 3 sequences"):
        layer.update(*kind.states(batch, 1))
    assert layer.get_seq_length() == 10


@EACH
def test_sequences_are_chosen_and_tokens_forgotten(kind: Kind) -> None:
    layer, indexer_keys = kind.filled(), torch.randn(3, 10, 128)
    before = kind.stored(layer)
    if kind is LATENT:
        layer.update_indexer(indexer_keys)

    def check(sequences: list[int], tokens: int) -> None:
        assert torch.equal(kind.stored(layer), before[sequences, :, :tokens])
        assert type(layer.get_seq_length()) is int and layer.get_mask_sizes(3) == (tokens + 3, 0)
        if kind is INT8:
            assert layer.lengths().tolist() == [tokens] * len(sequences)
        else:
            assert torch.equal(layer.indexer_keys, indexer_keys[sequences, :tokens])

    layer.batch_repeat_interleave(2)
    check([0, 0, 1, 1, 2, 2], 10)
    layer.reorder_cache(torch.tensor([5, 0, 2]))
    check([2, 0, 1], 10)
    layer.batch_select_indices(torch.tensor([2, 0]))
    check([1, 2], 10)
    layer.crop(torch.tensor(-4))
    check([1, 2], 6)
    new = kind.states(2, 2)
    layer.update(*new)
    fresh = kind.empty()
    fresh.update(*new)
    assert torch.equal(kind.stored(layer), torch.cat([before[[1, 2], :, :6], kind.stored(fresh)], dim=2))
    with pytest.raises(ValueError, match="tokens_to_remove: got 2"):
        layer.crop(2)
    layer.reset()
    assert layer.get_seq_length() == 0


@EACH
def test_all_of_a_layer_moves(kind: Kind) -> None:
    layer = kind.layer(None, transformers_cache.Positions())
    layer.offload()  # nothing yet
    layer.update(*kind.states(1, 5))
    names = ("keys", "indexer_keys") if kind is LATENT else layer.stored
    if kind is LATENT:
        layer.update_indexer(torch.randn(1, 5, 128))
    stored = [getattr(layer, name) for name in names]
    layer.offload()
    assert all(torch.equal(getattr(layer, name), t) for name, t in zip(names, stored, strict=True))
    layer.device = torch.device("meta")
    layer.prefetch()
    assert {getattr(layer, name).device.type for name in names} == {"meta"}


# ---- what transformers calls, and is called with


INDEXED = cache_utils.DynamicIndexedLayer
LAYER = cache_utils.CacheLayerMixin
UPSTREAM: list[tuple[Callable[..., Any], tuple[str, ...]]] = [
    (transformers.AttentionInterface.register, ("key", "value")),
    (masking_utils.AttentionMaskInterface.register, ("key", "value")),
    (
        masking_utils.eager_mask,
        ("batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function", "attention_mask", "dtype"),
    ),
    (masking_utils.sdpa_mask, ("batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function")),
    (cache_utils.Cache.__init__, ("layers",)),
    (cache_utils.Cache.update, ("key_states", "value_states", "layer_idx")),
    (LAYER.lazy_initialization, ("key_states", "value_states")),
    (LAYER.get_mask_sizes, ("query_length",)),
    (LAYER.get_seq_length, ()),
    (LAYER.get_max_length, ()),
    (INDEXED.update_indexer, ("indexer_key_states",)),
    (INDEXED.lazy_initialization_indexer, ("indexer_key_states",)),
    *((base.update, ("key_states", "value_states", "args", "kwargs")) for base in (LAYER, INDEXED)),
    *((base.reset, ()) for base in (LAYER, INDEXED)),
    *((base.reorder_cache, ("beam_idx",)) for base in (LAYER, INDEXED)),
    *((base.crop, ("tokens_to_remove",)) for base in (cache_utils.DynamicLayer, INDEXED)),
    *((base.batch_repeat_interleave, ("repeats",)) for base in (cache_utils.DynamicLayer, INDEXED)),
    *((base.batch_select_indices, ("indices",)) for base in (cache_utils.DynamicLayer, INDEXED)),
]


@pytest.mark.parametrize("function, parameters", UPSTREAM, ids=lambda value: getattr(value, "__qualname__", ""))
def test_functions_of_transformers_are_where_they_were(function: Any, parameters: tuple[str, ...]) -> None:
    assert moved(inspect.unwrap(function), parameters) == [], f"transformers {transformers.__version__}"
