"""Perplexity of held-out text through each format of a cache, and whether decoding step by step says the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from bench.perplexity.caches import (
    GQA_FORMATS,
    LATENT_FORMATS,
    DecodingGqa,
    DecodingLatent,
    Recorder,
    StoredGqa,
    StoredLatent,
    latent_bytes,
)
from bench.perplexity.models import HEAD_DIM, Attend, logits

BASE: Final = "bfloat16"
"""The format that others are compared with."""
BATCH_ELEMENTS: Final = 1 << 25
"""Log-probabilities at a time: 268 MB as float64, of which there are some four."""
ROUNDING, CANCELLATION = 2.0**-7, 2.0**-16
"""What an attention output may differ by from an op's of the same q, k and v: a unit in the last place of bfloat16, for
sums are float32 here and float64 there; and so much of the largest value, where values cancel."""


class Mismatch(RuntimeError):
    """The ops said something else than whole sequences did: the table would be of something else."""


class Way(NamedTuple):
    """A format of one model's cache.

    name       of the format
    num_bytes  of a token, and of a KV head where there are several
    stored     over whole sequences, one for each layer
    decoding   from a capacity: over one token a call, one for each layer; None where no op has the format
    """

    name: str
    num_bytes: float
    stored: list[Attend]
    decoding: Callable[[int], list[Attend]] | None


def ways(model_name: str, model: Any, calibration: torch.Tensor) -> list[Way]:
    """All formats of a model's cache.

    Args:
        model_name: a key of `LATENT_FORMATS`; any other has keys and values of heads.
        model: what `models.build` made, or another Llama with its attention.
        calibration: (windows, tokens) int64, text from which scales that tokens share come.
    """
    layers = range(len(model.model.layers))
    if model_name in LATENT_FORMATS:
        return [_latent_way(name, LATENT_D_QK[model_name], len(layers)) for name in LATENT_FORMATS[model_name]]
    recorders = [Recorder() for _ in layers]
    with torch.no_grad():
        logits(model, calibration, recorders)
    return [_gqa_way(gqa_format, recorders, model.config.num_key_value_heads) for gqa_format in GQA_FORMATS]


LATENT_D_QK: Final = {"v3.2": 576, "v4": 512}


def _gqa_way(gqa_format: Any, recorders: list[Recorder], h_kv: int) -> Way:
    scales = [recorder.scales(gqa_format) for recorder in recorders]
    stored: list[Attend] = [StoredGqa(gqa_format, each) for each in scales]

    def decoding(capacity: int) -> list[Attend]:
        return [DecodingGqa(gqa_format, capacity, each) for each in scales]

    num_bytes = gqa_format.bytes_per_token(h_kv, HEAD_DIM)
    return Way(gqa_format.name, num_bytes, stored, None if gqa_format.dtype == torch.float32 else decoding)


def _latent_way(name: str, d_qk: int, layers: int) -> Way:
    def decoding(capacity: int) -> list[Attend]:
        return [DecodingLatent(name, capacity) for _ in range(layers)]

    has_op = name not in ("float32", "bfloat16")
    return Way(name, latent_bytes(name, d_qk), [StoredLatent(name)] * layers, decoding if has_op else None)


class Found(NamedTuple):
    """Of one format.

    loss        (windows,) float64, mean nats of a token
    divergence  (windows,) float64, mean Kullback-Leibler divergence from the base's next-token distribution, nats
    """

    loss: torch.Tensor
    divergence: torch.Tensor


@torch.no_grad()
def log_probabilities(model: Any, tokens: torch.Tensor, caches: list[Attend], start: int = 0) -> torch.Tensor:
    """(batch, tokens, vocabulary) float64 of the token after each of (batch, tokens)."""
    return logits(model, tokens, caches, start).double().log_softmax(dim=-1)


def batch_windows(model: Any, windows: torch.Tensor) -> int:
    """Windows that go through a model at a time."""
    return min(8, max(1, BATCH_ELEMENTS // (windows.shape[1] * model.config.vocab_size)))


def measure(
    model: Any, windows: torch.Tensor, found_ways: list[Way], after_each: Callable[[], None] = lambda: None
) -> dict[str, Found]:
    """Loss and divergence of each format over held-out windows; teacher-forced, each token but a window's first.

    Args:
        model: what `models.build` made, trained.
        windows: (windows, tokens) int64.
        found_ways: as `ways` gives them, `BASE` among them.
        after_each: called after each format of each batch.
    """
    base = next(way for way in found_ways if way.name == BASE)
    sums: dict[str, list[Found]] = {way.name: [] for way in found_ways}
    for rows in windows.split(batch_windows(model, windows)):
        inputs, targets = rows[:, :-1], rows[:, 1:].unsqueeze(-1)
        logs = log_probabilities(model, inputs, base.stored)
        for way in found_ways:
            found = logs if way is base else log_probabilities(model, inputs, way.stored)
            loss = -found.gather(2, targets).squeeze(-1).mean(dim=1)
            divergence = (logs.exp() * (logs - found)).sum(dim=-1).mean(dim=1)
            sums[way.name].append(Found(loss, divergence))
            after_each()
    return {name: Found(*map(torch.cat, zip(*parts, strict=True))) for name, parts in sums.items()}


class Checking:
    """An `Attend` over whole sequences that has an op compute the same, token by token, and compares.

    `worst`: the largest difference in units of what is allowed.
    """

    def __init__(self, stored: Attend, decoding: Attend) -> None:
        self.stored, self.decoding, self.worst = stored, decoding, 0.0

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float) -> torch.Tensor:
        """An `Attend` of one sequence."""
        want = self.stored(q, k, v, softmax_scale)
        tokens = range(q.shape[1])
        steps = [self.decoding(q[:, i : i + 1], k[:, i : i + 1], v[:, i : i + 1], softmax_scale) for i in tokens]
        allowed = ROUNDING * want.abs() + CANCELLATION * v.abs().max()
        ratio = ((torch.cat(steps, dim=1) - want).abs() / allowed).max().item()
        self.worst = ratio if math.isnan(ratio) else max(self.worst, ratio)
        return want


class Checked(NamedTuple):
    """How far a format's row is from the ops.

    attention  of the same q, k and v: the largest difference of an output, 1 is allowed
    steps      mean divergence of the distributions of decoding step by step, nats
    own        the same of the format from float32
    """

    attention: float
    steps: float
    own: float


def check(model: Any, prefix: torch.Tensor, found_ways: list[Way]) -> dict[str, Checked]:
    """Compares formats with their ops over a short text, once in each layer and once as decoding.

    Two computations of the same format need not give the same logits: a sum in another order rounds one number in some
    thousands to another bfloat16, and in a deep model all later numbers follow. So attention is compared where both get
    the same numbers; and decoding may be as far from whole sequences as these are from float32, not more.

    Args:
        model: what `models.build` made, or another with its attention.
        prefix: (tokens,) int64.
        found_ways: as `ways` gives them, float32 among them.

    Returns:
        By the names of the formats that an op has.

    Raises:
        Mismatch: a difference is larger than allowed, or no number.
    """
    rows, checked = prefix.unsqueeze(0), {}
    exact = log_probabilities(model, rows, next(way for way in found_ways if way.name == "float32").stored)
    for way in found_ways:
        if way.decoding is None:
            continue
        layers = [Checking(*pair) for pair in zip(way.stored, way.decoding(len(prefix)), strict=True)]
        whole = log_probabilities(model, rows, list(layers))
        caches = way.decoding(len(prefix))
        steps = [log_probabilities(model, rows[:, i : i + 1], caches, start=i) for i in range(len(prefix))]
        worst = [layer.worst for layer in layers]
        attention = math.nan if any(map(math.isnan, worst)) else max(worst)
        found = Checked(attention, divergence(whole, torch.cat(steps, dim=1)), divergence(exact, whole))
        if not (found.attention <= 1 and found.steps <= found.own):
            raise Mismatch(f"{way.name}: got {found}; needs attention at most 1, and steps at most own")
        checked[way.name] = found
    return checked


def divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    """Mean Kullback-Leibler divergence of q from p, both log-probabilities (..., vocabulary), nats."""
    return (p.exp() * (p - q)).sum(dim=-1).mean().item()


def entry(way: Way, found: dict[str, Found], checked: Checked | None) -> dict[str, Any]:
    """What the record has of a format: perplexity a token, how far from the base, and what that is sure of.

    `standard_error` is that of the paired difference of the windows' losses, in percent of the perplexity.
    """
    own, base = found[way.name], found[BASE]
    change = own.loss - base.loss
    error = change.std().item() / math.sqrt(len(change)) if len(change) > 1 else 0.0
    ratio = math.exp(change.mean().item())
    return {
        "format": way.name,
        "bytes": way.num_bytes,
        "perplexity": round(math.exp(own.loss.mean().item()), 6),
        "difference_percent": float(f"{100 * (ratio - 1):.3g}"),
        "standard_error": float(f"{100 * ratio * error:.2g}"),
        "divergence": float(f"{own.divergence.mean().item():.3g}"),
        "check": None if checked is None else {key: float(f"{value:.3g}") for key, value in checked._asdict().items()},
    }
