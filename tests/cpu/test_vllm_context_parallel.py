"""Decode context parallelism of the vLLM adapter, with two ranks of gloo; needs no vLLM."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cute_kernels.integrations.vllm import context_parallel
from cute_kernels.integrations.vllm.calls import MAX_QUERIES, GqaCalls
from cute_kernels.integrations.vllm.context_parallel import Ranks, pieces
from tests.kit import processes, vllm_ranks


def test_two_ranks_attend_as_one(tmp_path: Path) -> None:
    """All caches decode and prefill, with sinks after the merge; float64 attention over all keys is the oracle."""
    for errors in processes.run(vllm_ranks.errors, tmp_path, vllm_ranks.WORLD):
        assert len(errors) == 40 and not [name for name, error in errors.items() if not error < 1]


@pytest.mark.parametrize("interleave", [1, 4, 16])
def test_every_token_has_one_rank(interleave: int) -> None:
    lengths = torch.arange(70).int()
    counts = [Ranks(3, rank, interleave, torch.cat, None).lengths(lengths) for rank in range(3)]
    assert torch.equal(sum(counts), lengths)
    for rank, count in enumerate(counts):
        own = [sum(t // interleave % 3 == rank for t in range(n)) for n in range(70)]
        assert count.tolist() == own and count.dtype is torch.int32


def test_pieces_have_each_token_of_one_request() -> None:
    rows, owners = pieces([0, 1, 1, 18, 26])
    assert owners == [0, 2, 2, 2, 3] and len(rows) == MAX_QUERIES * len(owners)
    assert set(rows) == set(range(26))
    assert rows[: MAX_QUERIES + 1] == [0] * MAX_QUERIES + [1] and rows[3 * MAX_QUERIES : 4 * MAX_QUERIES] == [17] * 8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"window": 64}, "a window or ALiBi"),
        ({"alibi_slopes": torch.ones(4)}, "a window or ALiBi"),
        ({"softcap": 30.0}, "softcap"),
        ({"shares_cache": True}, "without keys of its own"),
        ({"head_dim": 256}, "another head dimension"),
        ({"kv_heads": 2}, "2 KV heads"),
    ],
)
def test_what_has_no_positions_is_refused(changes: dict[str, Any], words: str) -> None:
    options: dict[str, Any] = {"heads": 4, "kv_heads": 1, "head_dim": 64, "scale": 0.125, "cache_dtype": "auto"}
    reason = context_parallel.refusal(GqaCalls(**{**options, **changes}))
    assert reason is not None and words in reason
