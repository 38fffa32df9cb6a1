"""vLLM's tensors as arguments of our operators; needs no vLLM."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8_mla
from cute_kernels import gqa_decode, kv_append
from cute_kernels.integrations.vllm import calls, warming
from cute_kernels.integrations.vllm.calls import GqaCalls, runs_prompts
from cute_kernels.runtime import workers
from cute_kernels.warm import GqaShape, MlaShape, PrefillShape, kernel_specs
from tests.kit.vllm_batches import HEADS, LIMITS, draw_batch, stock_cache

ROOT = Path(__file__).resolve().parents[2]
# ---- pages


@pytest.mark.parametrize("codes", [torch.int8, torch.uint8], ids=["int8", "int4"])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("tokens", [1, 16, 32, 64, 128, 256])
def test_a_page_has_the_bytes_of_vllms(tokens: int, order: str, kv_heads: int, codes: torch.dtype) -> None:
    """Codes and scales fill a page without gaps or overlap."""
    pages, d = 3, 64
    row = d if codes is torch.int8 else d // 2
    kv_cache = stock_cache(pages, kv_heads, tokens, d, codes, order, codes=codes)
    assert kv_cache[0].numel() == kv_heads * tokens * 2 * (row + 4)
    kv_cache.view(torch.int8).fill_(-1)
    views = calls.scaled_views(kv_cache, d, codes)
    assert views.k_scale is not None and views.v_scale is not None
    for i, view in enumerate((views.k, views.v)):
        assert view.shape == (pages, kv_heads, tokens, row)
        assert tokens == 1 or not any(stride % 16 for stride in view.stride()[:3])
        assert bool((view.view(torch.int8) == -1).all())
        view.fill_(i + 1)
    for view in (views.k_scale, views.v_scale):
        assert view.shape == (pages, kv_heads, tokens)
        view.zero_()
    assert bool((views.k == 1).all()) and bool((views.v == 2).all())
    assert not bool((kv_cache.view(torch.int8) == -1).any())
    assert views.k_scale.numel() + views.v_scale.numel() == 2 * pages * kv_heads * tokens


def filled(kv_heads: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Two pages of 16 tokens as vLLM has them, and their contents."""
    kv_cache = stock_cache(2, kv_heads, 16, 64, torch.int8, "HND")
    given = [torch.randint(-127, 128, (2, kv_heads, 16, 64)).to(torch.int8) for _ in range(2)]
    given += [torch.rand(2, kv_heads, 16) for _ in range(2)]
    for view, values in zip(tensors(kv_cache), given, strict=True):
        view.copy_(values)
    return kv_cache, given


def tensors(kv_cache: torch.Tensor) -> list[torch.Tensor]:
    """Codes and scales with heads first."""
    return [view for view in calls.scaled_views(kv_cache, 64) if isinstance(view, torch.Tensor)]


def test_pages_are_cut_by_heads() -> None:
    """A connector between different numbers of ranks does so: each rank takes its bytes of a page."""
    kv_cache, given = filled(4)
    for rank in range(2):
        own = stock_cache(2, 2, 16, 64, torch.int8, "HND")
        own.view(2, -1).copy_(kv_cache.view(2, 2, -1)[:, rank])
        for view, values in zip(tensors(own), given, strict=True):
            assert torch.equal(view, values[:, 2 * rank : 2 * rank + 2])


def test_pages_of_ranks_lie_side_by_side() -> None:
    """An offloaded block has the heads of all ranks, and those of one rank with all of its layers."""
    ranks = [filled(2) for _ in range(2)]
    whole = torch.cat([kv_cache.view(2, -1) for kv_cache, _ in ranks], dim=1).view(2, 4, 16, -1)
    for i, view in enumerate(tensors(whole)):
        assert torch.equal(view, torch.cat([given[i] for _, given in ranks], dim=1))


def test_pages_at_a_distance() -> None:
    """VLLM pads pages, and interleaves the pages of several layers."""
    elements = 16 * 2 * calls.scaled_token_bytes(64)
    padded = torch.zeros(4, elements + 512, dtype=torch.int8)
    views = calls.scaled_views(padded[:, :elements].view(4, 2, 16, -1), 64)
    assert views.k.stride(0) == elements + 512 and views.k_scale is not None
    assert views.k_scale.stride(0) * 4 == elements + 512
    views.v.fill_(3)
    assert not padded[:, elements:].any()


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_layers_in_one_page(order: str) -> None:
    """VLLM may put all layers in one page, by heads or by tokens; each layer has its own bytes."""
    pages, layers, heads, tokens, token = 3, 2, 2, 16, calls.scaled_token_bytes(64)
    if order == "HND":
        memory = torch.zeros(pages, heads, layers, tokens, token, dtype=torch.int8).permute(2, 0, 1, 3, 4)
    else:
        memory = torch.zeros(pages, layers, tokens, heads, token, dtype=torch.int8).permute(1, 0, 3, 2, 4)
    for layer in range(layers):
        for view in tensors(memory[layer]):
            view.view(torch.int8).fill_(layer + 1)
        assert bool((memory[layer] == layer + 1).all())
    assert not bool((memory[0] == 2).any())


@pytest.mark.parametrize(
    "kv_cache, words",
    [
        (torch.zeros(4, 2, 16, 135, dtype=torch.int8), r"got .*135\); needs \(pages, kv_heads, tokens, 136\)"),
        (torch.zeros(4, 2, 0, 136, dtype=torch.int8), r"got shape \(4, 2, 0, 136\)"),
        (torch.zeros(4, 2 * 16 * 136, dtype=torch.int8), r"got shape \(4, 4352\)"),
        (torch.zeros(4, 16, 3, 136, dtype=torch.int8)[:, :, :2].transpose(1, 2), "needs pages ordered by heads or"),
        (torch.zeros(4, 1, 32, 136, dtype=torch.int8)[:, :, ::2], "needs pages ordered by heads or by tokens"),
        (torch.zeros(4, 2, 16, 272, dtype=torch.int8)[..., ::2], "needs pages ordered by heads or by tokens"),
    ],
    ids=["size", "no tokens", "flat", "a head between", "a token between", "gaps"],
)  # fmt: skip
def test_a_page_that_is_not_ours_is_refused(kv_cache: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=f"kv_cache: .*{words}"):
        calls.scaled_views(kv_cache, 64)


def test_views_are_made_once_a_cache() -> None:
    layer = GqaCalls(4, 2, 64, 0.125, calls.INT8)
    caches = torch.zeros(2, 4, 2, 16, calls.scaled_token_bytes(64), dtype=torch.int8)
    assert layer.views(caches[0]) is layer.views(caches[0])
    assert layer.views(caches[1]).k.data_ptr() == caches[1].data_ptr()
    layer.forget_views()
    assert layer._known is None


# ---- decoding and storing


@pytest.mark.parametrize("cache_dtype", calls.SCALED)
@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("tokens", [16, 64, 256])
def test_scaled_codes_are_stored_and_decoded_as_in_a_cache_of_four_tensors(
    tokens: int, order: str, cache_dtype: str
) -> None:
    """The page changes where numbers lie, but no number."""
    codes, kind = calls.CODES[cache_dtype], calls.SCALED[cache_dtype]
    bytes_of_vllm = torch.int8 if codes is torch.int8 else torch.uint8
    batch = draw_batch([40, 17, 300], [2, 2, 2], tokens)
    layer = GqaCalls(HEADS, 2, 64, 0.125, cache_dtype)
    kv_cache = stock_cache(batch.pages, 2, tokens, 64, bytes_of_vllm, order, codes=codes)
    row = calls.code_bytes(64, codes)
    k_cache, v_cache = torch.zeros(2, batch.pages, tokens, 2, row, dtype=torch.int8).view(codes)
    k_scale, v_scale = torch.zeros(2, batch.pages, tokens, 2)
    padded_slots = torch.cat([batch.all_slots, torch.tensor([-1])])
    padded = [torch.cat([t, t[:3]]) for t in (batch.keys, batch.values)]  # more rows than slots, as in a graph
    layer.append_scaled(padded[0], padded[1], layer.views(kv_cache), padded_slots)
    kv_append(
        batch.keys, batch.values, k_cache, v_cache, k_scale, v_scale, batch.all_slots, layout="paged_NHD", kind=kind
    )
    out = torch.empty_like(batch.query)
    layer.decode(batch.query, layer.views(kv_cache, *batch.scales), batch.seq_lens, batch.block_table, out)
    expected = gqa_decode(
        batch.query.view(3, 2, HEADS, 64), k_cache, v_cache, k_scale, v_scale, layout="paged_NHD",
        cache_seqlens=batch.seq_lens, block_table=batch.block_table, kind=kind,
    )  # fmt: skip
    assert torch.equal(out.view(3, 2, HEADS, 64), expected)
    assert batch.error(out, window=None) < LIMITS[cache_dtype]


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_other_caches_are_vllms(cache_dtype: str, order: str) -> None:
    """Caches are (pages, kv_heads, tokens, 2 d), keys before values, in both orders of memory, with FP8 as uint8."""
    batch = draw_batch([40, 17], [1, 1], 16)
    layer = GqaCalls(HEADS, 2, 64, 0.125, cache_dtype)
    fp8 = cache_dtype == "fp8"
    kv_cache = stock_cache(batch.pages, 2, 16, 64, torch.uint8 if fp8 else torch.bfloat16, order)
    scales = (torch.tensor(0.5), torch.tensor(0.25)) if fp8 else batch.scales
    layer.append_plain(batch.keys, batch.values, layer.views(kv_cache, *scales), batch.all_slots)
    stored = kv_cache.view(torch.float8_e4m3fn) if fp8 else kv_cache
    slot = int(batch.all_slots[5])
    row = stored[slot // 16, :, slot % 16].float()
    exact = torch.cat([batch.keys[5].float() / scales[0], batch.values[5].float() / scales[1]], dim=-1)
    torch.testing.assert_close(row, exact.to(stored.dtype).float(), rtol=0, atol=0)
    out = torch.empty_like(batch.query)
    layer.decode(batch.query, layer.views(kv_cache, *scales), batch.seq_lens, batch.block_table, out)
    assert batch.error(out, window=None) < (0.05 if fp8 else 0.01)


def test_fp8_tokens_beyond_its_range_are_clamped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's limit is 96: torch 2.13 saturates at 448 by itself, but does not promise it."""
    monkeypatch.setattr(calls, "FP8_MAX", 96.0)
    batch = draw_batch([40, 17], [1, 1], 16)
    layer = GqaCalls(HEADS, 2, 64, 0.125, "fp8")
    kv_cache = stock_cache(batch.pages, 2, 16, 64, torch.uint8, "NHD")
    scale = torch.tensor(0.5)
    layer.append_plain(batch.keys * 1e4, batch.values * -1e4, layer.views(kv_cache, scale, scale), batch.all_slots)
    slot = int(batch.all_slots[5])
    row = kv_cache.view(torch.float8_e4m3fn)[slot // 16, :, slot % 16].float()
    exact = torch.cat([batch.keys[5].float() * 2e4, batch.values[5].float() * -2e4], dim=-1)
    assert row.abs().max() == 96
    torch.testing.assert_close(row.sign(), exact.sign())


def test_all_that_a_layer_is_reaches_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(calls, "gqa_decode", lambda *args, **kwargs: given.update(args=args, **kwargs))
    sinks, slopes = torch.zeros(HEADS), torch.ones(HEADS)
    layer = GqaCalls(HEADS, 2, 64, 0.3, "fp8_e4m3", 128, 30.0, slopes, sinks)
    batch = draw_batch([40, 17], [3, 3], 16)
    kv_cache, out = stock_cache(batch.pages, 2, 16, 64, torch.uint8, "NHD"), torch.empty_like(batch.query)
    layer.decode(batch.query, layer.views(kv_cache, *batch.scales), batch.seq_lens, batch.block_table, out)
    q, k, v, k_scale, v_scale = given.pop("args")
    assert q.shape == (2, 3, HEADS, 64) and q.data_ptr() == batch.query.data_ptr()
    assert k.dtype is v.dtype is torch.float8_e4m3fn and k.data_ptr() == kv_cache.data_ptr()
    assert k_scale is batch.scales[0] and v_scale is batch.scales[1]
    assert given.pop("out").data_ptr() == out.data_ptr()
    assert given.pop("cache_seqlens") is batch.seq_lens and given.pop("block_table") is batch.block_table
    assert given == {
        "layout": "paged_NHD", "window": 128, "softcap": 30.0, "alibi_slopes": slopes, "s_aux": sinks,
        "softmax_scale": 0.3, "num_splits": None, "kind": None,
    }  # fmt: skip
    layer.num_splits = 1
    layer.decode(batch.query, layer.views(kv_cache, *batch.scales), batch.seq_lens, batch.block_table, out)
    assert given["num_splits"] == 1


# ---- prefill


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("sinks", [False, True])
def test_prompts_over_the_cache_and_over_their_keys(window: int | None, sinks: bool) -> None:
    batch = draw_batch([40, 5, 17], [40, 5, 17], 16)
    s_aux = torch.linspace(-1, 2, HEADS) if sinks else None
    layer = GqaCalls(HEADS, 2, 64, 0.125, "auto", window, s_aux=s_aux)
    kv_cache = stock_cache(batch.pages, 2, 16, 64, torch.bfloat16, "NHD")
    views = layer.views(kv_cache)
    layer.append_plain(batch.keys, batch.values, views, batch.all_slots)
    pieces, fresh = torch.empty_like(batch.query), torch.empty_like(batch.query)
    layer.prefill_in_pieces(batch.query, views, batch.starts, batch.seq_lens, batch.block_table, pieces)
    layer.prefill_fresh(batch.query, batch.keys, batch.values, batch.starts, 40, fresh)
    assert batch.error(pieces, window, s_aux) < 0.01
    assert batch.error(fresh, window, s_aux) < 0.01


@pytest.mark.parametrize(
    "changes", [{"softcap": 1.0}, {"alibi_slopes": torch.ones(4)}, {"head_dim": 256}, {"shares_cache": True}]
)
def test_prompts_that_only_the_cache_computes(changes: dict[str, Any]) -> None:
    given = {"heads": 4, "kv_heads": 2, "head_dim": 64, "scale": 0.1, "cache_dtype": "auto"}
    assert GqaCalls(**given).prefills_fresh_tokens()
    assert not GqaCalls(**{**given, **changes}).prefills_fresh_tokens()


def test_prompts_of_heads_that_flash_attention_3_does_not_have() -> None:
    assert runs_prompts(3, 256)
    assert not runs_prompts(3, 512) and not runs_prompts(4, 128) and not runs_prompts(None, 128)


# ---- sparse MLA


@pytest.mark.parametrize("heads", [8, 20, 128])
@pytest.mark.parametrize("batch, s_q", [(1, 5), (3, 1), (2, 2)])
def test_sparse_mla_as_flashmla_is_called(batch: int, s_q: int, heads: int) -> None:
    torch.manual_seed(0)
    cache = fp8_mla.pack(torch.randn(4, 64, 576).bfloat16())
    q = torch.randn(batch, s_q, heads, 576).bfloat16()
    indices = torch.randint(-1, 256, (batch, s_q, 64), dtype=torch.int32)
    indices[0, 0] = -1  # a query without keys
    out, lse = calls.sparse_mla(q, cache, indices, 0.1)
    expected, expected_lse = fp8_mla.reference_decode(q, cache, indices=indices, softmax_scale=0.1)
    assert out.shape == (batch, s_q, heads, 512) and lse.shape == (batch, heads, s_q)
    torch.testing.assert_close(out.double(), expected.double(), rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(lse.transpose(1, 2).double(), expected_lse.double(), rtol=1e-5, atol=1e-5)
    assert not out[0, 0].any() and bool((lse[0, :, 0] == -torch.inf).all())


# ---- warm start


@pytest.mark.parametrize(
    "cache_dtype, kv_dtype", [("auto", "bfloat16"), ("fp8", "float8_e4m3fn"), *calls.SCALED.items()]
)
def test_a_layer_says_what_it_will_ask_for(cache_dtype: str, kv_dtype: str) -> None:
    layer = GqaCalls(32, 8, 128, 0.1, cache_dtype, window=64)
    decode, prefill = layer.shapes(torch.bfloat16, 16, 4096)
    assert isinstance(decode, GqaShape) and isinstance(prefill, PrefillShape)
    assert decode.kv_dtype == kv_dtype and decode.layout == (
        "paged_HND" if cache_dtype in calls.SCALED else "paged_NHD"
    )
    assert prefill.windows == (64,) and prefill.packed
    assert len(kernel_specs(decode, prefill, batch_sizes=(1, 64))) >= 2
    assert len(GqaCalls(32, 8, 256, 0.1, cache_dtype).shapes(torch.float16, 16, 4096)) == 1


@pytest.fixture
def compile_shapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`compile_shapes` with an empty memory of what it compiled, and no kernel on disk."""
    monkeypatch.setattr(warming, "missing", list)
    warming.compile_shapes.cache_clear()
    yield warming.compile_shapes
    warming.compile_shapes.cache_clear()


SHAPES = (MlaShape(16, append=False), GqaShape(8, 2, 64))


def test_a_warm_start_compiles_what_is_missing_once(
    compile_shapes: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Builders that request the same kernels compile once. If that fails, the first call reports the error."""
    asked: list[Any] = []

    def precompile(specs: list[Any], timeout_s: float) -> None:
        asked.append(specs)
        raise RuntimeError("no compiler")

    monkeypatch.setattr(warming, "precompile", precompile)
    for _ in range(2):
        compile_shapes(SHAPES, (1, 2), (1,), 132)
    assert asked == [kernel_specs(*SHAPES, batch_sizes=(1, 2))]
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert f"{len(asked[0])} of them are compiled by their first calls instead: no compiler" in warning


def test_a_warm_start_asks_for_nothing_that_is_there(
    compile_shapes: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warming, "missing", lambda specs: [])
    monkeypatch.setattr(warming, "precompile", lambda *_, **__: pytest.fail("all kernels are on disk"))
    compile_shapes(SHAPES, (1, 2), (1,), 132)


def test_a_warm_start_has_a_time_limit(
    compile_shapes: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A compiler that hangs must not keep a server from starting."""
    monkeypatch.setattr(warming, "LIMIT_S", 1)
    monkeypatch.setattr(warming, "precompile", lambda specs, timeout_s: workers.call_each(
        time.sleep, [60.0], 1, lambda item: None, timeout_s
    ))  # fmt: skip
    start = time.monotonic()
    compile_shapes(SHAPES, (1, 2), (1,), 132)
    assert time.monotonic() - start < 30
    assert "not done after 1 s" in caplog.text
