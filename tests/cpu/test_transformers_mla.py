"""`attn_implementation="cute_mla"` and `CuteMlaCache` give the tokens of eager attention over the same FP8 latents."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17 or later")


import fp8_mla
from cute_kernels.integrations import transformers as cute
from cute_kernels.integrations import transformers_cache, transformers_mla
from tests.kit import tiny_models
from tests.kit.threads import one_thread as one_thread
from tests.kit.transformers_calls import NEW, counted, counted_on, generate
from tests.kit.transformers_calls import said as said
from tests.kit.transformers_mla import CACHES_LATENTS, MODELS, eager, fp8_latents

pytestmark = pytest.mark.xdist_group("transformers")  # its small models are trained once
TYPICAL = 0.012
"""What rounding to bfloat16 changes in logits at most, relative; FP8 latents change more."""
"""Whether transformers caches latents for other implementations: 5.23 and 5.24 do, 5.17 caches keys and values."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Number of calls of each operator and of methods of the cache."""
    ops = [(transformers_mla, name) for name in ("mla_fp8_append", "mla_fp8_decode")]
    return counted(monkeypatch, *ops, *((transformers_mla.CuteMlaLayer, name) for name in ("crop", "reorder_cache")))


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def typical(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The median of tokens' distances. If two scores of the indexer are close, rounding changes its choice."""
    return ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median().item()


# ---- the same tokens


@pytest.mark.parametrize("tokens", [12, 30])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_eager_attention(name: str, tokens: int, said: list[str], calls: dict[str, int]) -> None:
    model, ids = tiny_models.trained(name), tiny_models.sequences(2000 + tokens, 4, tokens)
    expected, expected_logits = eager(name, model, ids)
    assert torch.equal(expected, counted_on(ids)), "the model has learned nothing to compare"
    _, unquantized_logits = generate(model, "eager", ids)
    assert calls == {}
    found, logits = generate(model, "cute_mla", ids, cute.CuteMlaCache(model.config))
    assert torch.equal(found, expected)
    assert said == [], "plain torch ran"
    assert calls == {"mla_fp8_append": 2 * NEW, "mla_fp8_decode": 2 * NEW}
    assert typical(logits, expected_logits) < TYPICAL
    assert typical(logits, expected_logits) < 0.8 * typical(logits, unquantized_logits)


@pytest.mark.parametrize("name", MODELS)
def test_it_matters_what_the_indexer_chooses(name: str) -> None:
    """If the choice did not matter, the tests above would pass for an attention to all tokens."""
    model, ids = tiny_models.trained(name), tiny_models.sequences(2030, 4, 30)
    _, chosen = eager(name, model, ids)
    indexers = [m for m in model.modules() if hasattr(m, "index_topk")]
    try:
        for indexer in indexers:
            indexer.index_topk = 64
        _, dense = eager(name, model, ids)
    finally:
        for indexer in indexers:
            indexer.index_topk = tiny_models.TOPK
    assert indexers and typical(dense, chosen) > 10 * TYPICAL


def padded(batch: int, tokens: int, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences and their mask; the first has 7 tokens of padding."""
    ids, mask = tiny_models.sequences(11, batch, tokens), torch.ones(batch, tokens, dtype=torch.int64)
    hidden = slice(0, 7) if left else slice(tokens - 7, None)
    ids[0, hidden], mask[0, hidden] = 0, 0
    return ids, mask


@pytest.mark.parametrize("name", MODELS)
def test_padding_on_the_left(name: str, said: list[str], calls: dict[str, int]) -> None:
    model, (ids, mask) = tiny_models.trained(name), padded(3, 20, left=True)
    expected, expected_logits = eager(name, model, ids, attention_mask=mask)
    found, logits = generate(model, "cute_mla", ids, cute.CuteMlaCache(model.config), attention_mask=mask)
    assert torch.equal(found, expected) and torch.equal(found, counted_on(ids))
    assert said == [] and calls["mla_fp8_decode"] == 2 * NEW
    assert typical(logits, expected_logits) < TYPICAL


def forward(model: Any, attention: str, ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> Any:
    model.set_attn_implementation(attention)
    try:
        with torch.no_grad():
            return model(ids, attention_mask=mask, **options).logits.float()
    finally:
        model.set_attn_implementation("eager")


@pytest.mark.parametrize("name", MODELS)
def test_padding_on_the_right(name: str, said: list[str]) -> None:
    model, (ids, mask) = tiny_models.trained(name), padded(3, 24, left=False)
    with fp8_latents(name):
        expected = forward(model, "eager", ids, mask)
    found = forward(model, "cute_mla", ids, mask, past_key_values=cute.CuteMlaCache(model.config))
    seen = mask.bool()
    assert typical(found[seen], expected[seen]) < TYPICAL and said == []


@pytest.mark.parametrize("additive", [False, True], ids=["bool", "additive"])
def test_a_mask_of_the_caller(additive: bool, said: list[str]) -> None:
    """The mask hides every fourth key besides future ones; all sequences share it."""
    model, ids = tiny_models.trained("deepseek_v32"), tiny_models.sequences(13, 3, 24)
    seen = torch.ones(24, 24, dtype=torch.bool).tril() & (torch.arange(24) % 4 != 1)
    mask = torch.zeros(1, 1, 24, 24).masked_fill(~seen, torch.finfo(torch.bfloat16).min).bfloat16()
    with fp8_latents("deepseek_v32"):
        expected = forward(model, "eager", ids, mask)
    given = mask if additive else seen[None, None]
    found = forward(model, "cute_mla", ids, given, past_key_values=cute.CuteMlaCache(model.config))
    assert typical(found, expected) < TYPICAL and said == []
    causal = forward(model, "cute_mla", ids, past_key_values=cute.CuteMlaCache(model.config))
    assert typical(causal, expected) > 10 * TYPICAL


def test_turns_of_a_conversation(said: list[str]) -> None:
    """A prompt comes first, then 12 tokens at once, 5 at once, and one by one."""
    model, ids = tiny_models.trained("deepseek_v32"), tiny_models.sequences(7, 3, 40)
    cache = cute.CuteMlaCache(model.config)
    parts = [forward(model, "cute_mla", part, past_key_values=cache) for part in ids.split([15, 12, 5, 1, 1, 6], dim=1)]
    with fp8_latents("deepseek_v32"):
        expected = forward(model, "eager", ids)
    assert typical(torch.cat(parts, 1), expected) < TYPICAL
    assert cache.get_seq_length() == 40 and said == []


# ---- the attention function, with the sizes of GLM-5


class Sizes:
    """Sizes that determine the shapes of a call."""

    heads, nope, v_head_dim, tokens, s_q, topk = 8, 192, 256, 90, 5, 20


def glm_attention(dtype: torch.dtype, **more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"num_attention_heads": Sizes.heads, "qk_nope_head_dim": Sizes.nope, "v_head_dim": Sizes.v_head_dim}
    model = tiny_models.untrained("glm_moe_dsa", **{"num_key_value_heads": Sizes.heads, **sizes, **more})
    model.set_attn_implementation("cute_mla")
    return model.model.layers[0].self_attn.to(dtype).eval().requires_grad_(False)


def call_of(module: Any, dtype: torch.dtype, **changes: Any) -> dict[str, Any]:
    """Arguments of a call. Queries are the last tokens of their sequences, and one sequence is padded on the left."""
    torch.manual_seed(1)
    layer = transformers_mla.CuteMlaLayer(module.config, transformers_cache.Positions())
    states = torch.randn(2, 1, Sizes.tokens, 576).to(dtype)
    key, value = layer.update(*states.split([512, 64], dim=-1))
    position = torch.arange(Sizes.tokens)
    seen = position <= position[-Sizes.s_q :].unsqueeze(1)
    mask = torch.stack([seen, seen & (position >= 40)]).unsqueeze(1)
    indices = torch.rand(2, Sizes.s_q, Sizes.tokens).argsort(-1)[..., : Sizes.topk].int()
    query = torch.randn(2, Sizes.heads, Sizes.s_q, Sizes.nope + 64).to(dtype)
    given = {
        "query": query, "key": key, "value": value, "attention_mask": mask, "indices": indices, "scaling": 0.11,
        "dropout": 0.0,
    }  # fmt: skip
    return given | changes


def exact(module: Any, given: dict[str, Any], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Attention to the latents of the cache that mask and indices leave."""
    layer = getattr(given["key"], transformers_mla.LAYER)
    kv = fp8_mla.unpack(layer.keys[:, : layer.length], torch.float64).to(dtype)
    w = module.kv_b_proj.weight.to(dtype).view(Sizes.heads, -1, 512)
    k = torch.einsum("btc,hnc->bhtn", kv[..., :512], w[:, : Sizes.nope])
    k = torch.cat([k, kv[:, None, :, 512:].expand(-1, Sizes.heads, -1, -1)], dim=-1)
    v = torch.einsum("btc,hvc->bhtv", kv[..., :512], w[:, Sizes.nope :])
    chosen = torch.zeros(2, Sizes.s_q, Sizes.tokens, dtype=torch.bool).scatter(-1, given["indices"].long(), True)
    seen = chosen.unsqueeze(1) & given["attention_mask"]
    scores = (given["query"].to(dtype) @ k.transpose(2, 3)) * given["scaling"]
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (weights @ v).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_it_is_as_exact_as_plain_torch(dtype: torch.dtype, said: list[str]) -> None:
    module = glm_attention(dtype)
    given = call_of(module, dtype)
    out, weights = transformers_mla.cute_mla_attention(module, **given)
    expected = exact(module, given)
    plain = exact(module, given, torch.bfloat16)
    assert weights is None and out.dtype is dtype and out.shape == (2, Sizes.s_q, Sizes.heads, Sizes.v_head_dim)
    assert 0 < distance(plain.double(), expected) < 0.02
    assert distance(out.double(), expected) < 1.5 * distance(plain.double(), expected)
    assert said == []


def test_queries_without_keys_get_0() -> None:
    module = glm_attention(torch.bfloat16)
    given = call_of(module, torch.bfloat16)
    given["attention_mask"][1, :, 2] = False
    out, _ = transformers_mla.cute_mla_attention(module, **given)
    zero = (out == 0).flatten(2).all(-1)
    assert zero.tolist() == [[False] * 5, [False, False, True, False, False]]


def test_a_growing_context_plans_the_kernel_once_in_64_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[Any] = []

    def decode(q: torch.Tensor, pages: torch.Tensor, *, indices: torch.Tensor, softmax_scale: float) -> torch.Tensor:
        widths.append(tuple(indices.shape))
        return q[..., :512]

    monkeypatch.setattr(transformers_mla, "mla_fp8_decode", decode)
    module = glm_attention(torch.bfloat16)
    for topk in (1, 64, 65):
        indices = torch.zeros(2, Sizes.s_q, topk, dtype=torch.int32)
        transformers_mla.cute_mla_attention(module, **call_of(module, torch.bfloat16, indices=indices))
    assert widths == [(2, 5, 64), (2, 5, 64), (2, 5, 128)]


# ---- what falls back


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_without_our_cache_it_is_eager_attention(name: str, use_cache: bool, said: list[str]) -> None:
    model, (ids, mask) = tiny_models.trained(name), padded(3, 20, left=True)
    expected, expected_logits = generate(model, "eager", ids, attention_mask=mask, use_cache=use_cache)
    found, logits = generate(model, "cute_mla", ids, attention_mask=mask, use_cache=use_cache)
    assert torch.equal(found, expected)
    torch.testing.assert_close(logits, expected_logits)
    assert {reason.partition(":")[0] for reason in said} == {"another cache than CuteMlaCache, or none"}


def test_float32_without_our_cache_is_eager_attention(said: list[str]) -> None:
    model = tiny_models.untrained("deepseek_v32").eval()
    ids = tiny_models.sequences(3, 2, 24)
    torch.testing.assert_close(forward(model, "cute_mla", ids), forward(model, "eager", ids))
    assert said


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_eager_attention(name: str, said: list[str]) -> None:
    ids = tiny_models.sequences(5, 2, 24)

    def gradients(attention: str) -> list[torch.Tensor]:
        model = tiny_models.untrained(name).train()
        model.set_attn_implementation(attention)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        layer = model.model.layers[0].self_attn
        return [t.grad for t in (layer.q_b_proj.weight, layer.kv_b_proj.weight, layer.kv_a_proj_with_mqa.weight)]

    for found, expected in zip(gradients("cute_mla"), gradients("eager"), strict=True):
        assert expected.abs().max() > 0
        torch.testing.assert_close(found, expected)
    assert said


class Quantized(torch.nn.Linear):
    """A projection that does not compute with `weight` alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def with_kv_b_proj(make: Callable[[Any], Any]) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        module.kv_b_proj = make(module.kv_b_proj)

    return change


def quantized(linear: Any) -> Any:
    other = Quantized(linear.in_features, linear.out_features, bias=False).to(linear.weight.dtype)
    other.load_state_dict(linear.state_dict())
    return other.requires_grad_(False)


def with_bias(linear: Any) -> Any:
    linear.bias = torch.nn.Parameter(torch.ones(linear.out_features, dtype=linear.weight.dtype), requires_grad=False)
    return linear


def nothing(module: Any) -> None: ...


def biased_mask() -> torch.Tensor:
    """A mask that lowers the scores of distant keys and hides none."""
    return -0.1 * torch.arange(Sizes.tokens).flip(0).expand(2, 1, Sizes.s_q, -1).bfloat16()


@pytest.mark.parametrize(
    "change, changes, words",
    [
        (with_kv_b_proj(quantized), {}, "kv_b_proj: got Quantized with a weight of torch.bfloat16; the kernel needs"),
        (with_kv_b_proj(with_bias), {}, "kv_b_proj: got Linear with a weight of torch.bfloat16; the kernel needs"),
        (lambda module: module.kv_b_proj.requires_grad_(True), {}, "gradients: the kernel has no backward"),
        (nothing, {"attention_mask": biased_mask()}, "attention_mask: a bias of scores"),
        (
            nothing,
            {"attention_mask": torch.ones(2, Sizes.heads, Sizes.s_q, Sizes.tokens, dtype=torch.bool)},
            "attention_mask: got one for each of 8 heads",
        ),
    ],
    ids=["quantized", "bias", "gradients", "biased mask", "mask of heads"],
)
def test_other_calls_over_our_cache_are_eager_attention(
    change: Callable[[Any], None], changes: dict[str, Any], words: str, said: list[str]
) -> None:
    module = glm_attention(torch.bfloat16)
    change(module)
    given = call_of(module, torch.bfloat16, **changes)
    out, _ = transformers_mla.cute_mla_attention(module, **given)
    assert len(said) == 1 and said[0].startswith(words)
    layer, mask = getattr(given["key"], transformers_mla.LAYER), given["attention_mask"]
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    chosen = torch.zeros(2, Sizes.s_q, Sizes.tokens, dtype=torch.bool).scatter(-1, given["indices"].long(), True)
    kv = layer.latents(torch.bfloat16)
    expand = getattr(type(module).expand_kv, transformers_mla.ORIGINAL)
    k, v = (t.double() for t in expand(module, *kv))
    scores = given["query"].double() @ k.transpose(2, 3) * given["scaling"] + mask
    weights = scores.masked_fill(~chosen.unsqueeze(1), -torch.inf).softmax(-1)
    assert distance(out.double(), (weights @ v).transpose(1, 2)) < 0.02


def test_more_heads_than_a_kernel_has_fall_back(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    module = glm_attention(torch.bfloat16)
    given = call_of(module, torch.bfloat16)
    expected, _ = transformers_mla.cute_mla_attention(module, **given)
    monkeypatch.setattr(transformers_mla, "MAX_MLA_HEADS", 4)
    out, _ = transformers_mla.cute_mla_attention(module, **given)
    assert said == ["8 heads: the kernel takes up to 4"]
    assert distance(out.float(), expected.float()) < 0.02


def test_dropout_runs_in_plain_torch(said: list[str]) -> None:
    module = glm_attention(torch.bfloat16).train()
    given = call_of(module, torch.bfloat16)
    whole, _ = transformers_mla.cute_mla_attention(module, **given)
    assert said == []
    outs = torch.stack([transformers_mla.cute_mla_attention(module, **{**given, "dropout": 0.5})[0] for _ in range(64)])
    assert {*said} == {"dropout 0.5: there is none in the kernel"}
    assert not torch.equal(outs[0], outs[1])
    assert distance(outs.float().mean(0), whole.float()) < 0.3


# ---- what is refused


def test_refusals_in_words() -> None:
    module = glm_attention(torch.bfloat16)
    given = call_of(module, torch.bfloat16)
    with pytest.raises(ValueError, match="cache: got object; needs None"):
        transformers_mla.cute_mla_attention(module, **given, cache=object())
    module.kv_lora_rank = 256
    with pytest.raises(ValueError, match="module: got kv_lora_rank 256 and qk_rope_head_dim 64; needs 512 and 64"):
        transformers_mla.cute_mla_attention(module, **given)


def test_other_models_are_refused() -> None:
    model = tiny_models.untrained("llama").bfloat16()
    with pytest.raises(ValueError, match="module: got LlamaAttention; needs DeepseekV32Attention or GlmMoeDsaAtt"):
        forward(model, "cute_mla", tiny_models.sequences(3, 2, 8))


@pytest.mark.parametrize(
    "name, sizes, words",
    [
        ("llama", {}, "config: got model_type 'llama'; needs deepseek_v32 or glm_moe_dsa"),
        ("deepseek_v32", {"kv_lora_rank": 256}, "config: got kv_lora_rank 256 and qk_rope_head_dim 64; needs 512"),
        ("glm_moe_dsa", {"qk_rope_head_dim": 32}, "config: got kv_lora_rank 512 and qk_rope_head_dim 32; needs 512"),
    ],
)
def test_configurations_of_other_models_are_refused(name: str, sizes: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cute.CuteMlaCache(tiny_models.untrained(name, **sizes).config)


def test_gradients_do_not_go_through_the_cache() -> None:
    model = tiny_models.untrained("deepseek_v32").bfloat16()
    model.set_attn_implementation("cute_mla")
    with pytest.raises(ValueError, match="mla_fp8_append"):
        model(tiny_models.sequences(3, 2, 8), past_key_values=cute.CuteMlaCache(model.config))


def test_float32_latents_are_refused() -> None:
    model = tiny_models.untrained("deepseek_v32")
    with pytest.raises(ValueError, match="key_states: got torch.float32; needs torch.bfloat16 or torch.float16"):
        forward(model, "cute_mla", tiny_models.sequences(3, 2, 8), past_key_values=cute.CuteMlaCache(model.config))


def test_another_attention_over_our_cache(said: list[str]) -> None:
    """In 5.23 and 5.24 it gets the latents; the keys of 5.17 are refused."""
    model, ids = tiny_models.trained("deepseek_v32"), tiny_models.sequences(23, 2, 20)
    cache = cute.CuteMlaCache(model.config)
    if not CACHES_LATENTS:
        with pytest.raises(ValueError, match='key_states: got shape .2, 4, 20, 128.; needs latents.*"cute_mla"'):
            generate(model, "eager", ids, cache)
        return
    expected, expected_logits = eager("deepseek_v32", model, ids)
    found, logits = generate(model, "eager", ids, cache)
    assert torch.equal(found, expected) and torch.equal(logits, expected_logits) and said == []
