"""Batches of several sequences, packed and padded, and the loss and gradients of a small model on them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from tests.kit import tiny_models

LENGTHS: Final = (7, 20, 1, 13)
KINDS: Final = ("positions", "kwargs", "tail restarts", "tail counts on", "tail past cu_seq_lens", "left", "right")
"""Ways to batch. Packed: with positions that restart, with borders, or with extra tokens at the end up to a multiple of
64, as trl's collator adds them. Padded: on the left or on the right."""
MULTIPLE: Final = 64


class Batch(NamedTuple):
    """The arguments of a model, and for each sequence its row, first token and number of tokens."""

    inputs: dict[str, Any]
    places: list[tuple[int, int, int]]


class Gradients(NamedTuple):
    """The summed loss, and float32 gradients by parameter."""

    loss: float
    of: dict[str, torch.Tensor]


@functools.cache
def sequences() -> list[torch.Tensor]:
    return [tiny_models.sequences(30 + i, 1, n)[0] for i, n in enumerate(LENGTHS)]


def batch(kind: str, device: str = "cpu") -> Batch:
    """One batch of all sequences; `kind` is one of `KINDS`."""
    if kind in ("left", "right"):
        most = max(LENGTHS)
        ids = torch.zeros(len(LENGTHS), most, dtype=torch.int64, device="cpu")
        mask, places = torch.zeros_like(ids), []
        for row, one in enumerate(sequences()):
            first = most - len(one) if kind == "left" else 0
            ids[row, first : first + len(one)], mask[row, first : first + len(one)] = one, 1
            places.append((row, first, len(one)))
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    else:
        starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]
        places = [(0, start, n) for start, n in zip(starts, LENGTHS, strict=False)]
        ids, positions = torch.cat(sequences()), torch.cat([_count(0, n) for n in LENGTHS])
        if kind.startswith("tail"):
            more = -len(ids) % MULTIPLE
            counts = _count(LENGTHS[-1], LENGTHS[-1] + more)
            ids = torch.cat([ids, ids.new_zeros(more)])
            positions = torch.cat([positions, counts if kind == "tail counts on" else torch.zeros_like(counts)])
        inputs = {"input_ids": ids[None], "position_ids": positions[None]}
        if kind in ("kwargs", "tail past cu_seq_lens"):
            cu = torch.tensor(starts, dtype=torch.int32, device=device)
            inputs |= {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 20, "max_length_k": 20}
    moved = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in inputs.items()}
    return Batch(moved, places)


def _count(first: int, end: int) -> torch.Tensor:
    return torch.arange(first, end, dtype=torch.int64, device="cpu")


def model(name: str, **more: Any) -> Any:
    """A bfloat16 model with random weights, in training mode."""
    return tiny_models.untrained(name, **more).bfloat16().train()


def _loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The loss of one sequence: the sum over its tokens except the first."""
    return torch.nn.functional.cross_entropy(logits[:-1].float(), ids[1:], reduction="sum")


def loss_of(logits: torch.Tensor, given: Batch) -> torch.Tensor:
    ids = given.inputs["input_ids"]
    parts = [(row, slice(first, first + n)) for row, first, n in given.places]
    return torch.stack([_loss(logits[row, own], ids[row, own]) for row, own in parts]).sum()


def _gradients(model: Any, loss: torch.Tensor) -> Gradients:
    model.zero_grad()
    loss.backward()
    return Gradients(loss.item(), {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None})


def gradients(model: Any, given: Batch, forward: Callable[..., Any] | None = None) -> Gradients:
    """Loss and gradients of a model on a batch; `forward` may be a compiled version of the model."""
    logits = (model if forward is None else forward)(**given.inputs, use_cache=False).logits
    return _gradients(model, loss_of(logits, given))


def alone(model: Any, attention: str) -> Gradients:
    """Loss and gradients of each sequence in a call by itself, summed."""
    model.set_attn_implementation(attention)
    device = next(model.parameters()).device
    rows = [one.to(device) for one in sequences()]
    losses = [_loss(model(one[None], use_cache=False).logits[0], one) for one in rows]
    return _gradients(model, torch.stack(losses).sum())


def require_close(name: str, run: Callable[[Any], Gradients], device: str = "cpu") -> None:
    """Raises AssertionError if "cute" is more than twice as far from float32 as eager attention in bfloat16 is.

    Args:
        run: returns the loss and gradients of a model with "cute".
    """
    exact = alone(model(name).float().to(device), "eager")
    rounded = alone(model(name).to(device), "eager")
    tested = model(name).to(device)
    tested.set_attn_implementation("cute")
    found = run(tested)
    assert abs(found.loss - exact.loss) <= max(2 * abs(rounded.loss - exact.loss), 2e-3 * exact.loss)
    assert found.of.keys() == exact.of.keys()
    for key, gradient in exact.of.items():
        off, allowed = (found.of[key] - gradient).norm(), (rounded.of[key] - gradient).norm()
        assert 0 < allowed < 0.3 * gradient.norm(), f"{key}: rounding is no measure"
        assert off <= 2 * allowed, f"{key}: off by {off:.3g}; bfloat16 is by {allowed:.3g}"
