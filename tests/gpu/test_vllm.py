"""vLLM's layers on a GPU: our pages and operators, vLLM's Triton kernels over our pages, sparse MLA, CUDA graphs.

The first tests need no vLLM; the others are skipped without it.
"""

import types
from typing import Any

import pytest
import torch

import fp8_mla
from cute_kernels.integrations.vllm import calls
from cute_kernels.integrations.vllm.calls import INT8, GqaCalls, sparse_mla
from cute_kernels.runtime.cache import KernelSpec
from cute_kernels.runtime.compile import precompile
from cute_kernels.warm import MlaShape
from cute_kernels.warm import kernel_specs as specs_of
from tests.kit.compare import relative_error
from tests.kit.graphs import capture
from tests.kit.vllm_batches import HEADS, KV_HEADS, LIMITS, Batch, draw_batch, empty_cache

DEVICE = "cuda"
HEADS_OF_MLA = (8, 16, 20, 64, 128)


def kernel_specs() -> list[KernelSpec]:
    """Most kernels of the tests below; the others are compiled when they are needed."""
    specs: list[KernelSpec] = []
    for name in LIMITS:
        layer = GqaCalls(HEADS, KV_HEADS, 64, 0.125, name)
        for page_size in (16, 32, 64, 128, 256):
            shapes = layer.shapes(torch.bfloat16, page_size, 768)
            specs += specs_of(*shapes, batch_sizes=(2, 3, 4), query_tokens=(1, 3, 4, 8))
    sparse = [MlaShape(heads, 128, append=False) for heads in HEADS_OF_MLA]
    return specs + specs_of(*sparse, batch_sizes=(4, 7, 8), query_tokens=(1, 2))


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Replaces the fixture that compiles all kernels of tests/gpu: scripts/vllm_check.py runs this file alone."""
    precompile(kernel_specs())


def filled(layer: GqaCalls, batch: Batch, page_size: int) -> torch.Tensor:
    kv_cache = empty_cache(batch.pages, page_size, layer.cache_dtype, DEVICE)
    append = layer.append_plain if layer.kind is None else layer.append_scaled
    append(batch.keys, batch.values, layer.views(kv_cache, *batch.scales), batch.all_slots)
    return kv_cache


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("cache_dtype", LIMITS)
def test_pages_decode(cache_dtype: str, page_size: int) -> None:
    batch = draw_batch([700, 17, 300], [3, 3, 3], page_size).to(DEVICE)
    s_aux = torch.linspace(-1, 2, HEADS, dtype=torch.float32, device=DEVICE)
    layer = GqaCalls(HEADS, KV_HEADS, 64, 0.125, cache_dtype, window=200, s_aux=s_aux)
    out = torch.full_like(batch.query, torch.nan)
    views = layer.views(filled(layer, batch, page_size), *batch.scales)
    layer.decode(batch.query, views, batch.seq_lens, batch.block_table, out)
    assert batch.error(out, 200, s_aux) < LIMITS[cache_dtype]


def test_int8_codes_are_those_of_a_cpu() -> None:
    batch = draw_batch([70, 17], [1, 1], 16)
    layer = GqaCalls(HEADS, KV_HEADS, 64, 0.125, INT8)
    on_cpu = empty_cache(batch.pages, 16, INT8)
    layer.append_scaled(batch.keys, batch.values, layer.views(on_cpu), batch.all_slots)
    on_gpu = filled(GqaCalls(HEADS, KV_HEADS, 64, 0.125, INT8), batch.to(DEVICE), 16)
    assert torch.equal(on_gpu.cpu(), on_cpu)


@pytest.mark.parametrize("heads", [8, 20, 128])
def test_sparse_mla_takes_tokens_as_a_batch(heads: int) -> None:
    torch.manual_seed(0)
    cache = fp8_mla.pack(torch.randn(4, 64, 576, dtype=torch.float32, device="cpu").bfloat16()).to(DEVICE)
    q = torch.randn(1, 7, heads, 576, dtype=torch.float32, device=DEVICE).bfloat16()
    indices = torch.randint(-1, 256, (1, 7, 128), dtype=torch.int32, device=DEVICE)
    out, lse = sparse_mla(q, cache, indices, 0.1)
    expected, expected_lse = fp8_mla.reference_decode(q, cache, indices=indices, softmax_scale=0.1)
    torch.testing.assert_close(out.double(), expected.double(), rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(lse.transpose(1, 2).double(), expected_lse.double(), rtol=1e-3, atol=1e-3)


# ---- with vLLM


@pytest.fixture(scope="module")
def fakes() -> Any:
    pytest.importorskip(
        "vllm.v1.attention.backend", reason="needs vLLM and its packages: scripts/vllm_check.py says how"
    )
    from tests.kit import vllm_fakes

    return vllm_fakes


def layer_of(
    kv_cache_dtype: str, window: int | None, sinks: torch.Tensor | None, softcap: float | None = None
) -> Any:  # fmt: skip
    """A layer as vLLM makes it."""
    from cute_kernels.integrations.vllm.gqa import CuteAttentionImpl

    impl = CuteAttentionImpl(HEADS, 64, 0.125, KV_HEADS, None, window, kv_cache_dtype, softcap, sinks=sinks)
    assert impl.calls.flash is not None
    impl.process_weights_after_loading(torch.bfloat16)
    return impl


def layer_scales() -> Any:
    one = torch.ones((), dtype=torch.float32, device=DEVICE)
    return types.SimpleNamespace(_k_scale=one, _v_scale=one, _q_scale=one)


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("window, sinks", [(None, False), (20, True)])
@pytest.mark.parametrize("kv_cache_dtype", LIMITS)
@pytest.mark.parametrize(
    "lengths, queries",
    [([400, 17, 9], [1, 1, 1]), ([400, 17, 300, 25], [1, 1, 300, 10]), ([300, 25], [300, 25]), ([500, 33], [200, 5])],
    ids=["decode", "mixed", "fresh", "continued"],
)
def test_a_layer_attends(
    lengths: list[int], queries: list[int], kv_cache_dtype: str, window: int | None, sinks: bool, page_size: int,
    fakes: Any,
) -> None:  # fmt: skip
    """The layer does all that it does in the engine, with those of vLLM's kernels that take part."""
    batch = draw_batch(lengths, queries, page_size).to(DEVICE)
    s_aux = torch.linspace(-1, 2, HEADS, dtype=torch.float32, device=DEVICE).bfloat16() if sinks else None
    impl = layer_of(kv_cache_dtype, window, s_aux)
    out, ran = attended(impl, batch, kv_cache_dtype, page_size, fakes)
    assert batch.error(out, window, None if s_aux is None else s_aux.float()) < LIMITS[kv_cache_dtype]
    assert ran == (max(queries) > 1 and queries != lengths), "calls of FlashAttention"


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("kv_cache_dtype", LIMITS)
def test_prompts_in_parts(kv_cache_dtype: str, sinks: bool, fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy has 32 pages. A long context comes in five merged parts, two short contexts in one call.

    Another context has so few tokens that it is decoded.
    """
    monkeypatch.setattr(calls, "COPY_BYTES", 32 * 2 * 2 * KV_HEADS * 64 * 16)
    batch = draw_batch([9, 2500, 200, 170, 99], [1, 150, 60, 40, 20], 16).to(DEVICE)
    s_aux = torch.linspace(-1, 2, HEADS, dtype=torch.float32, device=DEVICE).bfloat16() if sinks else None
    out, ran = attended(layer_of(kv_cache_dtype, None, s_aux), batch, kv_cache_dtype, 16, fakes)
    assert batch.error(out, None, None if s_aux is None else s_aux.float()) < LIMITS[kv_cache_dtype]
    assert ran == (1 if kv_cache_dtype == "auto" else 6)


@pytest.mark.parametrize("tokens", [9, 16, 23, 24])
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", INT8])
def test_prompts_of_few_tokens(kv_cache_dtype: str, tokens: int, fakes: Any) -> None:
    batch = draw_batch([700, 40, 33], [tokens, tokens, 4], 16).to(DEVICE)
    out, ran = attended(layer_of(kv_cache_dtype, 300, None), batch, kv_cache_dtype, 16, fakes)
    assert batch.error(out, 300) < LIMITS[kv_cache_dtype] and ran == 0


@pytest.mark.parametrize("queries", [[300, 25], [200, 5]], ids=["fresh", "continued"])
@pytest.mark.parametrize("kv_cache_dtype", LIMITS)
def test_prompts_with_a_softcap(kv_cache_dtype: str, queries: list[int], fakes: Any) -> None:
    batch = draw_batch([300, 25], queries, 16).to(DEVICE)
    out, ran = attended(layer_of(kv_cache_dtype, None, None, softcap=1.0), batch, kv_cache_dtype, 16, fakes)
    assert batch.error(out, None, softcap=1.0) < LIMITS[kv_cache_dtype] and ran == 1


def attended(
    impl: Any, batch: Batch, kv_cache_dtype: str, page_size: int, fakes: Any
) -> tuple[torch.Tensor, int]:  # fmt: skip
    """The output of a layer for a batch whose earlier tokens are stored first, and its calls of FlashAttention."""
    layer, flash, ran = layer_scales(), impl.calls.flash, 0

    def counted(**arguments: Any) -> Any:
        nonlocal ran
        ran += 1
        return flash(**arguments)

    impl.calls.flash = counted
    kv_cache = empty_cache(batch.pages, page_size, kv_cache_dtype, DEVICE)
    new = torch.isin(batch.all_slots, batch.slots)
    old = ~new
    impl.do_kv_cache_update(layer, batch.keys[old], batch.values[old], kv_cache, batch.all_slots[old])
    key, value = batch.keys[new], batch.values[new]
    impl.do_kv_cache_update(layer, key, value, kv_cache, batch.slots)
    out = torch.full_like(batch.query, torch.nan)
    metadata = fakes.builder(device=DEVICE).build(0, fakes.common(batch))
    impl.forward(layer, batch.query, key, value, kv_cache, metadata, out)
    return out, ran


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("kv_cache_dtype", LIMITS)
def test_a_graph_of_a_layer_serves_other_batches(kv_cache_dtype: str, drafts: int, fakes: Any) -> None:
    """The graph is captured with four requests; replays have other lengths, pages and tokens, and two padding rows."""
    count = 1 + drafts
    captured = draw_batch([64] * 4, [count] * 4, 16).to(DEVICE)
    impl, layer = layer_of(kv_cache_dtype, None, None), layer_scales()
    kv_cache = empty_cache(captured.pages, 16, kv_cache_dtype, DEVICE)
    builder = fakes.builder(drafts, DEVICE)
    metadata = builder.build_for_cudagraph_capture(fakes.common(captured))
    assert metadata.num_decode_tokens == 4 * count
    query, out = captured.query, torch.empty_like(captured.query)
    key, value = (t[: 4 * count].clone() for t in (captured.keys, captured.values))
    slots = captured.slots

    def step() -> None:
        impl.do_kv_cache_update(layer, key, value, kv_cache, slots)
        impl.forward(layer, query, key, value, kv_cache, metadata, out)

    graph, _ = capture(step)
    for seed, real in ((1, 4), (2, 2)):
        batch = draw_batch([60, 33, 9, 50][:real], [count] * real, 16, seed).to(DEVICE)
        new = torch.isin(batch.all_slots, batch.slots)
        old = ~new
        impl.do_kv_cache_update(layer, batch.keys[old], batch.values[old], kv_cache, batch.all_slots[old])
        tokens = real * count
        for persistent, values in (
            (metadata.seq_lens, batch.seq_lens), (metadata.block_table, batch.block_table),
            (query, batch.query), (key, batch.keys[new]), (value, batch.values[new]), (slots, batch.slots),
        ):  # fmt: skip
            persistent[: len(values)] = values
        metadata.seq_lens[real:] = 0
        metadata.block_table[real:] = 0
        slots[tokens:] = -1
        graph.replay()
        assert batch.error(out[:tokens], None) < LIMITS[kv_cache_dtype]
        assert not out[tokens:].any()


@pytest.mark.parametrize("heads", HEADS_OF_MLA)
def test_sparse_mla_beside_flashmla(heads: int, fakes: Any) -> None:
    """VLLM's metadata drives both. Both must be near float64; ours runs without padded heads."""
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseImpl

    from cute_kernels.integrations.vllm.sparse_mla import CuteFlashMLASparseImpl

    classes = (CuteFlashMLASparseImpl, FlashMLASparseImpl)
    ours, theirs = (fakes.sparse_mla_layer(cls, heads, device=DEVICE) for cls in classes)
    m = ours.metadata
    indices = fakes.global_indices(m.req_id_per_token, m.block_table, ours.impl.topk_indices_buffer, BLOCK_SIZE=64)
    expected, expected_lse = fp8_mla.reference_decode(
        ours.q.unsqueeze(1), ours.cache, indices=indices.unsqueeze(1), softmax_scale=0.1
    )
    out, lse = ours.forward()
    torch.testing.assert_close(out.double(), expected[:, 0].double(), rtol=2**-7, atol=2**-7)
    if lse is not None:
        torch.testing.assert_close(lse.double(), expected_lse[:, 0].double(), rtol=1e-3, atol=1e-3)
    graph, (replayed, _) = capture(ours.forward)
    graph.replay()
    assert torch.equal(replayed, out)
    other, _ = theirs.forward()
    errors = [relative_error(result.double(), expected[:, 0].double()) for result in (out, other)]
    assert errors[0] <= errors[1] <= 2e-2  # FlashMLA rounds keys and scales to bfloat16
