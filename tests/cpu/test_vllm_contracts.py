"""What our adapters rely on in the vLLM that is installed: its signatures, its metadata, its FlashMLA classes."""

import ast
import dataclasses
import importlib
import importlib.metadata
import inspect
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import vllm
from vllm.distributed import parallel_state
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention import backend as theirs
from vllm.v1.attention.backends import registry, triton_attn
from vllm.v1.attention.backends import utils as theirs_utils
from vllm.v1.attention.backends.mla import flashmla_sparse

import fp8_mla
from cute_kernels.compat import flash_mla
from cute_kernels.integrations import vllm as cute_vllm
from cute_kernels.integrations.padded_heads import V4Decode
from cute_kernels.integrations.vllm import calls, context_parallel, gqa, sparse_mla, v4
from cute_kernels.integrations.vllm.backends import Function, moved
from cute_kernels.integrations.vllm.context_parallel import Ranks
from cute_kernels.integrations.vllm.prompts import FEW
from tests.kit.flash_stand_in import FlashStandIn
from tests.kit.v4_layers import REAL_HEADS, v4_call
from tests.kit.vllm_batches import HEADS, KV_HEADS, LIMITS, draw_batch, empty_cache
from tests.kit.vllm_fakes import builder, common, global_indices, sparse_mla_layer

ROOT = Path(__file__).resolve().parents[2]
NEW_CACHES = not hasattr(theirs.AttentionBackend, "get_kv_cache_shape")
"""Whether this vLLM asks for `customize_spec` (0.33), or for shapes of caches (0.26)."""


def test_4_bit_codes_are_those_of_vllm() -> None:
    """Of its Triton kernel, which an interpreter runs on a CPU."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.kit.vllm_int4"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert "the same bits" in done.stdout, done.stdout + done.stderr


# ---- signatures


KERNEL = ("self", "q", "kv_c_and_k_pe_cache", "topk_indices", "kernel_metadata")
UPSTREAM: list[Function] = [
    (registry, "register_backend", "backend class_path ..."),
    *gqa.EXTENDS,
    *sparse_mla.EXTENDS,
]


@pytest.mark.parametrize("function", UPSTREAM, ids=lambda function: f"{function[0].__name__}.{function[1]}")
def test_functions_of_vllm_are_where_they_were(function: Function) -> None:
    assert moved([function]) == [], f"vLLM {vllm.__version__}"


OURS = {
    triton_attn.TritonAttentionImpl: gqa.CuteAttentionImpl,
    triton_attn.TritonAttentionMetadataBuilder: gqa.CuteAttentionMetadataBuilder,
    triton_attn.TritonAttentionBackend: gqa.CuteAttentionBackend,
    flashmla_sparse.FlashMLASparseImpl: sparse_mla.CuteFlashMLASparseImpl,
    flashmla_sparse.FlashMLASparseMetadataBuilder: sparse_mla.CuteFlashMLASparseMetadataBuilder,
    flashmla_sparse.FlashMLASparseBackend: sparse_mla.CuteFlashMLASparseBackend,
}


@pytest.mark.parametrize("base, ours", OURS.items(), ids=lambda cls: cls.__name__)
def test_each_call_of_what_is_replaced_is_one_of_ours(base: Any, ours: Any) -> None:
    for name, value in vars(ours).items():
        replaced = getattr(base, name, None)
        if isinstance(value, property) or not callable(replaced):
            continue
        mine, his = (inspect.signature(f).parameters for f in (getattr(ours, name), replaced))
        named = [n for n, p in mine.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        count = len(his) if len(named) == len(mine) else len(named)  # others may follow where ours takes them
        assert named[:count] == list(his)[:count], f"vLLM {vllm.__version__}: {name} takes {list(his)}"


def test_fields_that_are_read_are_there() -> None:
    common = {field.name for field in dataclasses.fields(theirs.CommonAttentionMetadata)}
    read = {"query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu_upper_bound", "num_reqs",
            "num_actual_tokens", "block_table_tensor", "slot_mapping", "causal", "dcp_local_seq_lens"}  # fmt: skip
    assert read <= common, f"vLLM {vllm.__version__} has no {sorted(read - common)}"
    batch = {field.name for field in dataclasses.fields(triton_attn.TritonAttentionMetadata)}
    read = {"num_actual_tokens", "query_start_loc", "seq_lens", "block_table"}
    assert read <= batch, f"vLLM {vllm.__version__} has no {sorted(read - batch)}"


def test_flash_attention_takes_what_prompts_pass() -> None:
    """All by keyword. Its module is read as text: where there is no GPU it cannot be imported."""
    file = Path(vllm.__file__).parent / "vllm_flash_attn" / "flash_attn_interface.py"
    functions = [node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)]
    (found,) = (node for node in functions if node.name == "flash_attn_varlen_func")
    taken = {argument.arg for argument in found.args.args}
    batch, flash = draw_batch([20, 5], [20, 5], 16), FlashStandIn()
    layer = calls.GqaCalls(HEADS, KV_HEADS, 64, 0.125, "auto", softcap=30.0, flash=flash)
    layer.prefill_fresh(batch.query, batch.keys, batch.values, batch.starts, 20, torch.empty_like(batch.query))
    passed = {"q", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table", *flash.calls[0]}
    assert passed <= taken, f"vLLM {vllm.__version__} has no {sorted(passed - taken)}"
    version = importlib.import_module("vllm.v1.attention.backends.fa_utils").get_flash_attn_version
    assert {"requires_alibi", "head_size"} <= set(inspect.signature(version).parameters)


def test_nothing_abstract_is_left() -> None:
    for ours in (gqa.CuteAttentionBackend, gqa.CuteAttentionImpl, gqa.CuteAttentionMetadataBuilder,
                 sparse_mla.CuteFlashMLASparseBackend, sparse_mla.CuteFlashMLASparseImpl):  # fmt: skip
        assert not getattr(ours, "__abstractmethods__", None)


# ---- what is registered and selected


@pytest.fixture
def places() -> Any:
    """Both places of vLLM's registry, empty before and after."""
    both = (registry.AttentionBackendEnum.CUSTOM, registry.AttentionBackendEnum.FLASHMLA_SPARSE)
    for place in both:
        place.clear_override()
    yield both
    for place in both:
        place.clear_override()


def test_the_plugin_registers_both_backends(places: Any) -> None:
    for _ in range(2):
        cute_vllm.register()
    custom, sparse = places
    assert custom.get_class() is gqa.CuteAttentionBackend
    assert sparse.get_class() is sparse_mla.CuteFlashMLASparseBackend
    assert registry.AttentionBackendEnum[gqa.CuteAttentionBackend.get_name()] is custom
    assert registry.AttentionBackendEnum[sparse.get_class().get_name()] is sparse


def test_vllm_finds_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its entry point, which there is where the project is installed, as `make test-vllm` does."""
    names = {point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")}
    if "cute_kernels" not in names:
        pytest.skip("the project is not installed")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    load = importlib.import_module("vllm.plugins").load_plugins_by_group
    assert load("vllm.general_plugins")["cute_kernels"] is cute_vllm.register
    monkeypatch.setenv("VLLM_PLUGINS", "")
    assert load("vllm.general_plugins") == {}


def wrong(**changes: Any) -> list[str]:
    """Why vLLM does not select our GQA backend for a layer that it could serve but for `changes`."""
    given = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16, "use_mla": False,
        "has_sink": True, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0), "attn_type": "decoder", "has_sliding_window": True,
    } | changes  # fmt: skip
    return gqa.CuteAttentionBackend.validate_configuration(**given)


@pytest.mark.parametrize(
    "changes",
    [
        *({"kv_cache_dtype": name} for name in ("auto", "bfloat16", "fp8", "fp8_e4m3", *calls.SCALED)),
        *({"block_size": size} for size in (16, 32, 48, 64, 128, 256, 512)),
        *({"head_size": size} for size in (64, 256, 512)),
        {"dtype": torch.float16, "kv_cache_dtype": "float16"},
    ],
)
def test_what_is_served(changes: dict[str, Any]) -> None:
    assert wrong(**changes) == []


def test_a_batch_invariant_server_is_served() -> None:
    assert gqa.CuteAttentionBackend.supports_batch_invariance()
    assert not sparse_mla.CuteFlashMLASparseBackend.supports_batch_invariance(), "the list of keys is not ours"


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_cache_dtype": "fp8_e5m2"},
        {"kv_cache_dtype": calls.INT4, "head_size": 512},
        {"kv_cache_dtype": "float16"},
        {"head_size": 80},
        {"block_size": 24},
        {"dtype": torch.float32},
        {"device_capability": DeviceCapability(10, 0)},
        {"device_capability": DeviceCapability(8, 0)},
        {"attn_type": "encoder_only"},
        {"use_mm_prefix": True},
        {"use_non_causal": True},
        {"use_per_head_quant_scales": True},
    ],
)
def test_what_is_not_served(changes: dict[str, Any]) -> None:
    assert len(wrong(**changes)) == 1


@pytest.mark.skipif(NEW_CACHES, reason="this vLLM asks for customize_spec")
def test_shapes_of_caches() -> None:
    """Those that views are made of: vLLM's own."""
    shape = gqa.CuteAttentionBackend.get_kv_cache_shape
    assert shape(10, 32, 8, 128, calls.FP8_SCALED) == (10, 8, 32, calls.scaled_token_bytes(128))
    assert shape(10, 32, 8, 128, calls.INT8) == (10, 8, 32, calls.scaled_token_bytes(128))
    assert shape(10, 32, 8, 128, calls.INT4) == (10, 8, 32, calls.scaled_token_bytes(128, torch.uint8))
    assert shape(10, 32, 8, 128, "auto") == shape(10, 32, 8, 128, "fp8") == (10, 8, 32, 256)


@pytest.mark.skipif(not NEW_CACHES, reason="this vLLM asks for shapes of caches")
def test_specifications_of_caches() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

    given = FullAttentionSpec(
        block_size=32, num_kv_heads=8, head_size=128, dtype=torch.int8, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD
    )
    ours = gqa.CuteAttentionBackend.customize_spec(given)
    assert ours.num_heads == 8 and ours.state_content_size_bytes == calls.scaled_token_bytes(128)


@pytest.mark.skipif(NEW_CACHES, reason="this vLLM does not ask")
@pytest.mark.parametrize("block_size, padded", [(16, True), (256, True), (48, False), (512, False), (528, False)])
def test_blocks_that_are_split_into_pages_are_not_padded(
    block_size: int, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM would take a block's distance for that of its pages."""
    config = types.SimpleNamespace(cache_config=types.SimpleNamespace(block_size=block_size))
    monkeypatch.setattr(gqa, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(triton_attn, "get_kv_cache_layout", lambda: "NHD")
    assert gqa.CuteAttentionBackend.indexes_kv_by_block_stride() is padded


# ---- metadata


def test_a_batch_that_decodes() -> None:
    batch = draw_batch([40, 17, 9], [1, 1, 1], 16)
    m = builder().build(0, common(batch))
    assert (m.num_decodes, m.num_decode_tokens, m.prefill, m.fresh) == (3, 3, None, False)


def test_a_batch_padded_for_a_graph() -> None:
    """Speculation: two requests of 3 tokens in a graph for four; its tokens are padded as well."""
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
    """Its chunked attention splits requests, and the lengths on the host may stay those of the whole ones."""

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
    """Parallel drafting gives each request more queries, but leaves the lengths on the host: 20 of 40 look like all."""
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
    """A batch of drafts alone would decode them, and a mixed one not."""
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
    """Contexts that copies have no room for as a whole do not run on copies: where they are cut is a batch's affair."""
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
    """Metadata by the builder, tokens stored and attended by the layer, against float64.

    Prompts run on what they run on here and, with a stand-in, on a GPU.
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
    """In the model's parameter, as a load in place writes them, and in a parameter that takes its place."""
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
    """As its runner does after measuring the memory of graphs: by an attribute of its own backends."""
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
    """VLLM's Triton kernel reads INT4 from its own page; a CPU has no FlashAttention, and runs them in pieces."""
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
    """A group of vLLM's, seen from its second rank; both have the same tensors."""

    world_size, rank_in_group, device_group = 2, 1, None

    def all_gather(self, t: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([t, t], dim=dim)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are made share the keys of requests with another rank."""
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
    """Decoding and prompts go to the ranks, with the lengths that vLLM says this one has."""
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


# ---- sparse MLA


def sm90(monkeypatch: pytest.MonkeyPatch, capability: DeviceCapability | None) -> None:
    platform = types.SimpleNamespace(get_device_capability=lambda: capability)
    monkeypatch.setattr(sparse_mla, "current_platform", platform)


def test_sparse_mla_is_ours_on_sm90_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(sparse_mla.logger, "info_once", lambda text, *args: said.append(text % args), raising=False)
    backend = sparse_mla.CuteFlashMLASparseBackend
    for capability, words in ((DeviceCapability(10, 0), "10.0; needs 9.0"), (None, "unknown; needs 9.0")):
        sm90(monkeypatch, capability)
        assert backend.get_impl_cls() is flashmla_sparse.FlashMLASparseImpl
        assert said.pop().endswith(words)
    sm90(monkeypatch, DeviceCapability(9, 0))
    assert backend.get_impl_cls() is sparse_mla.CuteFlashMLASparseImpl and said == []
    assert sparse_mla.inactive_because("fp8_ds_mla") is None
    assert sparse_mla.inactive_because("auto") == "a KV cache of auto; needs --kv-cache-dtype fp8"
    assert backend.get_name() == "FLASHMLA_SPARSE"
    assert backend.get_builder_cls() is sparse_mla.CuteFlashMLASparseMetadataBuilder


def test_a_layer_says_once_whether_it_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(sparse_mla.logger, "info_once", lambda text, *args: said.append(text % args), raising=False)
    sm90(monkeypatch, DeviceCapability(9, 0))

    def init(self: Any, kv_cache_dtype: str) -> None:
        self.kv_cache_dtype, self.num_heads = kv_cache_dtype, 16

    monkeypatch.setattr(flashmla_sparse.FlashMLASparseImpl, "__init__", init)
    monkeypatch.setattr(flashmla_sparse.FlashMLASparseImpl, "__new__", lambda cls, *args: object.__new__(cls))
    for cache in ("fp8_ds_mla", "auto"):
        sparse_mla.CuteFlashMLASparseImpl(cache)
    assert said == [
        "cute-kernels: sparse MLA of 16 heads runs on mla_fp8_decode (VLLM_PLUGINS= turns it off)",
        "cute-kernels: sparse MLA runs on vLLM's kernels: a KV cache of auto; needs --kv-cache-dtype fp8",
    ]


@pytest.mark.parametrize("heads", [8, 16, 20, 128])
def test_vllms_metadata_drives_sparse_mla(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM's own forward over the 656 bytes: below 32 heads all tokens as one sequence, else two tokens a request."""
    monkeypatch.setattr(flashmla_sparse, "triton_convert_req_index_to_global_index", global_indices)
    layer = sparse_mla_layer(sparse_mla.CuteFlashMLASparseImpl, heads)
    out, lse = layer.forward()
    indices = global_indices(
        layer.metadata.req_id_per_token, layer.metadata.block_table, layer.impl.topk_indices_buffer, BLOCK_SIZE=64
    )
    expected, expected_lse = fp8_mla.reference_decode(
        layer.q.unsqueeze(1), layer.cache, indices=indices.unsqueeze(1), softmax_scale=0.1
    )
    torch.testing.assert_close(out.double(), expected[:, 0].double(), rtol=2**-7, atol=2**-7)
    if lse is not None:  # 0.33, for context parallelism
        torch.testing.assert_close(lse.double(), expected_lse[:, 0].double(), rtol=1e-5, atol=1e-5)


# ---- DeepSeek-V4 and HY-V4

MODELS = {"vllm.models.deepseek_v4": True, "vllm.models.deepseek_v41": NEW_CACHES, "vllm.models.hy_v4": NEW_CACHES}
"""Whether this vLLM has the model: 0.26 has the first, 0.33 all."""
V4_MODULES = [name for name in v4.CHANGES if v4.CHANGES[name] is v4.change_deepseek_v4]
(HY_V4_MODULE,) = [name for name in v4.CHANGES if name not in V4_MODULES]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(v4, "say_once", lines.append)
    return lines


def imported(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of a model, newly changed as by the plugin until the test ends."""
    if not MODELS[name.rsplit(".", 2)[0]]:
        pytest.skip("only vLLM 0.33 has this model")
    module = importlib.import_module(name)
    function = getattr(module, v4.FLASH_MLA)
    monkeypatch.setattr(module, v4.FLASH_MLA, getattr(function, "original", function))
    for owner, attribute in ((v4.V4_CLASS, v4.V4_METHOD), (v4.HY_V4_CLASS, v4.HY_V4_METHOD)):
        if hasattr(module, owner):  # undone if the plugin was there before
            method = getattr(getattr(module, owner), attribute)
            monkeypatch.setattr(getattr(module, owner), attribute, getattr(method, "__wrapped__", method))
    v4.CHANGES[name](module)
    return module


def test_flash_mla_takes_nothing_that_ours_does_not() -> None:
    file = Path(str(vllm.__file__)).parent / "third_party" / "flashmla" / "flash_mla_interface.py"
    (function,) = [
        node
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name == v4.FLASH_MLA
    ]
    theirs = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
    ours = list(inspect.signature(flash_mla.flash_mla_with_kvcache).parameters)
    assert ours[: len(theirs)] == theirs, f"vLLM {vllm.__version__}"


@pytest.mark.parametrize("name", V4_MODULES)
def test_classes_of_v4_are_where_they_were(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = imported(name, monkeypatch)
    layer = getattr(module, v4.V4_CLASS)
    assert isinstance(getattr(module, v4.FLASH_MLA), V4Decode)
    assert moved([(layer, "forward_mqa", "self q kv positions output ...")]) == []
    assert moved([(layer, "get_padded_num_q_heads", "num_heads ...")]) == []
    assert [layer.get_padded_num_q_heads(heads) for heads in (8, 64, 65, 128)] == [64, 64, 128, 128]
    base = inspect.getsource(layer.__mro__[1])
    assert "self.n_local_heads = " in base, f"vLLM {vllm.__version__}: nothing assigns n_local_heads"
    reads = base + inspect.getsource(importlib.import_module(f"{name.rsplit('.', 1)[0]}.ops.o_proj"))
    assert "_heads, :]" in reads, f"vLLM {vllm.__version__}: padded heads of the output are read"


def test_the_class_of_hy_v4_is_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = getattr(imported(HY_V4_MODULE, monkeypatch), v4.HY_V4_CLASS)
    kernel = getattr(layer, v4.HY_V4_METHOD)
    assert tuple(inspect.signature(kernel.__wrapped__).parameters) == KERNEL and kernel.__wrapped__ is not kernel
    assert moved([(layer, "_sinks_for_query", "self q head_dim kernel_heads ...")]) == []


def test_the_sparse_indexer_asks_what_we_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    from cute_kernels.integrations.vllm import indexer

    ((name, change),) = indexer.CHANGES.items()
    module = importlib.import_module(name)
    asks = indexer.GET_TOPK if hasattr(module, indexer.GET_TOPK) else "torch"
    originals = {key: getattr(module, key) for key in (indexer.LOGITS, asks)}
    for key, original in originals.items():
        monkeypatch.setattr(module, key, original)
    change(module)
    stays = [key for key, original in originals.items() if getattr(module, key) is original]
    assert stays == [], f"vLLM {vllm.__version__}"


@pytest.mark.parametrize("extra", [True, False], ids=["compressed", "window"])
@pytest.mark.parametrize("heads", REAL_HEADS)
@pytest.mark.parametrize("name", V4_MODULES)
def test_vllms_metadata_drives_v4(
    name: str, heads: int, extra: bool, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """VLLM's own `forward_mqa` of a batch that decodes, over its 584 bytes."""
    module, call = imported(name, monkeypatch), v4_call(heads, extra)
    case, tokens = call.case, len(call.q)
    layer = object.__new__(getattr(module, v4.V4_CLASS))
    torch.nn.Module.__init__(layer)
    is_41 = "v41" in name
    layer.compress_ratio = (2 if is_41 else 128) if extra else (0 if is_41 else 1)
    layer.n_local_heads, layer.scale, layer.attn_sink = heads, case.softmax_scale, case.s_aux
    layer.prefix, layer.kv_cache, layer.use_pcp = "layer", case.extra_kv_cache, False
    layer.swa_cache_layer = types.SimpleNamespace(prefix="window", kv_cache=case.kv_cache)
    layer.topk_indices_buffer = torch.zeros(tokens, 1, dtype=torch.int32)
    layer.compressed_cache_prefix, layer._compressed_kv_cache = "layer", lambda: case.extra_kv_cache
    window = types.SimpleNamespace(
        num_decodes=tokens, num_prefills=0, num_decode_tokens=tokens, num_prefill_tokens=0, token_to_req_indices=None,
        is_valid_token=torch.ones(tokens, dtype=torch.bool), decode_swa_indices=case.indices,
        decode_swa_lens=case.topk_length,
        **{f"tile_sched_{kind}": object() for kind in ("swaonly", "c1a", "c2a", "c4a", "c128a")},
    )  # fmt: skip
    compressed = types.SimpleNamespace(
        block_size=256, block_table=torch.zeros(tokens, 1, dtype=torch.int32),
        c128a_global_decode_topk_indices=case.extra_indices, c128a_decode_topk_lens=case.extra_topk_length,
    )  # fmt: skip
    context = types.SimpleNamespace(attn_metadata={"layer": compressed if extra else None, "window": window})
    monkeypatch.setattr(module, "get_forward_context", lambda: context)
    monkeypatch.setattr(  # a Triton kernel
        module, "compute_global_topk_indices_and_lens", lambda *args: (case.extra_indices, case.extra_topk_length)
    )
    output = call.output()
    layer.forward_mqa(call.q, None, None, output)
    call.check(output)
    assert bool(output[:, heads:].isnan().all())
    assert said == [f"DeepSeek-V4 decoding of {heads} heads runs on mla_fp8_decode"]


@pytest.mark.parametrize("heads", [8, 20, 64])
def test_vllms_metadata_drives_hy_v4(heads: int, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    module = imported(HY_V4_MODULE, monkeypatch)
    monkeypatch.setattr(flashmla_sparse, "triton_convert_req_index_to_global_index", global_indices)
    layer = sparse_mla_layer(getattr(module, v4.HY_V4_CLASS), heads)
    layer.impl.sinks = torch.linspace(-1, 4, heads)
    out, _ = layer.forward()
    indices = global_indices(
        layer.metadata.req_id_per_token, layer.metadata.block_table, layer.impl.topk_indices_buffer, BLOCK_SIZE=64
    )
    expected, _ = fp8_mla.reference_decode(
        layer.q.unsqueeze(1), layer.cache, indices=indices.unsqueeze(1), softmax_scale=0.1, s_aux=layer.impl.sinks
    )
    torch.testing.assert_close(out.double(), expected[:, 0].double(), rtol=2**-7, atol=2**-7)
    assert said == [f"sparse MLA of HY-V4 with {heads} heads runs on mla_fp8_decode"]
