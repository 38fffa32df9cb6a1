"""FlashMLA's interface: arguments are translated, lse has its form, and errors say what is refused."""

import math
from types import SimpleNamespace

import pytest
import torch

import cute_kernels.compat.flash_mla as flash_mla
import fp8_mla
from cute_kernels.mla import op
from cute_kernels.mla.crossover.spec import MlaCrossoverSpec
from cute_kernels.mla.request import DECODE
from cute_kernels.mla.spec import MlaDecodeSpec
from tests.kit.empty_rows import CALLS, flash_mla_call, require_inf_of_empty_rows, spec_of

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
    """Slots of 7 keys per query with gaps; the last sequence has none."""
    slots = torch.randint(0, 6 * PAGE_SIZE, (BATCH, S_Q, 7), generator=torch.Generator().manual_seed(1))
    slots[:, :, 3] = -1
    slots[2] = -1
    return slots.int()


@pytest.fixture
def calls(monkeypatch):
    """Records the requests that reach the operation, with poisoned outputs."""
    recorded = []
    decode_request = op.decode_request

    def recorder(request):
        recorded.append(request)
        for name in ("out", "lse"):
            if request[name] is not None:
                request[name].fill_(math.nan)
        return decode_request(request)

    monkeypatch.setattr(op, "decode_request", recorder)
    return recorded


def assert_flash_mla_result(got, q, k_cache, **arguments):
    """Requires that `got` is the reference's result in FlashMLA's form."""
    out, lse = got
    expected, expected_lse = fp8_mla.reference_decode(q, k_cache, **arguments)
    assert out.dtype == torch.bfloat16 and out.shape == (*q.shape[:3], 512)
    assert lse.dtype == torch.float32 and lse.shape == (q.shape[0], q.shape[2], q.shape[1]) and lse.is_contiguous()
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-6)
    expected_lse = torch.where(expected_lse == -math.inf, math.inf, expected_lse).transpose(1, 2)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)


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
    assert calls[0]["indices"] is None and calls[0]["inf_if_empty"]


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
        ({"k_cache": SOME_CACHE[..., :592]}, ValueError, "kv_cache: got tokens of 592 bytes; needs 656 or 584 or"),
        ({"head_dim_v": 576}, ValueError, "head_dim_v: got 576; needs 512"),
        ({"causal": True}, ValueError, "causal: got True with indices; needs False"),
        ({"extra_k_cache": SOME_CACHE}, ValueError, "extra_indices: got None"),
        ({"extra_k_cache": SOME_CACHE[..., :584]}, ValueError, "extra_kv_cache: got tokens of 584 bytes; needs 656"),
        ({"extra_indices_in_kvcache": SOME_INDICES}, ValueError, "extra_indices: got a value without extra_kv_cache"),
        ({"extra_topk_length": SOME_INDICES[:, 0, 0]}, ValueError, "extra_topk_length: got a value without"),
        ({"descale_q": torch.ones(1)}, ValueError, "descale_q: got a value; needs None: queries are bfloat16"),
        ({"descale_k": torch.ones(1)}, ValueError, "descale_k: got a value; needs None"),
        ({"kv_format": "V5"}, ValueError, "kv_format: got 'V5'; needs one of V32"),
        ({"kv_format": "V41"}, ValueError, "k_cache: got tokens of 656 bytes with kv_format 'V41'; needs 528 or 288"),
    ],
)
def test_refusals(case, change, error, message):
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


def test_sparse_prefill_is_refused_in_a_sentence():
    with pytest.raises(NotImplementedError, match="flash_mla_sparse_fwd: got bfloat16 keys; needs FlashMLA itself"):
        flash_mla.flash_mla_sparse_fwd(torch.zeros(2, 64, 576), torch.zeros(9, 1, 576), SOME_INDICES[0, :, None], 0.1)


FORMS = [  # first and second format, their layout, and kv_format
    ("v3.2", "v3.2", "interleaved", (None, "V32")),
    ("v3.2_nope", "v3.2_nope", "interleaved", ("v3.2_nope",)),
    ("v4", "v4", "planar", (None, "MODEL1", "V4")),
    ("v4.1", "v4.1", "planar", (None, "V41")),
    ("v4.1", "v4.1_fp4", "planar", (None, "V41_FP4")),
    ("v4.1", "v4.1_fp4", "interleaved", ("V41_NEW", "V41_FP4_NEW", SimpleNamespace(name="V41_FP4_NEW"))),
]


@pytest.mark.parametrize(("first", "second", "layout", "kv_formats"), FORMS, ids=str)
def test_two_caches_of_every_format(first, second, layout, kv_formats):
    generator = torch.Generator().manual_seed(2)
    caches = []
    for name, pages, page_size in ((first, 3, 4), (second, 10, 2)):
        token_format = fp8_mla.FORMATS[name]
        # as FlashMLA's users make them: pages are padded, and the last dimension does not show where rows are
        memory = torch.full((pages, page_size * token_format.token_bytes + 64), 0xFF, dtype=torch.uint8)
        cache = memory[:, : page_size * token_format.token_bytes].view(pages, page_size, 1, token_format.token_bytes)
        tokens = fp8_mla.pack(torch.randn(pages * page_size, token_format.d_qk, generator=generator), token_format=name)
        fp8_mla.write_pages(cache, torch.arange(pages * page_size), tokens, token_format=name, cache_layout=layout)
        caches.append(cache.view(torch.float8_e4m3fn))
    q = torch.randn(2, 1, 3, fp8_mla.FORMATS[first].d_qk, generator=generator).bfloat16()
    indices = torch.tensor([[[0, 11, -1, 3]], [[-1, -1, -1, -1]]], dtype=torch.int32)
    extra = {
        "extra_indices": torch.tensor([[[19, 0, 4]], [[7, 8, 9]]], dtype=torch.int32),
        "extra_topk_length": torch.tensor([3, 0], dtype=torch.int32),
    }
    sink = torch.tensor([0.5, -math.inf, math.inf])
    for kv_format in kv_formats:
        got = flash_mla.flash_mla_with_kvcache(
            q, caches[0], None, None, 512, None, is_fp8_kvcache=True, indices=indices, attn_sink=sink,
            extra_k_cache=caches[1], extra_indices_in_kvcache=extra["extra_indices"],
            extra_topk_length=extra["extra_topk_length"], kv_format=kv_format, use_legacy=True,
        )  # fmt: skip
        assert_flash_mla_result(
            got, q, caches[0], indices=indices, s_aux=sink, cache_format=first, cache_layout=layout,
            extra_kv_cache=caches[1], extra_cache_format=second, **extra,
        )  # fmt: skip
        assert (got[1][1] == math.inf).all() and (got[0][1] == 0).all()


def test_batch_invariance_is_a_plan_that_no_batch_changes(calls, case, indices):
    q, k_cache, *_ = case
    arguments = (None, None, 512, None)
    for asked, plan in ((True, (1, "none")), (False, (None, None))):
        flash_mla.flash_mla_with_kvcache(
            q, k_cache, *arguments, is_fp8_kvcache=True, indices=indices, enable_batch_invariant=asked
        )
        assert (calls[-1]["num_splits"], calls[-1]["exchange"]) == plan


@pytest.mark.parametrize("name", CALLS)
def test_empty_rows_have_inf_and_the_others_the_same_bits(name):
    require_inf_of_empty_rows(CALLS[name], "cpu")


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if not call.forced])
def test_lse_of_empty_rows_through_the_interface(name):
    call = CALLS[name].case("cpu")
    got = flash_mla.flash_mla_with_kvcache(**flash_mla_call(call))
    arguments = call.options()
    assert_flash_mla_result(got, call.q, call.kv_cache, **arguments)
    assert (got[1] == math.inf).any()


def test_calls_with_empty_rows_reach_every_path_of_the_kernels():
    specs = [spec for call in CALLS.values() if (spec := spec_of(call)) is not None]
    assert all("inf_if_empty=True" in repr(spec) and spec.can_implement() == [] for spec in specs)
    uncrossed = [spec for spec in specs if isinstance(spec, MlaDecodeSpec)]
    plain = [spec for spec in uncrossed if (spec.cache_format, spec.extra_format) == ("v3.2", "")]
    others = [spec for spec in uncrossed if spec not in plain]
    assert {spec.heads for spec in plain} == {8, 16, 32, 64}
    for some in (plain, others):
        assert {("shares" if spec.balanced else spec.split) for spec in some} == {"shares", True, False}
        assert {spec.sparse for spec in some} == {True, False}
    assert {spec.merge_lanes for spec in plain} == {0, 32, 128}
    assert {spec.split for spec in specs if isinstance(spec, MlaCrossoverSpec)} == {True, False}
    assert {spec.float_scales for spec in others} == {True, False}


@pytest.mark.parametrize("inf_if_empty", [(), (False,), (True,)])
def test_the_operator_takes_the_choice_last(inf_if_empty):
    case = CALLS["sparse"].case("cpu")
    out, lse = (output.tensor for output in case.outputs())
    request = DECODE.request(**case.arguments())
    inputs = [request[name] for name in DECODE.names[: DECODE.names.index("out")]]
    operator = torch.ops.cute_kernels.mla_fp8_decode.default
    operator(*inputs, out, lse, *inf_if_empty)
    _, expected = fp8_mla.reference_decode(**case.arguments())
    infinite = math.inf if True in inf_if_empty else -math.inf
    assert (expected == -math.inf).any()
    assert torch.equal(lse == infinite, expected == -math.inf) and not (lse == -infinite).any()
    utilities = ("test_schema", "test_faketensor")
    out.fill_(math.nan), lse.fill_(math.nan)  # the values must change, or the check sees nothing
    torch.library.opcheck(operator, (*inputs, out, lse, *inf_if_empty), test_utils=utilities)
