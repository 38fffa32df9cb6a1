"""Compares our kernels with vLLM's on the calls of an eager engine, call by call: both see the same tensors.

Tokens of two engines drift apart if rounding flips a choice of keys or of experts. Calls do not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final

FLASHMLA_OF_V4: Final = "vllm.models.deepseek_v4.nvidia.flashmla"
"""vLLM's module of V4's layers, in which a `V4Decode` replaces FlashMLA."""


def attention_of_v4(worker: Any) -> None:
    """Makes each decoding call of V4 also run on FlashMLA, whose output is compared with ours."""
    module = importlib.import_module(FLASHMLA_OF_V4)
    ours = module.flash_mla_with_kvcache
    found: dict[str, Any] = {"calls": 0, "apart": []}
    worker.shadow = found

    def both(**arguments: Any) -> Any:
        import torch

        result = ours(**arguments)
        theirs = torch.empty_like(arguments["out"])
        ours.original(**{**arguments, "out": theirs})
        found["calls"] += 1
        found["apart"].append(apart(arguments["out"], theirs))
        return result

    module.flash_mla_with_kvcache = both  # type: ignore[attr-defined]


def apart(ours: Any, theirs: Any) -> Any:
    """Compares two outputs (..., d), by three numbers on the GPU: the largest distance, and each one's rows with NaN.

    The distance is the largest ratio of a row's difference to the row's length.
    """
    import torch

    ours, theirs = ours.float(), theirs.float()
    lost = [rows.isnan().any(-1) for rows in (ours, theirs)]
    far = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-6)
    return torch.stack([far.masked_fill(lost[0] | lost[1], 0).amax(), *(rows.sum().float() for rows in lost)])


def indexer(worker: Any) -> None:
    """Makes each choice of `index_decode`, and vLLM's own, be compared with DeepGEMM's scores."""
    from cute_kernels.integrations.vllm import indexer as hooks

    choose = hooks.choose
    found: dict[str, Any] = {"calls": 0, "rows": [], "theirs": []}
    worker.shadow = found

    def both(logits: Any, seq_lens: Any, topk_indices: Any, topk: int) -> None:
        choose(logits, seq_lens, topk_indices, topk)
        if isinstance(logits, hooks.Unscored):
            scores = logits.make()
            found["calls"] += 1
            found["rows"].append(lacking(scores, seq_lens, topk_indices[:, :topk]))
            found["theirs"].append(lacking(scores, seq_lens, chosen_by_vllm(scores, seq_lens, topk)))

    hooks.choose = both


def chosen_by_vllm(scores: Any, seq_lens: Any, topk: int) -> Any:
    """Returns the choice of vLLM 0.26 for at most 32 rows, (rows, topk) int32."""
    import torch

    chosen = torch.full((len(scores), topk), -1, dtype=torch.int32, device=scores.device)
    workspace = torch.empty(1 << 20, dtype=torch.uint8, device=scores.device)
    torch.ops._C.cooperative_topk(scores, seq_lens, chosen, workspace, topk, scores.shape[1])
    return chosen


def lacking(scores: Any, seq_lens: Any, chosen: Any) -> Any:
    """Compares rows of scores (rows, width) and chosen positions (rows, topk), by four numbers a row, on the GPU.

    They are the number of chosen keys whose score is below the topk-th, how far the lowest one is below it, the largest
    score, and the number of keys that have the topk-th score and were not chosen. A row has no more keys than its
    length; -1 fills up a row with too few keys.
    """
    import torch

    width = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    seen = torch.where(width < seq_lens.reshape(-1, 1), scores, -torch.inf)
    most = min(chosen.shape[1], scores.shape[1])
    last = seen.topk(most, dim=1).values[:, -1:]  # -inf in rows with fewer keys
    given = torch.where(chosen >= 0, seen.gather(1, chosen.clamp(min=0).long()), torch.inf)
    equal = ((seen == last).sum(1) - (given == last).sum(1)) * last[:, 0].isfinite()
    return torch.stack(
        [(given < last).sum(1).float(), (last - given.amin(1, True)).clamp(min=0)[:, 0], seen.amax(1), equal.float()], 1
    )


def seen(worker: Any) -> dict[str, Any]:
    """Returns the results so far."""
    import torch

    found = worker.shadow
    result = {"calls": found["calls"]}
    if found.get("apart"):
        rows = torch.stack(found["apart"]).double()
        result |= {
            "apart": float(rows[:, 0].amax()), "ours_lost": int(rows[:, 1].sum()), "theirs_lost": int(rows[:, 2].sum())
        }  # fmt: skip
    if found.get("rows"):
        rows, theirs = (torch.cat(found[who]).double() for who in ("rows", "theirs"))
        result |= {
            "rows": len(rows), "rows_with_others": int((rows[:, 0] > 0).sum()), "most_others": int(rows[:, 0].amax()),
            "furthest_below": float(rows[:, 1].amax()), "largest_score": float(rows[:, 2].amax()),
            "rows_with_ties": int((rows[:, 3] > 0).sum()), "theirs_with_others": int((theirs[:, 0] > 0).sum()),
            "theirs_furthest_below": float(theirs[:, 1].amax()),
        }  # fmt: skip
    return result


SHADOWS: Final[dict[str, Callable[[Any], None]]] = {"attention": attention_of_v4, "indexer": indexer}
