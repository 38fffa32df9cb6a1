"""`attn_implementation="cute"` and `CuteInt8Cache` in models of transformers give the tokens of eager attention."""

import inspect
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17 or later")

import transformers
from transformers import cache_utils, masking_utils
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

from cute_kernels.gqa.codes import KINDS
from cute_kernels.gqa.reference import reference_gqa_decode
from cute_kernels.integrations import transformers as cute
from cute_kernels.integrations import transformers_cache
from tests.kit import tiny_models
from tests.kit.accuracy_table import int8_error
from tests.kit.threads import one_thread as one_thread
from tests.kit.transformers_calls import NEW, counted, counted_on, generate, keywords_of_calls, moved
from tests.kit.transformers_calls import said as said

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.xdist_group("transformers")  # its small models are trained once


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    ops = [(cute, "gqa_decode"), (cute, "sink_attention"), (transformers_cache, "kv_append")]
    return counted(monkeypatch, *ops)


# ---- the same tokens


@pytest.mark.parametrize("int8", [False, True], ids=["bfloat16", "int8"])
@pytest.mark.parametrize("tokens", [5, 12, 30])
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_tokens_are_those_of_eager_attention(
    name: str, tokens: int, int8: bool, said: list[str], kernels: dict[str, int]
) -> None:
    model, ids = tiny_models.trained(name), tiny_models.sequences(1000 + tokens, 4, tokens)
    expected, expected_logits = generate(model, "eager", ids)
    assert torch.equal(expected, counted_on(ids)), "the model has learned nothing to compare"
    assert kernels == {} and said == []
    cache = cute.CuteInt8Cache(model.config) if int8 else None
    found, logits = generate(model, "cute", ids, cache)
    assert torch.equal(found, expected)
    assert said == [], "plain torch ran"
    layers = model.config.num_hidden_layers
    prefill = "gqa_decode" if tokens <= 8 else "sink_attention"
    assert kernels.pop("kv_append", 0) == (layers * NEW if int8 else 0)
    assert kernels.pop(prefill) + kernels.pop("gqa_decode", 0) == layers * NEW and kernels == {}
    assert (logits - expected_logits).norm() < int8_error() * expected_logits.norm()


@pytest.mark.skipif(not hasattr(transformers, "Gemma4TextConfig"), reason="this transformers has no Gemma 4")
@pytest.mark.parametrize("int8", [False, True], ids=["bfloat16", "int8"])
@pytest.mark.parametrize("tokens", [5, 30])
def test_global_layers_of_gemma_4_decode_on_the_kernels(
    tokens: int, int8: bool, said: list[str], kernels: dict[str, int]
) -> None:
    """Heads are 256 wide with a window, then 512. Longer prompts have no kernel, which each layer reports once."""
    model, ids = tiny_models.trained("gemma4"), tiny_models.sequences(1000 + tokens, 4, tokens)
    expected, _ = generate(model, "eager", ids)
    assert torch.equal(expected, counted_on(ids)), "the model has learned nothing to compare"
    found, _ = generate(model, "cute", ids, cute.CuteInt8Cache(model.config) if int8 else None)
    assert torch.equal(found, expected)
    prompts = 0 if tokens <= 8 else 2
    assert kernels["gqa_decode"] == 2 * NEW - prompts
    assert [words for words in said if "more than 8 query tokens" not in words] == [] and len(said) == prompts


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt_oss"])
def test_logits_are_as_exact_as_those_of_eager_attention(name: str, said: list[str]) -> None:
    """Float32 is the oracle, and eager attention in bfloat16 the measure, for a prompt and then token by token."""
    exact, rounded = tiny_models.untrained(name).eval(), tiny_models.untrained(name).bfloat16().eval()
    exact.load_state_dict(rounded.state_dict())
    ids = tiny_models.sequences(3, 2, 40)

    def logits(model: Any, attention: str) -> torch.Tensor:
        model.set_attn_implementation(attention)
        cache = cache_utils.DynamicCache(config=model.config)
        with torch.no_grad():
            parts = [model(ids[:, :20], past_key_values=cache).logits]
            parts += [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(20, 36)]
            parts += [model(ids[:, 36:], past_key_values=cache).logits]
        return torch.cat(parts, 1).float()

    oracle = logits(exact, "eager")
    allowed = 1.5 * (logits(rounded, "eager") - oracle).norm()
    assert 0 < allowed < 0.1 * oracle.norm()
    assert (logits(rounded, "cute") - oracle).norm() <= allowed
    reasons = {reason.partition(" ")[0] for reason in said}
    assert reasons == ({"softcap"} if name == "gemma2" else set())  # of Gemma's prompt


def test_gradients_are_as_exact_as_those_of_eager_attention(said: list[str]) -> None:
    ids = tiny_models.sequences(5, 2, 24)

    def gradients(attention: str, dtype: torch.dtype) -> list[torch.Tensor]:
        model = tiny_models.untrained("gpt_oss").bfloat16().to(dtype).train()
        model.set_attn_implementation(attention)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        layer = model.model.layers[0].self_attn
        return [t.grad.float() for t in (layer.q_proj.weight, layer.k_proj.weight, layer.sinks)]

    oracle, rounded = gradients("eager", torch.float32), gradients("eager", torch.bfloat16)
    for found, near, exact in zip(gradients("cute", torch.bfloat16), rounded, oracle, strict=True):
        assert 0 < (near - exact).norm() < 0.2 * exact.norm()
        assert (found - exact).norm() <= 1.5 * (near - exact).norm()
    assert said == []


def test_turns_of_a_conversation_over_one_int8_cache(said: list[str]) -> None:
    """A prompt comes first, then 12 tokens at once (all keys dequantized), 5 at once, and one by one."""
    model = tiny_models.trained("gpt_oss")
    ids = tiny_models.sequences(7, 3, 40)
    model.set_attn_implementation("cute")
    try:
        cache = cute.CuteInt8Cache(model.config)
        with torch.no_grad():
            parts = [model(part, past_key_values=cache).logits for part in ids.split([15, 12, 5, 1, 1, 6], dim=1)]
            model.set_attn_implementation("eager")
            expected = model(ids).logits.float()
    finally:
        model.set_attn_implementation("eager")
    found = torch.cat(parts, 1).float()
    assert (found - expected).norm() < int8_error() * expected.norm()
    assert cache.get_seq_length() == 40 and said == []


def test_int8_costs_what_the_table_says() -> None:
    """Attention over the layer's codes against attention over what was stored, with scores of standard deviation 3."""
    torch.manual_seed(0)
    config = type("Config", (), {"_attn_implementation": "cute"})()
    layer = transformers_cache.CuteInt8Layer(config, transformers_cache.Positions())
    k, v = torch.randn(2, 2, 8, 300, 128).bfloat16()
    q = 3 * torch.randn(2, 32, 1, 128).bfloat16()
    layer.update(k[:, :, :299], v[:, :, :299])
    codes, values = layer.update(k[:, :, 299:], v[:, :, 299:])
    assert codes.dtype is torch.int8
    out, _ = cute.cute_attention(torch.nn.Module(), q, codes, values, None)
    exact, _ = reference_gqa_decode(
        q.transpose(1, 2).double(), k.double(), v.double(), None, None, layout="BNSH", cache_seqlens=None,
        block_table=None, causal=True, window=None, softcap=None, alibi_slopes=None, s_aux=None, softmax_scale=None,
    )  # fmt: skip
    error = ((out.double() - exact).norm() / exact.norm()).item()
    assert 0.2 * int8_error() < error < 1.1 * int8_error()


# ---- what no kernel computes


@pytest.mark.parametrize("int8", [False, True], ids=["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_unequal_prompts_stay_on_the_kernels(name: str, int8: bool, said: list[str], kernels: dict[str, int]) -> None:
    """Prompts are padded on the left, one of them by more than a window, and give the tokens of eager attention."""
    model, ids = tiny_models.trained(name), tiny_models.sequences(11, 4, 30)
    mask = torch.ones_like(ids)
    for row, pads in enumerate((6, 0, 25, 1)):
        mask[row, :pads] = 0
    expected, expected_logits = generate(model, "eager", ids, attention_mask=mask)
    cache = cute.CuteInt8Cache(model.config) if int8 else None
    found, logits = generate(model, "cute", ids, cache, attention_mask=mask)
    assert torch.equal(found, expected) and torch.equal(found[:2], counted_on(ids)[:2])
    assert said == [], "plain torch ran"
    assert kernels["gqa_decode"] == model.config.num_hidden_layers * (NEW - 1)
    assert (logits - expected_logits).norm() < int8_error() * expected_logits.norm()


@pytest.mark.parametrize(("kind", "lost"), [("int8_k_int4_v", 0.1), ("int4", 0.3)])
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_tokens_over_4_bit_codes_are_those_of_eager_attention(
    name: str, kind: str, lost: float, said: list[str]
) -> None:
    """Another attention may also continue with the cache, which it reads dequantized."""
    model, ids = tiny_models.trained(name), tiny_models.sequences(77, 4, 30)
    for attention in ("cute", "eager"):
        cache = cute.CuteInt8Cache(model.config, kind=kind)
        found, logits = generate(model, attention, ids, cache)
        assert torch.equal(found, counted_on(ids))
        assert [t.dtype for t in (cache.layers[0].keys, cache.layers[0].values)] == [
            getattr(torch, name) for name in KINDS[kind]
        ]
    _, expected_logits = generate(model, "eager", ids)
    assert said == [] and (logits - expected_logits).norm() < lost * expected_logits.norm()


def test_masks_of_a_step_after_padding() -> None:
    """The mask is each row's first key if all padding comes first. What a window or another mask hides stays hidden."""
    call: dict[str, Any] = {"q_length": 2, "kv_length": 12, "q_offset": 10, "allow_is_causal_skip": True}
    call |= {"mask_function": masking_utils.causal_mask_function, "batch_size": 3, "dtype": torch.bfloat16}
    visible = torch.ones(3, 12, dtype=torch.bool)
    visible[0, :4], visible[2, :] = False, False

    def mask(**changes: Any) -> Any:
        return cute.cute_mask(**{**call, **changes}, attention_mask=visible)

    assert mask().tolist() == [[4], [0], [12]]
    cropped = mask(kv_length=8, kv_offset=4)
    assert cropped.tolist() == [[0], [0], [8]]
    for changes in ({"allow_is_causal_skip": False}, {"q_length": 9, "q_offset": 3}):
        assert mask(**changes).dim() == 4
    visible[1, 5] = False
    assert mask().dim() == 4, "padding among tokens"


@pytest.mark.parametrize("int8", [False, True], ids=["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_other_padding_runs_in_plain_torch(name: str, int8: bool, said: list[str]) -> None:
    """Padding lies among the tokens, as in a conversation with padded turns."""
    model, ids = tiny_models.trained(name), tiny_models.sequences(11, 3, 20)
    mask = torch.ones_like(ids)
    mask[0, 3:9] = 0
    expected, expected_logits = generate(model, "eager", ids, attention_mask=mask)
    cache = cute.CuteInt8Cache(model.config) if int8 else None
    found, logits = generate(model, "cute", ids, cache, attention_mask=mask)
    assert torch.equal(found, expected) and torch.equal(found, counted_on(ids))
    assert {reason.partition(":")[0] for reason in said} == {"attention_mask"}
    assert (logits - expected_logits).norm() < int8_error() * expected_logits.norm()


def call(**changes: Any) -> cute._Request:
    """A call that kernels take, except for its changes."""
    torch.manual_seed(0)
    s_q, d = changes.pop("s_q", 3), changes.pop("d", 64)
    dtype = changes.pop("dtype", torch.bfloat16)
    q = torch.randn(2, 4, s_q, d).to(dtype)
    k, v = torch.randn(2, 2, 2, 20, d).to(dtype)
    given = cute._Request(q, k, v, None, d**-0.5, True, None, None, None, 0.0)
    return given._replace(**changes)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"mask": torch.zeros(2, 1, 3, 20)}, "attention_mask: padding"),
        ({"dropout": 0.1}, "dropout 0.1"),
        ({"dtype": torch.float32}, "queries of torch.float32"),
        ({"d": 80}, "head dimensions 80 and 80 with up to 8 query tokens"),
        ({"d": 256, "s_q": 9}, "head dimensions 256 and 256 with more than 8 query tokens"),
        ({"softcap": 30.0, "s_q": 9}, "softcap with more than 8 query tokens"),
        ({"q": torch.empty(2, 4, 3, 64, dtype=torch.bfloat16, device="meta")}, "device meta"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_reason_says_what_no_kernel_takes(changes: dict[str, Any], words: str) -> None:
    reason = cute.refusal(call(**changes))
    assert reason is not None and reason.startswith(words)


def test_kernels_take_the_rest() -> None:
    for changes in ({}, {"d": 256}, {"softcap": 30.0}, {"d": 128, "s_q": 9}):
        assert cute.refusal(call(**changes)) is None


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("causal, window", [(True, None), (True, 4), (False, None)])
def test_plain_torch_computes_what_kernels_do(
    causal: bool, window: int | None, sinks: bool, softcap: float | None
) -> None:
    s_aux = torch.tensor([0.5, -1.0, 2.0, -torch.inf]) if sinks else None
    given = call(causal=causal, window=window, softcap=softcap, s_aux=s_aux, dtype=torch.float32)
    expected, _ = reference_gqa_decode(
        given.q.transpose(1, 2), given.k, given.v, None, None, layout="BNSH", cache_seqlens=None, block_table=None,
        causal=causal, window=window, softcap=softcap, alibi_slopes=None, s_aux=s_aux, softmax_scale=given.scaling,
    )  # fmt: skip
    torch.testing.assert_close(cute.plain_attention(given), expected.float(), rtol=1e-5, atol=1e-5)


def test_a_warning_comes_once() -> None:
    transformers_cache.say_once.cache_clear()
    module = torch.nn.Module()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            given = call(dtype=torch.float32)
            out, weights = cute.cute_attention(module, given.q, given.k, given.v, None)
    assert [str(w.message) for w in seen] == [
        '"cute" attention runs in plain torch for queries of torch.float32: kernels take bfloat16 and float16'
    ]
    assert out.shape == (2, 3, 4, 64) and weights is None


@pytest.mark.parametrize("changes", [{"softcap": 20.0}, {"d": 256}, {"d": 80}])
def test_reasons_name_no_number_of_tokens(changes: dict[str, Any]) -> None:
    """A server warns once, whatever the lengths of its prompts."""
    d, softcap = changes.get("d", 64), changes.get("softcap")
    reasons = set()
    for tokens in range(9, 40):
        q, k = torch.zeros(1, 2, tokens, d).bfloat16(), torch.zeros(1, 1, tokens, d).bfloat16()
        reasons.add(cute.refusal(call(softcap=softcap)._replace(q=q, k=k, v=k)))
    (reason,) = reasons
    assert reason is not None and "more than 8 query tokens" in reason


def test_refusals_in_words() -> None:
    given, module = call(), types.SimpleNamespace()
    with pytest.raises(ValueError, match="cache: got object"):
        cute.cute_attention(module, given.q, given.k, given.v, None, cache=object())
    with pytest.raises(ValueError, match="key: got int8 codes without scales"):
        cute.cute_attention(module, given.q, given.k.to(torch.int8), given.v, None)
    module.layer_idx = 1
    module.config = types.SimpleNamespace(layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(ValueError, match="sliding_window: got None from layer 1"):
        cute.cute_attention(module, given.q, given.k, given.v, None)
    cute.cute_attention(module, given.q, given.k, given.v, None, sliding_window=4)


# ---- masks


def mask_of(**changes: Any) -> torch.Tensor | None:
    """The mask for the last 3 of 12 tokens, called as transformers does."""
    given = {
        "batch_size": 2, "q_length": 3, "kv_length": 12, "q_offset": 9, "kv_offset": 0,
        "mask_function": masking_utils.causal_mask_function, "attention_mask": None, "allow_is_causal_skip": True,
        "dtype": torch.float32, "use_vmap": False, "device": "cpu",
    } | changes  # fmt: skip
    return cute.cute_mask(**given)


WINDOW_OF_4 = {"mask_function": masking_utils.sliding_window_causal_mask_function(4), "local_size": 4}
CHUNKS_OF_4 = {"mask_function": masking_utils.chunked_causal_mask_function(4, torch.zeros(2)), "local_size": 4}
PADDED = torch.ones(2, 12, dtype=torch.bool)
PADDED[0, :2] = False
AMONG = [2, 3, 0, 1, *range(4, 12)]  # padding lies among tokens


@pytest.mark.parametrize("changes", [{}, WINDOW_OF_4, {"attention_mask": torch.ones(2, 12, dtype=torch.bool)}])
def test_there_is_no_mask_for_causal_and_for_windows(changes: dict[str, Any]) -> None:
    assert mask_of(**changes) is None


@pytest.mark.parametrize(
    "changes",
    [
        CHUNKS_OF_4,
        {"attention_mask": PADDED[:, AMONG]},
        {**WINDOW_OF_4, "attention_mask": PADDED[:, AMONG]},
        {"allow_is_causal_skip": False},
        {"q_offset": 5},
        {"q_offset": torch.tensor(9)},
    ],
)
def test_other_masks_are_those_of_eager_attention(changes: dict[str, Any]) -> None:
    found = mask_of(**changes)
    given = {"q_offset": 9, "kv_offset": 0, "mask_function": masking_utils.causal_mask_function} | changes
    expected = masking_utils.eager_mask(batch_size=2, q_length=3, kv_length=12, **given)
    assert found is not None and torch.equal(found, expected)


# ---- the cache


def test_a_cache_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match="scale_dtype: got torch.bfloat16"):
        cute.CuteInt8Cache(tiny_models.untrained("llama").config, scale_dtype=torch.bfloat16)
    config = transformers.Qwen3NextConfig(num_hidden_layers=4)
    with pytest.raises(ValueError, match="config: got layers of .'linear_attention'."):
        cute.CuteInt8Cache(config)


# ---- what transformers calls, and is called with


def test_our_layer_has_all_that_layers_have() -> None:
    """No method is abstract, and parameters have upstream's names."""
    assert not getattr(transformers_cache.CuteInt8Layer, "__abstractmethods__", None)
    for base in (cache_utils.CacheLayerMixin, cache_utils.DynamicLayer):
        for name in ("lazy_initialization", "update", "get_mask_sizes", "get_seq_length", "get_max_length", "reset"):
            theirs = tuple(inspect.signature(getattr(base, name)).parameters)[1:]
            assert moved(getattr(transformers_cache.CuteInt8Layer, name), theirs) == []


@pytest.mark.parametrize(
    "attention, keywords",
    [
        (modeling_llama.LlamaAttention, {"dropout", "scaling"}),
        (modeling_gpt_oss.GptOssAttention, {"dropout", "scaling", "sliding_window", "s_aux"}),
    ],
)
def test_models_call_attention_as_they_did(attention: Any, keywords: set[str]) -> None:
    known = set(inspect.signature(cute.cute_attention).parameters)
    assert keywords <= known
    calls = list(keywords_of_calls(attention.forward, "attention_interface"))
    version = transformers.__version__
    assert calls and all(args == 5 for args, _ in calls), f"transformers {version}: module, query, key, value, mask"
    for _, given in calls:
        assert keywords <= given, f"transformers {version} no longer passes {sorted(keywords - given)}"
        assert given <= known, f"transformers {version} passes {sorted(given - known)}, which cute_attention ignores"


def test_masks_are_asked_for_as_they_were() -> None:
    ours = {p.name for p in inspect.signature(cute.cute_mask).parameters.values() if p.kind is p.KEYWORD_ONLY}
    for function in (masking_utils.create_causal_mask, masking_utils.create_sliding_window_causal_mask):
        calls = list(keywords_of_calls(function, "mask_interface"))
        assert calls
        for args, given in calls:
            missing = ours - given - ({"local_size"} if function is masking_utils.create_causal_mask else set())
            assert args == 0 and not missing, f"transformers {transformers.__version__} no longer passes {missing}"


# ---- importing


def test_without_transformers_the_error_says_what_is_missing() -> None:
    code = "import sys; sys.modules['transformers'] = None; import cute_kernels.integrations.transformers"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "ImportError: cute_kernels.integrations.transformers needs transformers 5.17 or later" in result.stderr
