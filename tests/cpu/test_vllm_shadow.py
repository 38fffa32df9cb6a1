"""bench/vllm_shadow.py: two kernels answer an engine's calls, and their answers are compared."""

import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import vllm_shadow
from cute_kernels.integrations.padded_heads import V4Decode
from cute_kernels.integrations.vllm import indexer as hooks

WIDTH, TOPK = 40, 8
LENGTHS = torch.tensor([[40], [20], [5]], dtype=torch.int32)
"""The last row has fewer keys than are chosen."""


def scores() -> torch.Tensor:
    made = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    for row, length in zip(made, LENGTHS[:, 0], strict=True):
        row[int(length) :] = 100.0  # what DeepGEMM leaves there
    return made


def best(made: torch.Tensor) -> torch.Tensor:
    chosen = torch.full((3, TOPK), -1, dtype=torch.int32)
    for i, length in enumerate(LENGTHS[:, 0].tolist()):
        top = made[i, :length].topk(min(TOPK, length)).indices.int()
        chosen[i, : len(top)] = top
    return chosen


def test_a_choice_of_the_best_keys_lacks_nothing() -> None:
    made = scores()
    found = vllm_shadow.lacking(made, LENGTHS, best(made))
    assert not found[:, :2].any() and found[:, 2].amax() < 100, "columns that no query sees do not count"


def test_a_key_below_the_last_is_found_with_how_far_it_is() -> None:
    made, chosen = scores(), best(scores())
    last = made[1, chosen[1, -1].long()]
    lowest = made[1, :20].argmin()
    chosen[1, 0] = lowest.int()
    found = vllm_shadow.lacking(made, LENGTHS.flatten(), chosen)
    assert found[:, 0].tolist() == [0, 1, 0] and found[1, 1] == last - made[1, lowest] > 0


def test_keys_of_the_last_score_are_counted() -> None:
    made, chosen = scores(), best(scores())
    last = made[0, chosen[0, -1].long()].clone()
    left = [i for i in range(WIDTH) if i not in chosen[0].tolist()][:2]
    made[0, left] = last
    found = vllm_shadow.lacking(made, LENGTHS, chosen)
    assert found[:, 3].tolist() == [2, 0, 0] and not found[:, :2].any()


def test_choices_of_an_engine_are_held_against_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    made = scores()
    wrong = best(made)
    wrong[0, 0] = made[0].argmin().int()
    answers = iter((best(made), wrong, best(made)))

    def choose(logits: Any, seq_lens: Any, topk_indices: Any, topk: int) -> None:
        topk_indices.copy_(next(answers))

    monkeypatch.setattr(hooks, "choose", choose)
    monkeypatch.setattr(vllm_shadow, "chosen_by_vllm", lambda *arguments: wrong)
    worker = SimpleNamespace()
    vllm_shadow.indexer(worker)
    q = torch.zeros(3, 1, 64, 128, dtype=torch.float32)
    unscored = hooks.Unscored.of(lambda **_: made, lambda: made, q, WIDTH)
    out = torch.empty(3, TOPK, dtype=torch.int32)
    for logits in (unscored, unscored, made):
        hooks.choose(logits, LENGTHS, out, TOPK)
    found = vllm_shadow.seen(worker)
    assert {key: found[key] for key in ("calls", "rows", "rows_with_others", "most_others", "theirs_with_others")} == {
        "calls": 2, "rows": 6, "rows_with_others": 1, "most_others": 1, "theirs_with_others": 2,
    }, "made logits come from a call that index_decode does not take"  # fmt: skip
    assert found["furthest_below"] == pytest.approx(float(made[0].topk(TOPK).values[-1] - made[0].amin()))


def test_calls_of_v4_run_on_both(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType(vllm_shadow.FLASHMLA_OF_V4)
    seen: list[str] = []

    def original(**arguments: Any) -> None:
        seen.append("theirs")
        arguments["out"].fill_(1.0)

    class Ours(V4Decode):
        def __call__(self, *positional: Any, **arguments: Any) -> Any:
            seen.append("ours")
            arguments["out"].fill_(1.0)[1, ..., 3] = 1.5
            return arguments["out"], None

    module.flash_mla_with_kvcache = Ours(original, lambda line: None)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    worker = SimpleNamespace()
    vllm_shadow.attention_of_v4(worker)
    out = torch.zeros(2, 1, 64, 16, dtype=torch.bfloat16)
    result, _ = module.flash_mla_with_kvcache(q=None, out=out)
    assert seen == ["ours", "theirs"] and result is out and out[1, 0, 0, 3] == 1.5, "the layer reads ours"
    assert vllm_shadow.seen(worker) == {"calls": 1, "apart": pytest.approx(0.5 / 4), "ours_lost": 0, "theirs_lost": 0}


def test_rows_without_numbers_are_counted() -> None:
    ours, theirs = torch.ones(2, 3, 4), torch.ones(2, 3, 4)
    ours[0, 1, 2] = ours[1, 1, 0] = theirs[0, 1, 3] = torch.nan
    assert vllm_shadow.apart(ours, theirs).tolist() == [0, 2, 1]
