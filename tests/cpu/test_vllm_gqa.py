"""The GQA backend in the installed vLLM: its builder's metadata, its layers, and decode context parallelism."""

import types
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import vllm
from vllm.distributed import parallel_state
from vllm.v1.attention import backend as theirs
from vllm.v1.attention.backends import utils as theirs_utils

from cute_kernels.integrations.vllm import calls, context_parallel, gqa
from cute_kernels.integrations.vllm.context_parallel import Ranks
from cute_kernels.integrations.vllm.prompts import FEW
from tests.kit.flash_stand_in import FlashStandIn
from tests.kit.vllm_batches import HEADS, KV_HEADS, LIMITS, draw_batch, empty_cache
from tests.kit.vllm_fakes import builder, common

# ---- metadata


def test_a_batch_that_decodes() -> None:
    batch = draw_batch([40, 17, 9], [1, 1, 1], 16)
    m = builder().build(0, common(batch))
    assert (m.num_decodes, m.num_decode_tokens, m.prefill, m.fresh) == (3, 3, None, False)


def test_a_batch_padded_for_a_graph() -> None:
    """In speculation, two requests of 3 tokens are in a graph for four, and tokens are padded, too."""
    batch = draw_batch([40, 17, 3, 3], [3, 3, 3, 3], 16)
    padded = common(batch)
    padded.query_start_loc_cpu = torch.tensor([0, 3, 6, 6, 6], dtype=torch.int32)
    padded.query_start_loc = padded.query_start_loc_cpu
    padded.seq_lens = padded.seq_lens_cpu_upper_bound = torch.tensor([40, 17, 0, 0], dtype=torch.int32)
    m = builder(drafts=2).build(0, padded)
    assert (m.num_decodes, m.num_decode_tokens, m.prefill) == (4, 12, None)


def test_requests_without_tokens_do_not_count() -> None:
    batch = draw_batch([40, 17], [3, 3], 16)
    m = builder(drafts=2).build(0, common(batch, padded_requests=2))
    assert (m.num_decodes, m.num_decode_tokens) == (2, 6)


def test_a_request_without_tokens_among_others_is_no_decode() -> None:
    batch = draw_batch([40, 3, 17], [3, 3, 3], 16)
    between = common(batch, num_actual_tokens=6)
    between.query_start_loc_cpu = between.query_start_loc = torch.tensor([0, 3, 3, 6], dtype=torch.int32)
    m = builder(drafts=2).build(0, between)
    assert (m.num_decodes, m.num_decode_tokens, m.prefill, m.fresh) == (0, 0, None, False)
    nobody = common(batch, num_actual_tokens=0)
    nobody.query_start_loc_cpu = nobody.query_start_loc = torch.zeros(4, dtype=torch.int32)
    assert builder(drafts=2).build(0, nobody).num_decode_tokens == 0


def test_borders_on_the_host_are_not_read_where_all_have_a_token() -> None:
    """With `--kv-sharing-fast-prefill` they may still be on their way from the GPU."""
    batch = draw_batch([40, 17, 9], [1, 1, 1], 16)
    unwritten = common(batch)
    unwritten.query_start_loc_cpu = torch.full((4,), 1 << 30, dtype=torch.int32)
    m = builder().build(0, unwritten)
    assert (m.num_decodes, m.num_decode_tokens, m.prefill) == (3, 3, None)


def test_a_mixed_batch() -> None:
    batch = draw_batch([40, 17, 30, 25], [1, 1, 30, 10], 16)
    m = builder().build(0, common(batch))
    assert (m.num_decodes, m.num_decode_tokens, m.fresh) == (2, 2, False)
    assert m.prefill is not None and m.prefill.num_actual_tokens == 40
    assert m.prefill.query_start_loc.tolist() == [0, 30, 40] and m.prefill.seq_lens.tolist() == [30, 25]
    assert torch.equal(m.prefill.block_table, batch.block_table[2:])
    assert torch.equal(m.prefill.slot_mapping, batch.slots[2:])
    assert m.prompts is not None and torch.equal(m.prompts.block_table, m.prefill.block_table)
    assert (m.prompts.starts_host, m.prompts.lengths_host) == ([0, 30, 40], [30, 25])
    whole = draw_batch([40, 30, 25], [1, 30, 25], 16)
    assert builder().build(0, common(whole)).fresh


def test_prompts_alone() -> None:
    batch = draw_batch([30, 25], [30, 25], 16)
    m = builder().build(0, common(batch))
    assert (m.num_decodes, m.num_decode_tokens, m.prefill, m.fresh) == (0, 0, None, True)
    unknown = builder().build(0, common(batch, seq_lens_cpu_upper_bound=None))
    assert not unknown.fresh and unknown.prompts is None
    padded = builder().build(0, common(batch, num_actual_tokens=64))
    assert not padded.fresh and padded.prompts is not None
    both_ways = builder().build(0, common(batch, causal=False))
    assert not both_ways.fresh and both_ways.prompts is None


def test_builders_that_vllm_makes_of_ours() -> None:
    """VLLM's chunked attention splits requests, and host lengths may remain those of whole requests."""

    class Chunked(gqa.CuteAttentionMetadataBuilder):
        pass

    made = builder()
    made.__class__ = Chunked
    m = made.build(0, common(draw_batch([30, 25], [30, 25], 16)))
    assert not m.fresh and m.prompts is None


def test_a_longest_length_of_numpy() -> None:
    batch = draw_batch([30, 25], [30, 25], 16)
    layer = calls.GqaCalls(HEADS, KV_HEADS, 64, 0.125, "auto")
    out = torch.empty_like(batch.query)
    layer.prefill_fresh(batch.query, batch.keys, batch.values, batch.starts, batch.starts.diff().max().numpy(), out)
    assert batch.error(out, None) < 0.01


def test_prompts_of_a_draft_model_are_not_fresh() -> None:
    """Parallel drafting adds queries to each request but leaves host lengths: 20 of 40 tokens look like all."""
    batch = draw_batch([30, 40], [30, 20], 16)
    longer = common(batch, seq_lens_cpu_upper_bound=torch.tensor([30, 20], dtype=torch.int32))
    assert builder().build(0, longer).fresh
    draft = builder().build_for_drafting(longer, 0)
    assert not draft.fresh and draft.prompts is None


def test_speculation_beyond_the_kernel_is_prefill() -> None:
    batch = draw_batch([40, 17], [10, 10], 16)
    long = builder(drafts=9)
    m = long.build(0, common(batch))
    assert (m.num_decodes, m.num_decode_tokens, m.fresh) == (0, 0, False)
    support = gqa.CuteAttentionMetadataBuilder.get_cudagraph_support
    assert support(long.vllm_config, None) is theirs.AttentionCGSupport.NEVER
    for drafts in (0, 7):
        assert support(builder(drafts).vllm_config, None) is theirs.AttentionCGSupport.UNIFORM_BATCH


@pytest.fixture
def invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert vllm.envs.VLLM_BATCH_INVARIANT is True


def test_whole_prompts_are_as_others_where_a_batch_must_not_matter(invariant: None) -> None:
    m = builder().build(0, common(draw_batch([40, 30, 25], [1, 30, 25], 16)))
    assert m.num_decodes == 1 and not m.fresh and m.prompts is not None and m.prompts.alone
    assert m.prompts.pieces is None


def test_drafts_are_prompts_where_a_batch_must_not_matter(invariant: None) -> None:
    """A batch of drafts alone would decode drafts, and a mixed batch would not."""
    made = builder(drafts=2)
    m = made.build(0, common(draw_batch([40, 17], [3, 3], 16)))
    assert (m.num_decodes, m.fresh) == (0, False) and m.prompts is not None
    support = gqa.CuteAttentionMetadataBuilder.get_cudagraph_support
    assert support(made.vllm_config, None) is theirs.AttentionCGSupport.NEVER
    assert support(builder().vllm_config, None) is theirs.AttentionCGSupport.UNIFORM_BATCH


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", calls.INT8])
def test_a_layer_has_one_split_where_a_batch_must_not_matter(
    kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch, invariant: None
) -> None:
    """If copies have no room for a whole context, it must not run on copies: the batch decides where it is cut."""
    monkeypatch.setattr(gqa, "_flash_attention", lambda *args: FlashStandIn())
    for longest, whole in ((1 << 20, False), (4096, True)):
        monkeypatch.setattr(gqa, "_max_model_len", lambda tokens=longest: tokens)
        made = gqa.CuteAttentionImpl(HEADS, 64, 0.125, KV_HEADS, kv_cache_dtype=kv_cache_dtype)
        assert made.calls.num_splits == 1
        assert (made.calls.flash is not None) == (whole or kv_cache_dtype == "auto")


def test_attention_in_both_directions_is_not_decoded() -> None:
    m = builder().build(0, common(draw_batch([40, 17], [1, 1], 16), causal=False))
    assert (m.num_decodes, m.num_decode_tokens, m.fresh) == (0, 0, False)


# ---- a layer


@pytest.mark.parametrize("flash", [None, FlashStandIn()], ids=["cpu", "flash"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", *calls.SCALED])
@pytest.mark.parametrize("window, sinks", [(None, False), (20, True)])
@pytest.mark.parametrize(
    "lengths, queries",
    [
        ([40, 17, 9], [1, 1, 1]), ([40, 17, 40, 25], [1, 1, 40, 10]), ([30, 25], [30, 25]), ([50, 33], [20, 5]),
        ([90, 33], [60, 5]),
    ],
    ids=["decode", "mixed", "fresh", "few", "continued"],
)  # fmt: skip
def test_a_layer_attends(
    lengths: list[int], queries: list[int], window: int | None, sinks: bool, kv_cache_dtype: str,
    flash: FlashStandIn | None,
) -> None:  # fmt: skip
    """The builder makes the metadata, the layer stores tokens and attends, and float64 is the oracle.

    Prompts run as on a CPU and, with a stand-in for FlashAttention, as on a GPU.
    """
    batch = draw_batch(lengths, queries, 16)
    s_aux = torch.linspace(-1, 2, HEADS).bfloat16() if sinks else None
    impl = gqa.CuteAttentionImpl(HEADS, 64, 0.125, KV_HEADS, None, window, kv_cache_dtype, 0.0, sinks=s_aux)
    impl.process_weights_after_loading(torch.bfloat16)
    assert not impl.supports_quant_query_input and impl.calls.flash is None
    impl.calls.flash = flash
    ran = len(flash.calls) if flash else 0
    layer = types.SimpleNamespace(_k_scale=torch.tensor(1.0), _v_scale=torch.tensor(1.0))
    kv_cache = empty_cache(batch.pages, 16, kv_cache_dtype)
    before = ~torch.isin(batch.all_slots, batch.slots)
    impl.do_kv_cache_update(layer, batch.keys[before], batch.values[before], kv_cache, batch.all_slots[before])
    new = torch.isin(batch.all_slots, batch.slots)
    key, value = batch.keys[new], batch.values[new]
    impl.do_kv_cache_update(layer, key, value, kv_cache, batch.slots)
    metadata = builder().build(0, common(batch))
    padded = [torch.cat([t, torch.full((3, *t.shape[1:]), torch.nan).to(t.dtype)]) for t in (batch.query, key, value)]
    out = torch.full_like(padded[0], torch.nan)
    impl.forward(layer, *padded, kv_cache, metadata, out)
    out, padding = out[:-3], out[-3:]
    assert (padding == 0).all(), "vLLM takes maxima over all rows"
    error = batch.error(out, window, None if s_aux is None else s_aux.float())
    assert error < LIMITS[kv_cache_dtype]
    decoded = FEW if kv_cache_dtype != "auto" else 1
    assert flash is None or len(flash.calls) == ran + (max(queries) > decoded and not metadata.fresh)


def test_new_sinks_land_where_graphs_read() -> None:
    """Sinks come in the model's parameter, by a load in place, or in a parameter that replaces it."""
    parameter = torch.nn.Parameter(torch.zeros(HEADS).bfloat16(), requires_grad=False)
    impl = gqa.CuteAttentionImpl(HEADS, 64, 0.125, KV_HEADS, sinks=parameter)
    impl.process_weights_after_loading(torch.bfloat16)
    read = impl.calls.s_aux
    assert read is not None and read.dtype is torch.float32
    address = read.data_ptr()
    parameter.data.copy_(torch.ones(HEADS).bfloat16())
    assert torch.equal(read, torch.ones(HEADS))
    for value in (2, 3):
        impl.sinks = torch.nn.Parameter(torch.full((HEADS,), float(value)).bfloat16(), requires_grad=False)
        impl.process_weights_after_loading(torch.bfloat16)
        assert impl.calls.s_aux is not None and impl.calls.s_aux.data_ptr() == address
        assert torch.equal(impl.calls.s_aux, torch.full((HEADS,), float(value)))
    impl.sinks.data.fill_(4)
    assert torch.equal(impl.calls.s_aux, torch.full((HEADS,), 4.0))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", calls.INT8])
def test_a_cache_that_vllm_frees_is_let_go(kv_cache_dtype: str) -> None:
    """VLLM's runner does so after measuring the memory of graphs, by an attribute of its own backends."""
    impl = gqa.CuteAttentionImpl(HEADS, 64, 0.125, KV_HEADS, None, None, kv_cache_dtype)
    layer = types.SimpleNamespace(_k_scale=torch.tensor(1.0), _v_scale=torch.tensor(1.0))
    kv_cache = empty_cache(3, 16, kv_cache_dtype)
    key = torch.zeros(3, KV_HEADS, 64).bfloat16()
    impl.do_kv_cache_update(layer, key, key, kv_cache, torch.tensor([16, 17, 18]))
    if kv_cache_dtype == calls.INT8:
        impl._ensure_scale_caches(kv_cache)
    assert impl.calls._known is not None
    for name in ("_k_scale_cache", "_v_scale_cache"):
        setattr(impl, name, None)
    assert impl.calls._known is None


def test_a_quantized_output_is_refused() -> None:
    impl = gqa.CuteAttentionImpl(HEADS, 64, 0.125, KV_HEADS)
    out, scale = torch.ones(3, HEADS, 64), torch.ones(1)
    for name in ("output_scale", "output_block_scale"):
        with pytest.raises(NotImplementedError, match="a scale of the output"):
            impl.forward(None, out, out, out, out, None, out, **{name: scale})


def test_a_layer_without_metadata_is_measured() -> None:
    impl = gqa.CuteAttentionImpl(HEADS, 64, 0.125, KV_HEADS)
    out = torch.ones(3, HEADS, 64)
    assert not impl.forward(None, out, out, out, out, None, out).any()


def test_what_no_kernel_computes_is_refused_with_the_layer() -> None:
    with pytest.raises(NotImplementedError, match="chunk_lookback"):
        gqa.CuteAttentionImpl(HEADS, 64, 0.125, KV_HEADS, chunk_lookback=2)
    gqa.CuteAttentionImpl(HEADS, 64, 0.125, KV_HEADS, chunk_lookback=-1, use_alibi_sqrt=False)


def test_prompts_over_int4_run_on_flash_attention_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM's Triton kernel reads INT4 from its own page. A CPU has no FlashAttention and runs prompts in pieces."""
    given = (HEADS, 64, 0.125, KV_HEADS, None, None, calls.INT4)
    gqa.CuteAttentionImpl(*given)
    monkeypatch.setattr(gqa, "current_platform", types.SimpleNamespace(is_cuda=lambda: True))
    with pytest.raises(NotImplementedError, match="FlashAttention 3"):
        gqa.CuteAttentionImpl(*given)
    monkeypatch.setattr(gqa, "_flash_attention", lambda *a: FlashStandIn())
    gqa.CuteAttentionImpl(*given)


@pytest.mark.parametrize("kv_cache_dtype", calls.SCALED)
def test_codes_with_scales_as_the_triton_kernels_read_them(kv_cache_dtype: str) -> None:
    impl = gqa.CuteAttentionImpl(HEADS, 64, 0.125, KV_HEADS, None, None, kv_cache_dtype)
    kv_cache = empty_cache(3, 16, kv_cache_dtype)
    k, v = impl._pth_key_value_caches(kv_cache)
    assert k.dtype is v.dtype is calls.CODES[kv_cache_dtype]
    assert k.shape == v.shape == (3, 16, KV_HEADS, calls.code_bytes(64, k.dtype))
    for scale in (impl._k_scale_cache, impl._v_scale_cache):
        assert scale is not None and scale.shape == (3, 16, KV_HEADS) and scale.dtype is torch.float32
    impl.calls.views(kv_cache).v.fill_(3)
    assert bool((v.float() == 3).all()) and not k.float().any()


# ---- decode context parallelism


class TwoRanks:
    """A group of vLLM, seen from its second rank; both ranks have the same tensors."""

    world_size, rank_in_group, device_group = 2, 1, None

    def all_gather(self, t: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([t, t], dim=dim)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """New layers share the keys of requests with another rank."""
    group, settings = TwoRanks(), types.SimpleNamespace(cp_kv_cache_interleave_size=4)
    monkeypatch.setattr(parallel_state, "_DCP", group)
    monkeypatch.setattr(gqa, "get_current_vllm_config", lambda: types.SimpleNamespace(parallel_config=settings))


@pytest.mark.parametrize("interleave", [1, 16])
def test_a_rank_has_the_tokens_that_vllm_says(interleave: int) -> None:
    lengths = torch.arange(100, dtype=torch.int32)
    for rank in range(3):
        ours = Ranks(3, rank, interleave, torch.cat, None).lengths(lengths)
        assert torch.equal(ours, theirs_utils.get_dcp_local_seq_lens(lengths, 3, rank, interleave))


def test_a_layer_that_shares_keys(shared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding and prompts go to the ranks, with this rank's lengths from vLLM."""
    impl = gqa.CuteAttentionImpl(HEADS, 64, 0.125, 1)
    assert impl.need_to_return_lse_for_decode and impl.supports_dcp and impl._ranks is not None
    assert (impl._ranks.size, impl._ranks.rank, impl._ranks.interleave) == (2, 1, 4)
    ran: dict[str, Any] = {}
    for name in ("decode", "prefill"):
        keep = lambda *args, name=name: ran.update({name: args}) or args[-1].fill_(1)  # noqa: E731
        monkeypatch.setattr(context_parallel, name, keep)
    batch = draw_batch([40, 17, 40], [1, 1, 10], 16)
    local = impl._ranks.lengths(batch.seq_lens)
    metadata = builder().build(0, common(batch, dcp_local_seq_lens=local))
    assert metadata.num_decodes == 2 and metadata.starts_host == [0, 10]
    layer = types.SimpleNamespace(_k_scale=torch.tensor(1.0), _v_scale=torch.tensor(1.0))
    out, new = torch.full((14, HEADS, 64), torch.nan), torch.zeros(14, 1, 64)
    cache = torch.zeros(batch.pages, 1, 16, 2 * 64)
    impl.forward(layer, torch.cat([batch.query, batch.query[:2]]), new, new, cache, metadata, out)
    assert torch.equal(ran["decode"][4], local[:2]) and ran["prefill"][7] == [0, 10]
    assert (out[:12] == 1).all() and (out[12:] == 0).all()


def test_layers_whose_keys_have_positions_are_refused(shared: None) -> None:
    for options, words in (({"sliding_window": 64}, "a window"), ({"num_kv_heads": 2}, "2 KV heads")):
        given = {"num_heads": HEADS, "head_size": 64, "scale": 0.125, "num_kv_heads": 1, **options}
        with pytest.raises(NotImplementedError, match=f"decode context parallelism and {words}"):
            gqa.CuteAttentionImpl(**given)
