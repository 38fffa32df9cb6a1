"""Prompts with earlier tokens in the cache: which pages are copied for which queries, and attention over the copies."""

import weakref
from typing import Any

import pytest
import torch

from cute_kernels.integrations.vllm import calls as calls_module
from cute_kernels.integrations.vllm import prompts as prompts_module
from cute_kernels.integrations.vllm.calls import FP8_SCALED, INT4, INT8, CacheViews, GqaCalls
from cute_kernels.integrations.vllm.prompts import (
    AHEAD,
    FEW,
    SLACK,
    STATES,
    Prompts,
    Run,
    attend,
    page_limit,
    plan,
    reserve,
)
from cute_kernels.warm import PromptShape
from tests.kit.flash_stand_in import FlashStandIn
from tests.kit.vllm_batches import HEADS, LIMITS, Batch, draw_batch, empty_cache


def prompts_of(batch: Batch) -> Prompts:
    return Prompts(
        batch.starts, batch.seq_lens, batch.block_table, batch.starts.tolist(), batch.seq_lens.tolist()
    )  # fmt: skip


def layer_of(cache_dtype: str, **options: Any) -> tuple[GqaCalls, FlashStandIn]:
    flash = FlashStandIn()
    return GqaCalls(HEADS, 2, 64, 0.125, cache_dtype, flash=flash, **options), flash


def filled(layer: GqaCalls, batch: Batch) -> CacheViews:
    """The batch's cache; slots of no request are NaN."""
    kv_cache = empty_cache(batch.pages, 16, layer.cache_dtype)
    views = layer.views(kv_cache, *batch.scales)
    if layer.kind is not None:
        for scale in (views.k_scale, views.v_scale):
            assert scale is not None
            scale.fill_(torch.nan)
        layer.append_scaled(batch.keys, batch.values, views, batch.all_slots)
    else:
        kv_cache.fill_(0x7F if layer.quantized else torch.nan)
        layer.append_plain(batch.keys, batch.values, views, batch.all_slots)
    return views


def attended(layer: GqaCalls, batch: Batch) -> torch.Tensor:
    out = torch.full_like(batch.query, torch.nan)
    attend(layer, batch.query, filled(layer, batch), prompts_of(batch), out)
    return out


# ---- which pages


@pytest.mark.parametrize("window", [None, 1, 40, 1000])
@pytest.mark.parametrize("limit", [1, 5, 20, 1000])
@pytest.mark.parametrize("rejected", [0, SLACK + AHEAD])
def test_every_query_has_its_keys_once(window: int | None, limit: int, rejected: int) -> None:
    """Limits vary, and so do the errors of the host's lengths within the allowed range."""
    lengths, counts = [900, 17, 300, 0, 333, 16, 1600], [1, 17, 200, 0, 333, 1, 700]
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    said = [length + rejected if count else 0 for length, count in zip(lengths, counts, strict=True)]
    size = 16
    seen: dict[int, list[int]] = {}
    for group in plan(starts, said, size, window, limit):
        assert len({run.requests for run in group}) == 1
        assert [run.causal for run in group] == [False] * (len(group) - 1) + [True]
        if len(group[0].pages) > 1:
            assert sum(b - a for a, b in group[0].pages) <= limit
        for run in group:
            for request, (a, b) in zip(range(*run.requests), run.pages, strict=True):
                assert run.causal or b - a <= limit
                position = lengths[request] - counts[request]  # of the first query
                if not run.causal:
                    assert b * size <= position + 1, "all queries see all keys of an earlier part"
                seen.setdefault(request, []).extend(range(a * size, b * size))
    assert sorted(seen) == [i for i, count in enumerate(counts) if count > FEW]
    for request, keys in seen.items():
        assert len(set(keys)) == len(keys)
        first = 0 if window is None else max(lengths[request] - counts[request] - window + 1, 0)
        assert set(range(first, lengths[request])) <= set(keys)


def test_requests_share_a_call() -> None:
    assert plan([0, 40, 80, 120, 121, 161], [64, 48, 64, 48, 48], 16, None, 7) == [
        [Run((0, 2), ((0, 4), (0, 3)), True)],
        [Run((2, 3), ((0, 4),), True)],
        [Run((4, 5), ((0, 3),), True)],
    ]


def test_requests_that_are_alone_share_none() -> None:
    """A request alone decides which calls it is in and which kernel they use. Few tokens get no call of their own."""
    lengths = [64, 48, 64, 48, 48, 20]
    assert plan([0, 40, 80, 120, 121, 161, 161], lengths, 16, None, 7, alone=True) == [
        [Run((i, i + 1), ((0, -(-lengths[i] // 16)),), True)] for i in range(5)
    ]


@pytest.mark.parametrize("cache_dtype", LIMITS)
@pytest.mark.parametrize("window", [None, 20])
def test_prompts_that_are_alone(cache_dtype: str, window: int | None) -> None:
    """A request's calls are the calls that it has without other requests, and they have no splits to choose."""

    def asked(batch: Batch) -> list[dict[str, Any]]:
        layer, flash = layer_of(cache_dtype, window=window, num_splits=1)
        out, given = torch.full_like(batch.query, torch.nan), prompts_of(batch)
        given.alone = True
        attend(layer, batch.query, filled(layer, batch), given, out)
        assert batch.error(out, window) < LIMITS[cache_dtype]
        assert all(call["num_splits"] == 1 for call in flash.calls)
        return flash.calls

    sizes = [(100, 40), (70, 3), (300, 200), (33, 33)]
    together = asked(draw_batch([a for a, _ in sizes], [b for _, b in sizes], 16))
    if cache_dtype == "auto":
        assert len(together) == 1
        return
    each = [asked(draw_batch([a], [b], 16)) for a, b in sizes]
    for call, (own,) in zip(together, each, strict=True):
        for name in ("max_seqlen_q", "max_seqlen_k", "causal", "num_splits", "window_size"):
            assert call[name] == own[name], name
        assert call["block_table"].shape == own["block_table"].shape


def test_a_window_needs_its_pages_alone() -> None:
    (((_, ((first, last),), _),),) = plan([0, 40], [16000], 16, 64, 10)
    assert last == 1000 and 1000 - first <= (40 + 64 + SLACK + AHEAD) / 16 + 1


def test_a_long_context_comes_in_parts_of_the_limit() -> None:
    (group,) = plan([0, 40], [16000], 16, None, 300)
    assert [run.pages[0] for run in group] == [(0, 300), (300, 600), (600, 700), (700, 1000)]


def test_parts_are_made_once_a_step() -> None:
    given = prompts_of(draw_batch([100, 40], [50, 10], 16))
    assert given.parts(16, None, 4) is given.parts(16, None, 4)
    assert given.parts(16, 20, 4) is not given.parts(16, None, 4)
    assert given.pieces is given.pieces
    assert prompts_of(draw_batch([100], [50], 16)).pieces is None


def test_few_tokens_are_decoded_in_pieces() -> None:
    """The first piece of a request is filled up at its beginning; each piece sees what precedes its own last token."""
    batch = draw_batch([100, 40, 70, 20], [3, 33, 17, 8], 16)
    pieces = prompts_of(batch).pieces
    assert pieces is not None
    assert pieces.rows.view(-1, 8).tolist() == [
        [0, 0, 0, 0, 0, 0, 1, 2],
        [36, 36, 36, 36, 36, 36, 36, 36],
        [37, 38, 39, 40, 41, 42, 43, 44],
        [45, 46, 47, 48, 49, 50, 51, 52],
        [53, 54, 55, 56, 57, 58, 59, 60],
    ]
    assert pieces.lengths.tolist() == [100, 54, 62, 70, 20] and pieces.lengths.dtype is torch.int32
    assert torch.equal(pieces.table, batch.block_table[[0, 2, 2, 2, 3]])
    assert torch.equal(pieces.rows[pieces.places], pieces.tokens)
    assert pieces.tokens.tolist() == [0, 1, 2, *range(36, 61)] and pieces.places.tolist()[:4] == [5, 6, 7, 15]


# ---- attention


@pytest.mark.parametrize("limit", [16, 24, 1000])
@pytest.mark.parametrize("window, sinks", [(None, False), (None, True), (20, True)])
@pytest.mark.parametrize("cache_dtype", LIMITS)
def test_prompts_over_the_cache(
    cache_dtype: str, window: int | None, sinks: bool, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = draw_batch([500, 5, 33, 170, 90], [200, 5, 1, 150, 32], 16)
    monkeypatch.setattr(calls_module, "COPY_BYTES", limit * 2 * 2 * 2 * 64 * 16)
    s_aux = torch.linspace(-1, 2, HEADS).bfloat16().float() if sinks else None
    layer, flash = layer_of(cache_dtype, window=window, s_aux=s_aux)
    assert page_limit(layer, 16) == limit
    assert batch.error(attended(layer, batch), window, s_aux) < LIMITS[cache_dtype]
    if cache_dtype == "auto":
        assert len(flash.calls) == 1
    elif limit == 24 and window is None:
        assert [call["causal"] for call in flash.calls] == [False, True, True]


def test_lengths_beyond_those_of_the_host_read_no_other_pages() -> None:
    """The host's lengths may be those of another step. Results are then wrong, but no foreign memory is read."""
    batch = draw_batch([500, 170], [200, 150], 16)
    layer, flash = layer_of(INT8)
    given = Prompts(batch.starts, batch.seq_lens, batch.block_table, batch.starts.tolist(), [260, 0])
    out = torch.empty_like(batch.query)
    attend(layer, batch.query, filled(layer, batch), given, out)
    assert [call["max_seqlen_k"] for call in flash.calls] == [272]
    given = Prompts(batch.starts, batch.seq_lens, batch.block_table, batch.starts.tolist(), [5000, 170])
    attend(layer, batch.query, filled(layer, batch), given, out)
    assert flash.calls[1]["max_seqlen_k"] == 512, "the width of the table"


@pytest.mark.parametrize("parts", [2, STATES, STATES + 1, 2 * STATES + 1])
@pytest.mark.parametrize("sinks", [False, True])
def test_any_number_of_parts_is_merged(parts: int, sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of `STATES` parts exist at a time, and copies of one."""
    batch = draw_batch([16 * 12 * parts - 20, 90], [40, 35], 16)
    monkeypatch.setattr(calls_module, "COPY_BYTES", 12 * 2 * 2 * 2 * 64 * 16)
    s_aux = torch.linspace(-1, 2, HEADS).bfloat16().float() if sinks else None
    layer, flash = layer_of(INT8, s_aux=s_aux)
    alive: list[weakref.ref[torch.Tensor]] = []
    gather = prompts_module.gather_pages

    def counted(*arguments: Any) -> Any:
        assert not any(copies() is not None for copies in alive), "copies of the part before"
        k, v = gather(*arguments)
        alive.extend((weakref.ref(k), weakref.ref(v)))
        return k, v

    monkeypatch.setattr(prompts_module, "gather_pages", counted)

    def forgetful(**given: Any) -> Any:
        result = flash(**given)
        flash.calls.clear()
        return result

    layer.flash = forgetful
    assert batch.error(attended(layer, batch), None, s_aux) < LIMITS[INT8]
    assert len(alive) >= 2 * (parts + 1)


@pytest.mark.parametrize("cache_dtype", LIMITS)
def test_a_length_that_the_host_does_not_know_yet(cache_dtype: str) -> None:
    """A draft model has one token more than its batch says, on a page of its own."""
    batch = draw_batch([65, 97], [40, 35], 16)
    layer, _ = layer_of(cache_dtype)
    given = Prompts(batch.starts, batch.seq_lens, batch.block_table, batch.starts.tolist(), [64, 96])
    out = torch.full_like(batch.query, torch.nan)
    attend(layer, batch.query, filled(layer, batch), given, out)
    assert batch.error(out, None) < LIMITS[cache_dtype]


def test_softcap_and_scale_reach_it() -> None:
    batch = draw_batch([60, 40], [10, 40], 16)
    layer, flash = layer_of(INT8, softcap=30.0)
    attended(layer, batch)
    assert [(call["softcap"], call["softmax_scale"]) for call in flash.calls] == [(30.0, 0.125)]
    assert flash.calls[0]["k"].dtype is torch.bfloat16


@pytest.mark.parametrize("softcap, ran", [(None, 0), (1.0, 1)])
@pytest.mark.parametrize("window, sinks", [(None, False), (20, True)])
def test_fresh_prompts(window: int | None, sinks: bool, softcap: float | None, ran: int) -> None:
    """Prompts of a layer that `sink_attention` can compute run on it."""
    batch = draw_batch([40, 5, 17], [40, 5, 17], 16)
    s_aux = torch.linspace(-1, 2, HEADS).bfloat16().float() if sinks else None
    layer, flash = layer_of("auto", window=window, s_aux=s_aux, softcap=softcap)
    out = torch.full_like(batch.query, torch.nan)
    layer.prefill_fresh(batch.query, batch.keys, batch.values, batch.starts, 40, out)
    assert batch.error(out, window, s_aux, softcap) < 0.01 and len(flash.calls) == ran


def test_memory_is_asked_for_where_copies_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(prompts_module.torch, "empty", lambda size, **options: asked.append(size))
    output = torch.ones(100, HEADS, 64).bfloat16()
    for cache_dtype in LIMITS:
        reserve(layer_of(cache_dtype)[0], output)
        reserve(GqaCalls(HEADS, 2, 64, 0.125, cache_dtype, max_tokens=1 << 30), output)
    assert len(asked) == 4 and set(asked) == {calls_module.COPY_BYTES}
    reserve(layer_of(INT8, max_tokens=layer_of(INT8)[0].copied_tokens + 1)[0], output)
    assert asked[4] == calls_module.COPY_BYTES + (STATES + 1) * 100 * HEADS * 64 * 2, "parts, and what they merge to"


@pytest.mark.parametrize(
    "cache_dtype, kv_dtype",
    [("fp8", "float8_e4m3fn"), (INT8, "int8"), (FP8_SCALED, "fp8_per_token_head"), (INT4, "int4")],
)
def test_a_layer_asks_for_copies_and_their_merges(cache_dtype: str, kv_dtype: str) -> None:
    s_aux = torch.zeros(HEADS)
    layer = layer_of(cache_dtype, s_aux=s_aux)[0]
    limit = layer.copied_tokens
    for max_tokens, merged in ((limit, False), (limit + 1, True)):
        _, prompt, _ = layer.shapes(torch.bfloat16, 16, max_tokens)
        assert prompt == PromptShape(HEADS, 64, "bfloat16", kv_dtype, sink=True, merged=merged)
    assert len(layer_of("auto")[0].shapes(torch.bfloat16, 16, limit + 1)) == 2


def test_a_single_head_has_a_stride() -> None:
    """Torch may give any stride to a single head, and TMA refuses less than 16 bytes."""
    layer, flash = layer_of("auto")
    layer.kv_heads = 1
    batch = draw_batch([40, 17], [10, 17], 16)
    kv_cache = torch.zeros(batch.pages, 1, 16, 128, dtype=torch.bfloat16)
    kv_cache = kv_cache.as_strided(kv_cache.shape, (2048, 1, 128, 1))
    out = torch.empty_like(batch.query)
    attend(layer, batch.query, layer.views(kv_cache), prompts_of(batch), out)
    (call,) = flash.calls
    assert call["k"].stride()[1:] == (128, 64, 1) and call["k"].shape == (batch.pages, 16, 1, 64)
