"""`CuteMlaCache(fp8_index=True)` keeps the indexer's keys in FP8; `index_decode` scores them in steps of few tokens."""

import copy
import importlib
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17 or later")

from transformers.cache_utils import DynamicIndexedLayer

from cute_kernels.integrations import transformers as cute
from cute_kernels.integrations import transformers_index
from cute_kernels.integrations.transformers_cache import Positions
from cute_kernels.integrations.transformers_index import IndexPages
from fp8_mla import pack_index_keys, reference_index_logits, unpack_index_keys
from tests.kit import tiny_models
from tests.kit.threads import one_thread as one_thread
from tests.kit.transformers_calls import NEW, counted, counted_on, generate
from tests.kit.transformers_calls import said as said
from tests.kit.transformers_mla import MODELS

pytestmark = pytest.mark.xdist_group("transformers")  # its small models are trained once
INDEXERS = {"deepseek_v32": 2, "glm_moe_dsa": 1}
"""Number of layers with an indexer."""


@pytest.mark.parametrize("ways", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"left": 7}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_counts_still_counts(
    name: str, ways: dict[str, Any], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model sees 24 chosen tokens of 30 to 41; padding on the left hides some of them."""
    calls = counted(monkeypatch, (transformers_index, "index_decode"), (transformers_index, "index_append"))
    batch = 1 if "prompt_lookup_num_tokens" in ways else 3
    model, ids = tiny_models.trained(name), tiny_models.sequences(11, batch, 30)
    mask = torch.ones_like(ids)
    mask[0, : ways.get("left", 0)] = 0
    cache = cute.CuteMlaCache(model.config, fp8_index=True)
    options = {way: value for way, value in ways.items() if way != "left"}
    found, _ = generate(model, "cute_mla", ids, cache, attention_mask=mask, **options)
    assert torch.equal(found, counted_on(ids)) and said == []
    steps = calls["index_append"] // INDEXERS[name]
    assert calls["index_decode"] == calls["index_append"] - INDEXERS[name] and steps <= NEW
    assert steps == NEW or "prompt_lookup_num_tokens" in ways
    assert all(layer.indexer_keys is None for layer in cache.layers)


def layer_of(name: str) -> Any:
    model = tiny_models.untrained(name, index_topk=64).eval().requires_grad_(False).bfloat16()
    indexer = model.model.layers[0].self_attn.indexer
    for i, parameter in enumerate(indexer.parameters()):
        if parameter.dim() == 2:
            parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=torch.Generator().manual_seed(i))
    return indexer


@pytest.mark.parametrize("hidden", [None, "bool", "additive"])
@pytest.mark.parametrize("name", MODELS)
def test_most_of_the_choice_is_the_models_own(name: str, hidden: str | None) -> None:
    """Our indexer and upstream's choose 64 of 600 tokens, for a prompt and for steps of one to eight tokens."""
    indexer, gen = layer_of(name), torch.Generator().manual_seed(0)
    layers = [DynamicIndexedLayer(), cute_layer(name)]
    length = 0
    for tokens in (590, 1, 3, 8):
        x, q_resid = torch.randn(2, tokens, 64, generator=gen), torch.randn(2, tokens, 64, generator=gen)
        angles = torch.rand(2, tokens, 32, generator=gen).repeat(1, 1, 2) * 6
        mask = torch.ones(2, tokens, length + tokens, dtype=torch.bool).tril(length)
        if hidden is not None:
            mask[0, :, :100] = mask[1, :, 300:310] = False
        given: Any = mask if hidden != "additive" else torch.zeros(mask.shape).masked_fill(~mask, -3e38).bfloat16()
        rope = (angles.cos().bfloat16(), angles.sin().bfloat16())
        step = (x.bfloat16(), q_resid.bfloat16(), rope, given, None)
        theirs, ours = (indexer(*step, Caches(layer)) for layer in layers)
        length += tokens
        assert ours.dtype is torch.int32 and ours.shape == theirs.shape == (2, tokens, 64)
        last = slice(-8, None)
        for a, b, seen in zip(
            ours[:, last].flatten(0, 1), theirs[:, last].flatten(0, 1), mask[:, last].flatten(0, 1), strict=True
        ):
            assert torch.isin(a, b).sum() >= 0.9 * 64 and seen[a.long()].all()
            assert tokens > 8 or (a.diff() > 0).all()
    assert layers[1].index.length == length and not torch.equal(ours, theirs.sort(-1).values)


class Caches:
    """A cache of one layer, as an indexer requests its keys."""

    def __init__(self, layer: Any) -> None:
        self.layers = [layer]

    def update_indexer(self, k: torch.Tensor, layer_idx: int) -> torch.Tensor:
        return self.layers[layer_idx].update_indexer(k)


def cute_layer(name: str) -> Any:
    return cute.CuteMlaCache(tiny_models.untrained(name).config, fp8_index=True).layers[0]


def test_the_choice_is_that_of_the_definition() -> None:
    """Keys are in FP8 already, masks are of both kinds, and the table has grown twice."""
    gen, index = torch.Generator().manual_seed(0), IndexPages(Positions())
    k = unpack_index_keys(pack_index_keys(torch.randn(3, 700, 128, generator=gen)))
    for part in k.split([250, 10, 440], dim=1):
        index.append(part)
    assert index.pages is not None and index.pages.shape[:2] == (3, 16)
    assert torch.equal(index.keys(torch.float32), k)
    q = torch.randn(3, 4, 32, 128, generator=gen)
    q /= q.abs().amax(-1, keepdim=True) / 448
    q, weights = q.to(torch.float8_e4m3fn).float(), torch.randn(3, 4, 32, generator=gen)
    mask = torch.rand(1, 4, 700, generator=gen) < 0.7
    mask[:, 3, 50:] = False
    logits = reference_index_logits(
        q.to(torch.float8_e4m3fn), weights, index.pages.flatten(0, 1),
        block_table=torch.arange(48, dtype=torch.int32).view(3, 16), cache_seqlens=torch.full((3, 4), 700),
    )[..., :700].masked_fill(~mask, -torch.inf)  # fmt: skip
    expected = logits.sort(dim=-1, descending=True, stable=True).indices[..., :100].sort(-1).values.int()
    assert torch.equal(index.choose(q, weights, mask, 100), expected)
    additive = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    assert torch.equal(index.choose(q, weights, additive, 100), expected)


def test_sequences_and_tokens_of_the_cache_keep_their_keys() -> None:
    layer, gen = cute_layer("deepseek_v32"), torch.Generator().manual_seed(0)
    k = unpack_index_keys(pack_index_keys(torch.randn(3, 80, 128, generator=gen)))
    latents = torch.randn(3, 1, 80, 576, generator=gen).bfloat16().split([512, 64], dim=-1)
    layer.update(*latents)
    assert torch.equal(layer.update_indexer(k), k)
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    k = k[[2, 0, 0]]
    assert torch.equal(layer.index.keys(torch.float32), k)
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([1, 4]))
    assert torch.equal(layer.index.keys(torch.float32), k[[0, 2]])
    copied = copy.deepcopy(layer)
    layer.crop(-30)
    assert layer.index.length == 50 and torch.equal(layer.index.keys(torch.float32), k[[0, 2], :50])
    assert torch.equal(copied.index.keys(torch.float32), k[[0, 2]])
    layer.offload()
    layer.prefetch()
    assert torch.equal(layer.index.keys(torch.float32), k[[0, 2], :50])
    layer.reset()
    assert layer.index.length == 0
    layer.update(*(t[:1] for t in latents))
    assert torch.equal(layer.update_indexer(k[:1, :5]), k[:1, :5])


def test_max_length_is_allocated_once() -> None:
    index = IndexPages(Positions(), max_length=500)
    index.append(torch.randn(1, 3, 128))
    assert index.pages is not None
    before = index.pages.data_ptr()
    index.append(torch.randn(1, 497, 128))
    assert index.pages.shape == (1, 8, 64, 132) and index.pages.data_ptr() == before


@pytest.mark.parametrize("sizes", [{"index_n_heads": 4}, {"index_head_dim": 64}, {"index_topk": 4096}], ids=str)
def test_indexers_of_other_sizes_are_refused(sizes: dict[str, int]) -> None:
    config = tiny_models.untrained("deepseek_v32", **sizes).config
    ((name, value),) = sizes.items()
    with pytest.raises(ValueError, match=f"config: got .*{name} {value}.*fp8_index needs one of 16, 32, 64, 128"):
        cute.CuteMlaCache(config, fp8_index=True)
    cute.CuteMlaCache(config)


@pytest.mark.parametrize("name", MODELS)
def test_an_indexer_is_changed_once(name: str) -> None:
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    (cls,) = (getattr(modeling, indexer) for indexer in transformers_index.INDEXERS if hasattr(modeling, indexer))
    forward = cls.forward
    transformers_index.index_by_pages(modeling)
    assert cls.forward is forward and not hasattr(forward.__wrapped__, transformers_index.CHANGED)
    assert hasattr(modeling, transformers_index.INDEXERS[cls.__name__])
