"""`index_decode` on a CPU chooses as `fp8_mla.reference_index_decode`, and calls get the right kernels."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_kernels import index_decode
from cute_kernels.indexer.score_spec import ScoreSpec
from fp8_mla import reference_index_decode, reference_index_logits
from tests.kit import index_ranks, processes
from tests.kit.index_cases import index_call

LENGTHS = [300, 0, 65, 64, 7]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"first": 3, "last": 5},
        {"return_positions": True},
        {"slot_table": torch.arange(50, dtype=torch.int32).view(5, 10), "slot_page_size": 48},
    ],
    ids=["plain", "forced", "positions", "another table"],
)
@pytest.mark.parametrize("topk", [16, 100, 2048])
@pytest.mark.parametrize("s_q", [1, 3])
def test_the_choice_is_that_of_the_reference(s_q: int, topk: int, options: dict[str, Any]) -> None:
    call = index_call(LENGTHS, s_q=s_q, heads=16, page_size=32, exact=True, max_pages=12)
    call["block_table"][0, 2] = 10**6  # a page that the cache lacks
    others = {name: value for name, value in options.items() if name != "return_positions"}
    slots, positions, _ = reference_index_decode(**call, topk=topk, **others)
    expected = positions if options.get("return_positions") else slots
    assert torch.equal(index_decode(**call, topk=topk, **options), expected)


def test_lengths_of_each_query_and_logits() -> None:
    call = index_call([300, 300], s_q=2, heads=32)
    call["cache_seqlens"] = torch.tensor([[300, 0], [-4, 2**31 - 1]], dtype=torch.int32)
    logits, out = torch.full((2, 2, 320), 7.0), torch.zeros(2, 2, 64, dtype=torch.int32)
    assert index_decode(**call, topk=64, logits=logits, out=out) is out
    known = reference_index_logits(**call)
    assert torch.equal(logits[0, 0, :300], known[0, 0, :300]) and (logits[0, 0, 300:] == 7).all()
    assert (logits[0, 1] == 7).all() and (out[0, 1] == -1).all() and (out[1, 0] == -1).all()
    assert torch.equal(out, reference_index_decode(**call, topk=64)[0])


def test_logits_alone() -> None:
    call = index_call(LENGTHS, s_q=2, heads=16)
    logits = torch.full((5, 2, 320), 7.0)
    assert index_decode(**call, topk=0, logits=logits).shape == (5, 2, 0)
    known = reference_index_logits(**call)
    assert torch.equal(logits, torch.where(known > -torch.inf, known, 7.0))


def test_queries_may_be_bytes() -> None:
    call = index_call([300, 70], heads=16)
    expected = index_decode(**call, topk=64)
    call["q"] = call["q"].view(torch.uint8)
    assert torch.equal(index_decode(**call, topk=64), expected)


def test_tensor_parallel_ranks_choose_the_same(tmp_path: Path) -> None:
    for found in processes.run(functools.partial(index_ranks.differences, device="cpu"), tmp_path, 2):
        assert len(found) == 4 * index_ranks.CALLS["cpu"] and not any(found.values())


def test_queries_of_a_request_share_a_kernel() -> None:
    assert [ScoreSpec.for_launch(64, s_q).queries for s_q in range(1, 9)] == [1, 2, 3, 4, 3, 3, 4, 4]


def test_ctas_of_an_sm_fit_its_shared_memory() -> None:
    for queries in (1, 2, 3, 4):
        spec = ScoreSpec(64, queries)
        query_bytes = queries * (64 * 128 + 4 * spec.weights + 4)
        assert spec.ctas_per_sm * (spec.stages * 64 * 132 + query_bytes + 1024) <= 227 * 1024
