"""Queries and keys of the indexer to slots: logits against float64, and exactly the choice that follows from them."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_kernels import index_append, index_decode, mla_fp8_decode
from cute_kernels.indexer import decode_op
from cute_kernels.indexer.reference import index_topk_reference
from cute_kernels.indexer.score_spec import shipped_specs
from cute_kernels.runtime import memory
from fp8_mla import INDEX_KEY, pack, reference_index_logits, row_views, slots_from_block_table
from tests.kit import index_ranks, processes
from tests.kit.graphs import capture
from tests.kit.index_cases import index_call, on_gpu

LENGTHS = [700, 0, 65, 64, 63, 1, 2100, 15]
MIXED = [3000, 20_000, 130, 2049]


def kernel_specs() -> list[Any]:
    return [*shipped_specs()]


def empty_logits(call: dict[str, Any]) -> torch.Tensor:
    (batch, s_q), width = call["q"].shape[:2], call["block_table"].shape[1] * call["k_cache"].shape[1]
    return torch.full((batch, s_q, width), -torch.inf, dtype=torch.float32, device="cuda")


def decode(call: dict[str, Any], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Result and logits of a call on a GPU, written over a poisoned result."""
    moved, logits = on_gpu(call), empty_logits(call)
    out = torch.full((*call["q"].shape[:2], options.get("topk", 2048)), 0x7F7F7F7F, dtype=torch.int32, device="cuda")
    assert index_decode(**moved, **options, out=out, logits=logits) is out
    assert torch.equal(index_decode(**moved, **options), out)
    return out, logits


def bound(call: dict[str, Any]) -> torch.Tensor:
    """2^-10 of the sum of magnitudes of all products, which a float32 sum of 13-bit terms may be off."""
    with_magnitudes = {**call, "q": call["q"].float().abs().to(torch.float8_e4m3fn), "weights": call["weights"].abs()}
    cache = call["k_cache"].clone()
    codes = cache.view(cache.shape[0], -1)[:, : 128 * cache.shape[1]]
    codes[codes != 0xFF] &= 0x7F
    return reference_index_logits(**{**with_magnitudes, "k_cache": cache}) * 2.0**-10


def expected(call: dict[str, Any], logits: torch.Tensor, topk: int, **options: Any) -> torch.Tensor:
    """The choice that the definition makes from a GPU's logits."""
    batch, s_q, width = logits.shape
    lengths = call["cache_seqlens"].clamp(0, width)
    if lengths.dim() == 1:
        lengths = (lengths[:, None] - s_q + 1 + torch.arange(s_q)).clamp(0)
    rows = logits.cpu().view(batch * s_q, width), lengths.reshape(-1).int()
    if options.get("return_positions"):
        return index_topk_reference(*rows, topk).view(batch, s_q, topk)
    table, page_size = options.get("slot_table"), options.get("slot_page_size", call["k_cache"].shape[1])
    if table is None:
        table = call["block_table"].masked_fill(call["block_table"] >= call["k_cache"].shape[0], -1)
    return index_topk_reference(*rows, topk, table, page_size).view(batch, s_q, topk)


@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("s_q", range(1, 9))
def test_exact_sums_are_those_of_a_cpu(heads: int, s_q: int) -> None:
    call = index_call(LENGTHS, s_q=s_q, heads=heads, exact=True, max_pages=40)
    out, logits = decode(call, topk=64)
    assert torch.equal(logits.cpu() + 0.0, reference_index_logits(**call))
    assert torch.equal(out.cpu(), index_decode(**call, topk=64))


@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("topk", [1, 512, 2048])
def test_logits_and_the_choice_from_them(heads: int, topk: int) -> None:
    call = index_call(MIXED, s_q=2, heads=heads)
    out, logits = decode(call, topk=topk)
    exact, most = reference_index_logits(**call), bound(call)
    seen = exact > -torch.inf
    assert torch.equal(logits.cpu() > -torch.inf, seen)
    assert ((logits.cpu() - exact).abs() <= most + 1e-30)[seen].all()
    assert torch.equal(out.cpu(), expected(call, logits, topk))


def test_logits_alone() -> None:
    call = index_call([*MIXED, 3], s_q=2)
    _, chosen_by = decode(call)
    logits = empty_logits(call)
    assert index_decode(**on_gpu(call), topk=0, logits=logits).shape == (5, 2, 0)
    assert torch.equal(logits, chosen_by) and (logits[4, 1, :3] > -torch.inf).all()


@pytest.mark.parametrize(("page_size", "apart"), [(16, 0), (32, 8704), (64, 8640), (64, 50_432), (128, 0), (256, 0)])
def test_pages(page_size: int, apart: int) -> None:
    """Bytes of no key are NaN codes and NaN scales; table entries past a sequence's end name no page."""
    call = index_call(LENGTHS, page_size=page_size, apart=apart, exact=True, max_pages=200)
    out, logits = decode(call, topk=512)
    assert torch.equal(logits.cpu() + 0.0, reference_index_logits(**call))
    assert torch.equal(out.cpu(), index_decode(**call, topk=512))


@pytest.mark.parametrize("missing", [-1, 2**31 - 1, -(2**31), 10**6])
def test_a_page_that_is_not_there_comes_last(missing: int) -> None:
    call = index_call([1000, 300], exact=True)
    call["block_table"][0, 3], call["block_table"][1, 0] = missing, missing
    for topk in (64, 990, 2048):
        out, _ = decode(call, topk=topk)
        assert torch.equal(out.cpu(), index_decode(**call, topk=topk))


def test_the_same_page_twice_and_pages_of_two_requests() -> None:
    call = index_call([640, 640], exact=True)
    call["block_table"][0, 4:6] = call["block_table"][0, 0]
    call["block_table"][1] = call["block_table"][0].flip(0)
    out, _ = decode(call, topk=200)
    assert torch.equal(out.cpu(), index_decode(**call, topk=200))


def test_lengths_of_each_query() -> None:
    call = index_call([700, 700, 700], s_q=4, exact=True)
    call["cache_seqlens"] = torch.tensor([[700, 0, 65, -5], [1, 2**31 - 1, 64, 128], [699, 3, 700, 129]]).int()
    for topk in (64, 129):
        out, _ = decode(call, topk=topk)
        assert torch.equal(out.cpu(), index_decode(**call, topk=topk))
    call["cache_seqlens"] = torch.tensor([2, 2**31 - 1, -(2**31)]).int()
    out, _ = decode(call, topk=64)
    assert torch.equal(out.cpu(), index_decode(**call, topk=64))


@pytest.mark.parametrize("topk", [64, 2048])
def test_many_requests_of_different_lengths(topk: int) -> None:
    """Shares begin and end anywhere. Of 140 groups of queries some have no key, and some need no scores."""
    call = index_call([5000, *(37 * i % 133 for i in range(69))], s_q=5, heads=16, exact=True)
    out, logits = decode(call, topk=topk)
    assert torch.equal(logits.cpu() + 0.0, reference_index_logits(**call))
    assert torch.equal(out.cpu(), index_decode(**call, topk=topk))


def test_forced_keys_positions_and_another_table() -> None:
    call = index_call([2000, 100, 7], s_q=2, exact=True)
    gen = torch.Generator().manual_seed(0)
    slot_table = torch.randint(-1, 5000, (3, 50), generator=gen, dtype=torch.int32)
    for options in (
        {"first": 4, "last": 60},
        {"first": 64, "return_positions": True},
        {"last": 1, "slot_table": slot_table, "slot_page_size": 48},
    ):
        moved = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
        out, _ = decode(call, topk=64, **moved)
        assert torch.equal(out.cpu(), index_decode(**call, topk=64, **options))


def test_weights_and_scales_of_all_kinds() -> None:
    """With zeros, negative weights, infinities and NaN, the choice must follow the logits, NaN last."""
    call = index_call([900] * 4, s_q=1, heads=32)
    call["weights"][0] = 0
    call["weights"][1] = -call["weights"][1].abs()
    call["weights"][2, 0, 5], call["weights"][3, 0, 7] = torch.inf, torch.nan
    out, logits = decode(call, topk=100)
    assert torch.equal(out.cpu(), expected(call, logits, 100))
    assert torch.equal(out[0, 0].cpu(), index_decode(**call, topk=100)[0, 0]) and not logits[0, 0, :900].any()


def test_keys_of_all_kinds() -> None:
    """A NaN code counts as no product, a NaN scale comes last. Both are chosen if there are few keys."""
    call = index_call([900, 40], exact=True)
    codes, scales = row_views(call["k_cache"], INDEX_KEY)
    pages = call["block_table"][0, :14].long()
    codes[pages[0], 3, 7], codes[pages[1], 5:9], codes[int(call["block_table"][1, 0]), 1, 0] = 0x7F, 0xFF, 0x7F
    special = [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, -2.0, 2.0**-128, 2.0**-140, 2.0**100, 2.0**-30]
    scales[pages[2], : len(special)] = torch.tensor(special).unsqueeze(1).view(torch.uint8)
    for topk in (64, 890, 2048):
        out, logits = decode(call, topk=topk)
        assert torch.equal(out.cpu(), index_decode(**call, topk=topk))
        assert torch.equal(out.cpu(), expected(call, logits, topk))


def test_a_row_does_not_depend_on_others() -> None:
    call = on_gpu(index_call(MIXED, s_q=2))
    whole = index_decode(**call)
    wider = torch.nn.functional.pad(call["block_table"], (0, 1500), value=-1)
    assert torch.equal(index_decode(**{**call, "block_table": wider}), whole)
    each = (call["cache_seqlens"][:, None] - torch.tensor([1, 0], device="cuda")).int().view(-1, 1)
    rows = {"cache_seqlens": each, "block_table": call["block_table"].repeat_interleave(2, 0)}
    for name in ("q", "weights"):
        rows[name] = call[name].flatten(0, 1).unsqueeze(1)
    assert torch.equal(index_decode(**{**call, **rows}).view(whole.shape), whole)
    assert all(torch.equal(index_decode(**call), whole) for _ in range(20))
    order = torch.tensor([2, 0, 3, 1], device="cuda")
    names = ("q", "weights", "block_table", "cache_seqlens")
    assert torch.equal(index_decode(**{**call, **{name: call[name][order] for name in names}}), whole[order])
    for part in (slice(0, 1), slice(1, 4)):
        assert torch.equal(index_decode(**{**call, **{name: call[name][part] for name in names}}), whole[part])


@pytest.mark.parametrize("num_sms", [16, 78, 132])
def test_other_cards_choose_the_same(num_sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call = on_gpu(index_call(MIXED))
    whole = index_decode(**call)
    known = memory.constants(torch.device("cuda", 0))
    monkeypatch.setattr(memory, "constants", lambda device: known._replace(num_sms=num_sms))
    decode_op._prepared.clear()
    assert torch.equal(index_decode(**call), whole)
    decode_op._prepared.clear()


def test_tensor_parallel_ranks_choose_the_same(tmp_path: Path) -> None:
    """Of two processes, one plans for a card of 78 SMs whose GPU is busy with other work."""
    for found in processes.run(functools.partial(index_ranks.differences, device="cuda"), tmp_path, 2):
        assert len(found) == 40 and not any(found.values())


def test_a_long_request_beside_short_ones(free_memory: None) -> None:
    lengths = [1_000_000, *[8] * 127]
    pages = -(-lengths[0] // 64)
    gen = torch.Generator("cuda").manual_seed(0)
    cache = torch.randint(0, 256, (pages + 127, 64, 132), generator=gen, dtype=torch.uint8, device="cuda")
    codes, scales = row_views(cache, INDEX_KEY)
    codes[codes & 0x7F == 0x7F] = 0
    scales.copy_(torch.rand(pages + 127, 64, 1, generator=gen, device="cuda").view(torch.uint8))
    table = torch.full((128, pages), -1, dtype=torch.int32, device="cuda")
    table[0], table[1:, 0] = torch.randperm(pages, device="cuda"), torch.arange(pages, pages + 127, device="cuda")
    call = {
        "q": torch.randn(128, 1, 64, 128, generator=gen, device="cuda").to(torch.float8_e4m3fn),
        "weights": torch.randn(128, 1, 64, generator=gen, device="cuda"),
        "k_cache": cache,
        "block_table": table,
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device="cuda"),
    }
    logits = torch.empty(128, 1, pages * 64, device="cuda")
    out = index_decode(**call, return_positions=True, logits=logits)
    assert (out[1:, 0, :8] == torch.arange(8, device="cuda")).all() and (out[1:, 0, 8:] == -1).all()
    assert torch.equal(out[0], index_topk_reference(logits[0], call["cache_seqlens"][:1], 2048))
    alone = {name: value if name == "k_cache" else value[:1] for name, value in call.items()}
    assert torch.equal(index_decode(**alone, return_positions=True), out[:1])


def test_many_requests() -> None:
    """The 1024 requests, some without a key, have tables of one page and of two."""
    for page_size in (16, 64):
        call = index_call([i % 33 for i in range(1024)], heads=16, page_size=page_size, exact=True)
        for topk in (1, 16, 1000):
            out, _ = decode(call, topk=topk)
            assert torch.equal(out.cpu(), index_decode(**call, topk=topk))


def test_two_streams_at_once() -> None:
    calls = [on_gpu(index_call(MIXED, s_q=2, seed=seed)) for seed in range(2)]
    alone = [index_decode(**call) for call in calls]
    streams, found = [torch.cuda.Stream() for _ in calls], list[tuple[int, torch.Tensor]]()
    torch.cuda.synchronize()
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found.append((i, index_decode(**calls[i])))
    torch.cuda.synchronize()
    assert all(torch.equal(out, alone[i]) for i, out in found)


def test_attention_to_all_chosen_keys_is_dense_attention() -> None:
    """If topk is at least the length, the result names each token once."""
    call = on_gpu(index_call([1500, 2048, 3], s_q=2, exact=True))
    q = torch.randn(3, 2, 16, 576, device="cuda").bfloat16()
    latents = pack(torch.randn(len(call["k_cache"]), 64, 576, device="cuda"))
    dense = mla_fp8_decode(q, latents, block_table=call["block_table"], cache_seqlens=call["cache_seqlens"])
    sparse = mla_fp8_decode(q, latents, indices=index_decode(**call))
    torch.testing.assert_close(sparse.float(), dense.float(), rtol=2**-6, atol=2**-8)


def test_append_index_and_lengths_in_one_graph() -> None:
    """The graph is captured at full length and replayed with other lengths and other new keys."""
    call = on_gpu(index_call([3000, 3000], page_size=64, max_pages=64))
    k = torch.randn(2, 128, device="cuda").bfloat16()
    slots, out = torch.zeros(2, dtype=torch.int64, device="cuda"), torch.zeros(2, 1, 512, dtype=torch.int32).cuda()

    def step() -> None:
        index_append(k, call["k_cache"], slots, scale="ue8m0")
        index_decode(**call, topk=512, out=out)

    graph, _ = capture(step)
    for lengths in ([3000, 511], [1, 2999], [0, 600]):
        call["cache_seqlens"].copy_(torch.tensor(lengths))
        k.normal_()
        slots.copy_(slots_from_block_table(call["block_table"], call["cache_seqlens"], 64).amax(1))
        for _ in range(20):
            graph.replay()
            replayed = out.clone()
            step()
            assert torch.equal(replayed, out)


def test_no_requests() -> None:
    call = on_gpu(index_call([100]))
    none = {name: call[name][:0] for name in ("q", "weights", "block_table", "cache_seqlens")}
    assert index_decode(**{**call, **none}).shape == (0, 1, 2048)
