"""`context_parallel_sink_attention` over gloo: two and four processes give the results of one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cute_kernels.distributed import context_parallel_sink_attention
from cute_kernels.distributed.sequence_chunks import Place, keys_of
from tests.kit import processes, training_ranks

WORLDS = (2, 4)
Found = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each process found in all cases, by the size of its group."""
    return {n: processes.run(training_ranks.sink_training, tmp_path_factory.mktemp(f"{n}"), n) for n in WORLDS}


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("case", training_ranks.CASES, ids=str)
def test_processes_equal_one(case: training_ranks.Case, world_size: int, found: Found) -> None:
    """`out` and dq must have the same bits; dk, dv and ds_aux must satisfy the tolerance rule."""
    assert [found[world_size][rank].get(case.name) for rank in range(world_size)] == [[]] * world_size


def test_refusals_in_words(tmp_path: Path) -> None:
    found = processes.run(training_ranks.sink_training_refusals, tmp_path, 2)
    for rank in range(2):
        for name, words in {
            "comm": "comm: got 'ring'; needs 'all_gather' or 'a2a'",
            "order": "order: got 'striped'; needs 'zigzag' or 'contiguous'",
            "odd tokens": "q: got 5 tokens of each sequence on this rank; needs a multiple of 2: pad sequences to a "
            "multiple of 4",
            "decreasing borders": "cu_seqlens: got 4 after 8 at index 2; needs 0 first, no decrease",
            "borders past the end": "cu_seqlens: got 16 last; needs 0 first, no decrease, and at most 12",
            "a length that does not divide": "cu_seqlens: got a sequence of 5 tokens at index 0; needs multiples of 4",
            "too few heads": "",
            "k of other tokens": "k: got shape (1, 4, 2, 64); needs (1, 6, any, 64)",
            "window": "window: got 0; needs at least 1",
            "another call": "window: got 4 on rank 0 and 5 on rank 1; needs the same on all ranks",
        }.items():
            assert found[rank][name].startswith(words), (name, found[rank][name])
    assert found[0]["another group"] == ""
    assert found[1]["another group"].startswith("group: got one without this process; needs a group that this process")


def test_heads_that_ranks_cannot_share(tmp_path: Path) -> None:
    found = processes.run(training_ranks.sink_training_refusals, tmp_path, 4)
    for rank in range(4):
        words = "k: got 2 heads; needs a multiple of 4, the ranks, for comm='a2a'; comm='all_gather' takes any"
        assert found[rank]["too few heads"] == words


def test_without_a_group() -> None:
    q, k = torch.zeros(1, 2, 2, 64).bfloat16(), torch.zeros(1, 2, 1, 64).bfloat16()
    with pytest.raises(ValueError, match="group: got None; needs a torch.distributed group"):
        context_parallel_sink_attention(q, k, k)


@pytest.mark.parametrize(("window", "sent"), [(None, None), (128, 256), (129, 256), (130, 512), (900, None)])
def test_a_window_sends_only_what_it_reaches(window: int | None, sent: int | None) -> None:
    """A rank gets the whole key tiles before each of its two chunks of 512 tokens, or everything for longer windows."""
    keys = keys_of((512,), 1024, Place(1, 4, "zigzag"), window, torch.device("cpu"))
    assert (None if keys.sent is None else len(keys.sent)) == sent
    counts = keys.cu_seqlens_k.diff().tolist()
    reached = {None: [1024, 3584], 900: [1024, 512 + 1024]}.get(window, [512 + (sent or 0) // 2] * 2)
    assert counts == reached


def test_ranks_have_the_same_work() -> None:
    """Pairs of a query and a key that it sees."""
    work = []
    for rank in range(4):
        keys = keys_of((64, 32), 192, Place(rank, 4, "zigzag"), None, torch.device("cpu"))
        queries, seen = keys.cu_seqlens_q.diff(), keys.cu_seqlens_k.diff()
        work.append(int((queries * seen - queries * (queries - 1) // 2).sum()))
    assert len(set(work)) == 1
