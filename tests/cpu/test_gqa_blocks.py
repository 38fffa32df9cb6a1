"""Block-sparse `gqa_decode`: its oracle against dense calls, and the calls of its launches in plain torch."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from cute_kernels import gqa_decode
from cute_kernels.gqa import blocks_op
from cute_kernels.gqa.blocks_plan import Strided, virtual_pages
from cute_kernels.gqa.layouts import LAYOUTS, CacheSizes
from cute_kernels.gqa.reference import reference_gqa_decode
from cute_kernels.gqa.request import DECODE
from cute_kernels.runtime.launch import PreparedLaunches
from tests.kit.block_lists import INT32_MAX, INT32_MIN, listed_case, table_of_lists
from tests.kit.gqa_cases import FOUR_BITS, GqaCase, check_gqa, gqa_case
from tests.kit.mla_cases import strided

INF = math.inf
SEQLENS = [300, 0, 64, 129, 1]


# ---- the oracle


def test_a_list_of_all_blocks_is_the_dense_call() -> None:
    """Lists are in any order, name blocks that do not exist, and name some twice."""
    for s_q, own in ((1, True), (3, False)):
        case = gqa_case(seqlens=SEQLENS, h_q=4, h_kv=2, d=64, s_q=s_q, sink="finite")
        lists = torch.tensor([4, 3, -1, 0, 2, 1, 3, INT32_MAX, INT32_MIN], dtype=torch.int32)
        indices = lists.expand(len(SEQLENS), s_q, 2 if own else 1, -1)
        got = reference_gqa_decode(**{**case.arguments(), "indices": indices, "index_block": 64})
        assert all(map(torch.equal, got, reference_gqa_decode(**case.arguments())))


def test_keys_of_a_list_by_hand() -> None:
    """With keys of zeros the output averages the visible values, and the log-sum-exp counts them."""
    tokens = torch.arange(160.0).view(1, 1, 160, 1).expand(1, 2, 160, 64)
    call = {"q": torch.ones(1, 2, 2, 64), "k_cache": torch.zeros_like(tokens), "v_cache": tokens, "index_block": 64}
    indices = torch.tensor([[[[1, -1]], [[2, 0]]]])
    out, lse = reference_gqa_decode(**call, indices=indices)
    seen = list(range(64, 128)), [*range(64), *range(128, 160)]
    for query, keys in enumerate(seen):
        assert out[0, query, 0, 0].item() == pytest.approx(sum(keys) / len(keys))
        assert lse[0, query].tolist() == pytest.approx([math.log(len(keys))] * 2)
    _, lse = reference_gqa_decode(**call, indices=torch.tensor([[[[2]], [[5]]]]))
    assert lse[0, 0].tolist() == pytest.approx([math.log(31)] * 2), "the first of two queries does not see the last key"
    assert (lse[0, 1] == -INF).all()
    own = torch.tensor([[[[0], [1]], [[2], [9]]]])
    _, lse = reference_gqa_decode(**call, indices=own)
    assert lse[0].flatten().tolist() == pytest.approx([math.log(64), math.log(64), math.log(32), -INF])


# ---- what is launched


class Kernels:
    def __init__(self) -> None:
        self.tables = 0

    def make_table(self, *arguments: Any) -> None:
        self.tables += 1
        table_of_lists(*arguments)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Lets `blocks_op` launch on a CPU."""
    found = Kernels()

    def decode(request: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Decodes by the oracle, from all arguments that the kernel would get."""
        if request["out"] is None:
            request["out"] = request["q"].new_empty(request["q"].shape)
        if request["lse"] is None:
            request["lse"] = request["q"].new_empty(request["q"].shape[:3], dtype=torch.float32)
        blocks_op.check(request)
        names = DECODE.arguments_of(reference_gqa_decode)(request)
        out, lse = reference_gqa_decode(**names)
        return request["out"].copy_(out), request["lse"].copy_(lse)

    class Constants:
        no_length = torch.tensor([INT32_MAX], dtype=torch.int32)

    monkeypatch.setattr(blocks_op, "_prepared", PreparedLaunches())
    monkeypatch.setattr(blocks_op, "get_kernel", lambda spec: found.make_table)
    monkeypatch.setattr(blocks_op, "decode", decode)
    monkeypatch.setattr(blocks_op.memory, "constants", lambda device: Constants)
    monkeypatch.setattr(blocks_op.memory, "empty_like", lambda like: torch.full_like(like, INT32_MAX))
    monkeypatch.setattr(blocks_op.memory, "template", lambda shape, dtype, device: torch.empty(shape, dtype=dtype))
    return found


def run(case: GqaCase, **options: Any) -> Any:
    return blocks_op.launch(DECODE.request(**{**case.arguments(), **options, "return_lse": True}))


CASES: dict[str, dict[str, Any]] = {
    "int8, page = block": {"layout": "paged_NHD", "page_size": 64},
    "int8, heads first": {"layout": "paged_HND", "page_size": 64},
    "int8, parts of pages": {"layout": "paged_HND", "page_size": 128},
    "bf16, parts of pages": {"layout": "paged_NHD", "page_size": 256, "kv_dtype": "bf16"},
    "bf16, pages of a block": {"layout": "paged_NHD", "page_size": 16, "kv_dtype": "bf16", "index_block": 128},
    "bf16, pages of a token": {"layout": "paged_HND", "page_size": 1, "kv_dtype": "bf16", "index_block": 128},
    "packed": {"layout": "paged_vllm", "page_size": 16, "kv_dtype": "bf16"},
    "packed, int8": {"layout": "paged_vllm", "page_size": 32, "index_block": 128},
    "fp8, one scale": {"kv_dtype": "fp8", "k_scales": "per_tensor", "v_scales": "per_tensor", "padded": True,
                       "layout": "paged_NHD", "page_size": 128, "index_block": 128},
    "groups": {"layout": "paged_NHD", "k_scales": "per_group_32", "v_scales": "per_token_head"},
    **{f"4-bit, {kind}": {"layout": "paged_NHD", "kv_dtype": kind, "page_size": 128} for kind in FOUR_BITS},
    "shared, scales of heads": {"own": False, "layout": "paged_NHD", "k_scales": "per_head", "v_scales": "per_token",
                                "sink": "finite"},
    "shared lists, padded": {"own": False, "layout": "paged_HND", "page_size": 32, "softcap": 3.0, "sink": "inf"},
    "one head": {"h_kv": 1, "layout": "paged_NHD", "sink": "finite", "k_scales": "per_head", "page_size": 64},
    "pages that are none": {"layout": "paged_NHD", "page_size": 16, "bad_entries": True, "kv_dtype": "bf16"},
}  # fmt: skip


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize(("s_q", "causal"), [(1, True), (3, True), (2, False)])
def test_the_decode_of_the_made_tables(options: dict[str, Any], s_q: int, causal: bool, kernels: Kernels) -> None:
    """The tables and the views of caches must match the lists: no value outside a list may reach a result."""
    case = listed_case(**{"seqlens": SEQLENS, "h_q": 4, "h_kv": 2, "d": 64, "s_q": s_q, "causal": causal, **options})
    for call in (case, dataclasses.replace(case, q=strided(case.q))):
        expected = reference_gqa_decode(**call.arguments())
        assert torch.isfinite(expected[0]).all()
        out, lse = run(call)
        assert torch.equal(out, expected[0].to(out.dtype)) and torch.equal(lse, expected[1].float())
        check_gqa(out, lse, call).require()
        outputs = call.outputs(padded=True)
        run(call, out=outputs[0].tensor, lse=outputs[1].tensor)
        assert torch.equal(outputs[0].tensor, out) and torch.equal(outputs[1].tensor, lse)
        for output in outputs:
            output.require_no_stray_writes()
        q = call.q.clone() if call is case else strided(call.q)
        assert run(call, q=q, out=q)[0] is q and torch.equal(q, out)
    assert kernels.tables == 6


@pytest.mark.parametrize("layout", ["BNSH", "BSNH"])
def test_caches_without_pages(layout: str, kernels: Kernels) -> None:
    sets: tuple[dict[str, Any], ...]
    sets = ({}, {"own": False, "k_scales": "per_head", "padded": False}, {"kv_dtype": "bf16", "n": 40})
    for options in sets:
        case = listed_case(seqlens=[256] * 3, h_q=6, h_kv=3, d=64, s_q=2, layout=layout, whole=True, **options)
        for lengths in (None, torch.tensor([200, 0, 256], dtype=torch.int32)):
            call = dataclasses.replace(case, cache_seqlens=lengths)
            expected = reference_gqa_decode(**call.arguments())
            assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(run(call), expected, strict=True))


def test_a_prepared_launch_refuses_results_that_share_elements(kernels: Kernels) -> None:
    case = listed_case(seqlens=SEQLENS, h_q=4, h_kv=2, d=64, layout="paged_NHD", page_size=64)
    results = {name: output.tensor for name, output in zip(("out", "lse"), case.outputs(), strict=True)}
    run(case, **results)
    for name, t in results.items():
        with pytest.raises(ValueError, match=rf"^{name}: got strides .* elements share memory"):
            run(case, **{**results, name: t[:, :, :1].expand_as(t)})
    assert kernels.tables == 1


def test_no_sequence_and_no_key(kernels: Kernels) -> None:
    for change in (
        lambda call: {name: call[name][:0] for name in ("q", "indices", "cache_seqlens", "block_table")},
        lambda call: {"block_table": call["block_table"][:, :0]},
        lambda call: {name: call[name][:0] for name in ("k_cache", "v_cache", "k_scale", "v_scale")},
    ):
        call = listed_case(seqlens=[70, 3], h_q=4, h_kv=2, d=64, layout="paged_NHD").arguments()
        call |= change(call)
        out, lse = blocks_op.launch(DECODE.request(**call, return_lse=True))
        assert out.shape == call["q"].shape and (out == 0).all() and (lse == -INF).all()
    assert kernels.tables == 0


# ---- proportions


def test_strides_that_do_not_fit_are_refused() -> None:
    """With a list per head, scales may not lie further apart than codes. With one list any strides fit."""
    options: dict[str, Any] = {"seqlens": [70], "h_q": 4, "h_kv": 2, "d": 64, "layout": "paged_HND", "padded": True}
    case = listed_case(**options)
    with pytest.raises(ValueError, match=r"^k_scale: got strides .*; needs the proportions of k_cache's"):
        gqa_decode(**case.arguments())
    gqa_decode(**listed_case(**options, own=False).arguments())
    gqa_decode(**listed_case(**options, kv_dtype="bf16").arguments())
    layout, sizes = LAYOUTS["paged_HND"], CacheSizes(2**26, 64, 4, 64)
    far = Strided("k_cache", "phtd", layout.shape("k", sizes, 2), (2**20 + 8, 2**15, 64, 1))
    with pytest.raises(ValueError, match=r"pages and gaps; needs fewer than 2\^31"):
        virtual_pages(layout, sizes, 64, 4, [far])


def test_pages_of_one_buffer() -> None:
    """Some engines keep codes and scales of a page and head in one row of bytes."""
    pages, h_kv, page_size, d = 5, 2, 128, 64
    rows = torch.zeros(pages, h_kv, 2 * page_size * (d + 4), dtype=torch.uint8)
    codes = rows[..., : 2 * page_size * d].view(torch.int8).unflatten(-1, (2, page_size, d))
    k, v = codes[..., 0, :, :], codes[..., 1, :, :]
    words = rows.view(torch.float32)[..., 2 * page_size * d // 4 :]
    k_scale, v_scale = words[..., :page_size], words[..., page_size:]
    found = virtual_pages(
        LAYOUTS["paged_HND"], CacheSizes(pages, page_size, h_kv, d), 128, h_kv,
        [Strided(name, axes, tuple(t.shape), t.stride()) for name, axes, t in (
            ("k_cache", "phtd", k), ("v_cache", "phtd", v), ("k_scale", "pht", k_scale), ("v_scale", "pht", v_scale))],
    )  # fmt: skip
    assert found.steps == (h_kv, 0, 1) and found.total == pages * h_kv and found.rows == page_size
