"""FlashMLA's interface: arguments translated, lse in its form, refusals in a sentence."""

import inspect
import math
import sys
from types import ModuleType

import pytest
import torch

import cute_kernels.compat.flash_mla as flash_mla
import fp8_mla

BATCH, S_Q, H_Q, PAGE_SIZE = 3, 2, 4, 8


@pytest.fixture
def case():
    """Queries, a cache of 6 pages, its block table and lengths; the last sequence is empty."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(BATCH, S_Q, H_Q, 576, generator=generator).bfloat16()
    k_cache = fp8_mla.pack(torch.randn(6, PAGE_SIZE, 1, 576, generator=generator)).view(torch.float8_e4m3fn)
    block_table = torch.tensor([[0, 5], [3, 1], [2, 4]], dtype=torch.int32)
    cache_seqlens = torch.tensor([16, 9, 0], dtype=torch.int32)
    return q, k_cache, block_table, cache_seqlens


@pytest.fixture
def indices():
    """Slots of 7 keys a query with gaps; the last sequence has none."""
    slots = torch.randint(0, 6 * PAGE_SIZE, (BATCH, S_Q, 7), generator=torch.Generator().manual_seed(1))
    slots[:, :, 3] = -1
    slots[2] = -1
    return slots.int()


@pytest.fixture
def calls(monkeypatch):
    """Puts a recorder in the place of `mla_fp8_decode`, so that a test sees exactly what is passed on."""
    recorded = []

    def recorder(q, kv_cache, *, return_lse=False, out=None, **arguments):
        recorded.append({"q": q, "kv_cache": kv_cache, "return_lse": return_lse, "out": out, **arguments})
        result, lse = fp8_mla.reference_decode(q, kv_cache, **arguments)
        out = torch.empty_like(result, dtype=torch.bfloat16) if out is None else out
        return out.copy_(result), lse.float()

    module = ModuleType("cute_kernels.mla.op")
    vars(module)["mla_fp8_decode"] = recorder
    monkeypatch.setitem(sys.modules, "cute_kernels.mla.op", module)
    return recorded


def assert_flash_mla_result(got, q, k_cache, **arguments):
    """`got` is the reference's result in FlashMLA's form."""
    out, lse = got
    expected, expected_lse = fp8_mla.reference_decode(q, k_cache, **arguments)
    assert out.dtype == torch.bfloat16 and out.shape == (*q.shape[:3], 512)
    assert lse.dtype == torch.float32 and lse.shape == (q.shape[0], q.shape[2], q.shape[1]) and lse.is_contiguous()
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-6)
    expected_lse = torch.where(expected_lse == -math.inf, math.inf, expected_lse).transpose(1, 2)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)


def test_signature_is_flash_mlas():
    assert list(inspect.signature(flash_mla.flash_mla_with_kvcache).parameters) == [
        "q",
        "k_cache",
        "block_table",
        "cache_seqlens",
        "head_dim_v",
        "tile_scheduler_metadata",
        "num_splits",
        "softmax_scale",
        "causal",
        "is_fp8_kvcache",
        "indices",
        "attn_sink",
        "extra_k_cache",
        "extra_indices_in_kvcache",
        "topk_length",
        "extra_topk_length",
        "out",
    ]


def test_metadata_of_both_interfaces():
    metadata, num_splits = flash_mla.get_mla_metadata()
    assert isinstance(metadata, flash_mla.FlashMLASchedMeta) and num_splits is None
    seqlens = torch.tensor([5, 0, 700], dtype=torch.int32)
    for metadata, num_splits in (
        flash_mla.get_mla_metadata(seqlens, S_Q * H_Q, 1),
        flash_mla.get_mla_metadata(seqlens, S_Q * H_Q, 1, H_Q, True, 2048),
        flash_mla.get_mla_metadata(
            cache_seqlens=seqlens, num_q_tokens_per_head_k=8, num_heads_k=1, is_fp8_kvcache=True, topk=64
        ),
    ):
        assert isinstance(metadata, torch.Tensor) and isinstance(num_splits, torch.Tensor)
        torch.zeros(132, 8, dtype=torch.int32)[: metadata.size(0)].copy_(metadata)
        assert num_splits.tolist() == [0, 1, 2, 3] and num_splits.dtype == torch.int32


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("interface", ["older", "newer"])
def test_dense(calls, case, causal, interface):
    q, k_cache, block_table, cache_seqlens = case
    arguments = (cache_seqlens, S_Q * H_Q, 1) if interface == "older" else ()
    metadata, num_splits = flash_mla.get_mla_metadata(*arguments)
    got = flash_mla.flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, 512, metadata, num_splits, 0.05, causal, True
    )
    dense = {"block_table": block_table, "cache_seqlens": cache_seqlens, "causal": causal, "softmax_scale": 0.05}
    assert_flash_mla_result(got, q, k_cache, **dense)
    assert (got[0][2] == 0).all() and (got[1][2] == math.inf).all()
    assert got[1][:2].isfinite().all()
    assert calls[0]["indices"] is None and calls[0]["return_lse"]


def test_causal_is_off_by_default_as_in_flash_mla(calls, case):
    q, k_cache, block_table, cache_seqlens = case
    flash_mla.flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512, None, is_fp8_kvcache=True)
    assert calls[0]["causal"] is False


@pytest.mark.parametrize("with_table", [False, True])
def test_sparse(calls, case, indices, with_table):
    q, k_cache, block_table, cache_seqlens = case
    metadata, num_splits = flash_mla.get_mla_metadata()
    topk_length = torch.tensor([7, 5, 7], dtype=torch.int32)
    attn_sink = torch.tensor([0.5, -math.inf, math.inf, 3.0])
    got = flash_mla.flash_mla_with_kvcache(
        q,
        k_cache,
        block_table if with_table else None,
        cache_seqlens if with_table else None,
        512,
        metadata,
        num_splits,
        is_fp8_kvcache=True,
        indices=indices,
        topk_length=topk_length,
        attn_sink=attn_sink,
    )
    assert_flash_mla_result(got, q, k_cache, indices=indices, topk_length=topk_length, s_aux=attn_sink)
    assert (got[1][2] == math.inf).all() and got[1][:2].isfinite().all()
    assert (got[0][:, :, 2] == 0).all()


def test_out_is_written_and_returned(calls, case, indices):
    q, k_cache, *_ = case
    out = torch.full((BATCH, S_Q, H_Q, 512), math.nan, dtype=torch.bfloat16)
    got, _ = flash_mla.flash_mla_with_kvcache(
        q, k_cache, None, None, 512, None, is_fp8_kvcache=True, indices=indices, out=out
    )
    assert got is out and not out.isnan().any()


def test_nan_in_lse_stays(calls, case):
    q, k_cache, *_ = case
    k_cache.view(torch.uint8)[0, 0] = 0xFF
    indices = torch.zeros(BATCH, S_Q, 1, dtype=torch.int32)
    _, lse = flash_mla.flash_mla_with_kvcache(q, k_cache, None, None, 512, None, is_fp8_kvcache=True, indices=indices)
    assert lse.isnan().all()


def test_through_the_public_operation_on_a_cpu(case, indices):
    q, k_cache, block_table, cache_seqlens = case
    metadata, num_splits = flash_mla.get_mla_metadata()
    sparse = flash_mla.flash_mla_with_kvcache(
        q, k_cache, None, None, 512, metadata, num_splits, is_fp8_kvcache=True, indices=indices
    )
    assert_flash_mla_result(sparse, q, k_cache, indices=indices)
    dense = flash_mla.flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, 512, metadata, num_splits, causal=True, is_fp8_kvcache=True
    )
    assert_flash_mla_result(dense, q, k_cache, block_table=block_table, cache_seqlens=cache_seqlens)


SOME_CACHE = torch.zeros(6, PAGE_SIZE, 1, 656, dtype=torch.uint8)
SOME_INDICES = torch.zeros(BATCH, S_Q, 7, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"k_cache": torch.zeros(6, PAGE_SIZE, 1, 576).bfloat16()},
            TypeError,
            "k_cache: got torch.bfloat16; needs .*FP8",
        ),
        ({"k_cache": None}, TypeError, "k_cache: got None; needs"),
        ({"is_fp8_kvcache": False}, ValueError, "is_fp8_kvcache: got False; needs True: bfloat16 .* not supported"),
        ({"k_cache": SOME_CACHE[..., :584]}, ValueError, "k_cache: got .*584.* other FP8 layouts are not supported"),
        ({"head_dim_v": 576}, ValueError, "head_dim_v: got 576; needs 512"),
        ({"causal": True}, ValueError, "causal: got True with indices; needs False"),
        ({"extra_k_cache": SOME_CACHE}, ValueError, "extra_k_cache.*two caches is not supported"),
        ({"extra_indices_in_kvcache": SOME_INDICES}, ValueError, "extra_indices_in_kvcache.* is not supported"),
        ({"extra_topk_length": SOME_INDICES[:, 0, 0]}, ValueError, "extra_topk_length.* is not supported"),
    ],
)
def test_refusals(calls, case, change, error, message):
    arguments = {
        "q": case[0],
        "k_cache": SOME_CACHE,
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": flash_mla.FlashMLASchedMeta(),
        "is_fp8_kvcache": True,
        "indices": SOME_INDICES,
        **change,
    }
    with pytest.raises(error, match=message):
        flash_mla.flash_mla_with_kvcache(**arguments)
    assert not calls
