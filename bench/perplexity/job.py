"""The whole job: train each model, measure the perplexity of each format of its cache twice, and make the record."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from bench.perplexity import models, real, text
from bench.perplexity.formats import Attend, Way, ways
from bench.progress import Progress
from bench.records import today

THREADS: Final = 1
"""Threads of torch: sums have the same order on any number of cores, and another job has the other cores."""
BASE: Final = "bfloat16"
"""The format that other formats are compared with."""
BATCH_ELEMENTS: Final = 1 << 25
"""Log-probabilities that are computed at a time: 268 MB as float64, in some four copies."""
TITLES: Final = {
    real.MODEL: "SmolLM2-135M-Instruct: 9 query and 3 KV heads of 64",
    "gqa": "small Llama: 8 query and 2 KV heads of 64",
    "v3.2": "small model with the latents of DeepSeek-V3.2, 4 heads",
    "v4": "small model with the latents of DeepSeek-V4, 4 heads",
}
"""Models in the order of the table."""
VARIANTS: Final = ("as trained", "outlier channels")


class Measuring(NamedTuple):
    """Text for measuring a model: `windows` of `length` tokens, and `calibration` more for scales."""

    windows: int
    length: int
    calibration: int


class Sizes(NamedTuple):
    """Sizes of the job. `of_real`: for the real model, which is not trained here."""

    training: models.Training = models.Training()
    model_seed: int = 0
    of_trained: Measuring = Measuring(windows=64, length=256, calibration=16)
    of_real: Measuring = Measuring(windows=8, length=256, calibration=4)


class Found(NamedTuple):
    """Measurements of one format.

    loss        (windows,) float64, mean nats per token
    divergence  (windows,) float64, mean Kullback-Leibler divergence from the base's next-token distribution, nats
    """

    loss: torch.Tensor
    divergence: torch.Tensor


@torch.no_grad()
def _logs(model: Any, tokens: torch.Tensor, layers: Sequence[Attend]) -> torch.Tensor:
    """Returns (batch, tokens, vocabulary) float64: log-probabilities of the token after each of (batch, tokens)."""
    return models.logits(model, tokens, layers).double().log_softmax(dim=-1)


def measure(model: Any, windows: torch.Tensor, found_ways: Sequence[Way], after_each: Any) -> dict[str, Found]:
    """Measures loss and divergence of each format over held-out windows (windows, tokens) int64; teacher-forced."""
    base = next(way for way in found_ways if way.name == BASE)
    sums: dict[str, list[Found]] = {way.name: [] for way in found_ways}
    for rows in windows.split(batch_windows(model, windows)):
        inputs, targets = rows[:, :-1], rows[:, 1:].unsqueeze(-1)
        logs = _logs(model, inputs, base.layers)
        for way in found_ways:
            found = logs if way is base else _logs(model, inputs, way.layers)
            loss = -found.gather(2, targets).squeeze(-1).mean(dim=1)
            sums[way.name].append(Found(loss, (logs.exp() * (logs - found)).sum(dim=-1).mean(dim=1)))
            after_each(way.name)
    return {name: Found(*map(torch.cat, zip(*parts, strict=True))) for name, parts in sums.items()}


def batch_windows(model: Any, windows: torch.Tensor) -> int:
    """Returns how many windows go through a model at a time."""
    return min(8, max(1, BATCH_ELEMENTS // (windows.shape[1] * model.config.vocab_size)))


def entry(way: Way, found: Mapping[str, Found]) -> dict[str, Any]:
    """Makes the entry of a format: perplexity per token, its distance from the base, and the uncertainty of that.

    `standard_error` is the error of the paired difference of the windows' losses, in percent of the perplexity.
    """
    own, change = found[way.name], found[way.name].loss - found[BASE].loss
    error = change.std().item() / math.sqrt(len(change)) if len(change) > 1 else 0.0
    ratio = math.exp(change.mean().item())
    return {
        "format": way.name,
        "bytes": way.num_bytes,
        "perplexity": round(math.exp(own.loss.mean().item()), 6),
        "difference_percent": float(f"{100 * (ratio - 1):.3g}"),
        "standard_error": float(f"{100 * ratio * error:.2g}"),
        "divergence": float(f"{own.divergence.mean().item():.3g}"),
    }


def both_variants(name: str, corpus: text.Corpus, sizes: Sizes, progress: Progress) -> dict[str, Any]:
    """Makes the entry of a model."""
    facts: dict[str, Any] = {"title": TITLES[name]}
    parts = (corpus.held_out, corpus.train)
    if name == real.MODEL:
        model, tokenizer = real.load()
        held_out, train = (real.tokens(tokenizer, part) for part in parts)
        how = sizes.of_real
        facts |= {"token": "token", "packages": real.versions()}
    else:
        model = models.build(name, sizes.model_seed)
        with progress.count(f"{name}: training", sizes.training.steps) as advance:
            rows = text.tokens(corpus.train)
            loss = models.train(model, rows, sizes.training, lambda step, now: advance(f"{now:.2f} nats a byte"))
        held_out, train = map(text.tokens, parts)
        how = sizes.of_trained
        facts |= {"token": "byte", "training_loss": round(loss, 4), "size": models.SIZES[name]._asdict()}
    windows, calibration = (
        text.windows(held_out, how.windows, how.length),
        text.windows(train, how.calibration, how.length),
    )
    variants = {}
    for variant in VARIANTS:
        if variant != VARIANTS[0]:
            models.add_outliers(model)
        found_ways = ways(name, model, calibration)
        batches = -(-how.windows // batch_windows(model, windows))
        with progress.count(f"{name}, {variant}: held-out text", len(found_ways) * batches) as advance:
            found = measure(model, windows, found_ways, advance)
        variants[variant] = [entry(way, found) for way in found_ways]
    parameters = sum(p.numel() for p in model.parameters())
    return {**facts, "parameters": parameters, "measuring": how._asdict(), "variants": variants}


def default_models() -> tuple[str, ...]:
    """Returns all models, except the real one if its packages are missing."""
    return tuple(name for name in TITLES if name != real.MODEL or not real.missing())


def run(names: Sequence[str], sizes: Sizes, progress: Progress) -> dict[str, Any]:
    """Makes the record of some models: versions, seeds, text, and for each model the entries of both variants.

    Raises:
        ModuleNotFoundError: the packages of the real model are not installed.
        formats.Mismatch: an op gave another output.
    """
    torch.set_num_threads(THREADS)
    corpus = text.collect()
    progress.say(f"{sum(corpus.characters.values()):,} characters: {corpus.characters}")
    sizes_of_text = {"train_bytes": len(corpus.train), "held_out_bytes": len(corpus.held_out)}
    return {
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "python": platform.python_version(),
        "processor": platform.machine(),
        "threads": THREADS,
        "seeds": {"weights": sizes.model_seed, "batches": sizes.training.seed},
        "training": sizes.training._asdict(),
        "outlier": models.OUTLIER,
        "text": {"characters": corpus.characters, **sizes_of_text, "digest": corpus.digest},
        "date": today(),
        "models": {name: both_variants(name, corpus, sizes, progress) for name in TITLES if name in names},
    }


def joined(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Joins a record with the models of another run: all of `new`, and those of `old` that `new` lacks.

    Raises:
        ValueError: the records differ in versions, text, seeds or sizes.
    """
    moved = [key for key in new if key not in ("date", "models") and old.get(key) != json.loads(json.dumps(new[key]))]
    if moved:
        raise ValueError(f"record: got another {', '.join(moved)} than the run; needs a run of all models")
    found = {**old["models"], **new["models"]}
    return {**new, "models": {name: found[name] for name in TITLES if name in found}}
