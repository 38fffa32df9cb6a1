"""The whole job: train each model, measure each format of its cache twice, and make the record."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from bench.perplexity import measure, models, real, text
from bench.progress import Progress

THREADS: Final = 1
"""Of torch: sums are taken in the same order on any number of cores, and another job has the rest."""
TITLES: Final = {
    real.MODEL: "SmolLM2-135M-Instruct: 9 query and 3 KV heads of 64",
    "gqa": "small Llama: 8 query and 2 KV heads of 64",
    "v3.2": "small model with the latents of DeepSeek-V3.2, 4 heads",
    "v4": "small model with the latents of DeepSeek-V4, 4 heads",
}
"""Models in the order of the table."""
VARIANTS: Final = ("as trained", "outlier channels")


class Measuring(NamedTuple):
    """What a model is measured with: `windows` of `length` tokens, `calibration` more for scales.

    The first `prefix` tokens are decoded step by step.
    """

    windows: int
    length: int
    calibration: int
    prefix: int


class Sizes(NamedTuple):
    """How much of everything. `of_real`: for the model that others have trained."""

    training: models.Training = models.Training()
    model_seed: int = 0
    of_trained: Measuring = Measuring(windows=64, length=256, calibration=16, prefix=48)
    of_real: Measuring = Measuring(windows=8, length=256, calibration=4, prefix=8)


def trained(
    name: str, corpus: text.Corpus, sizes: Sizes, folder: pathlib.Path | None, progress: Progress
) -> tuple[Any, float]:
    """A trained model and its last loss, out of `folder` where it lies there from a run like this one.

    Args:
        name: one of `models.MODELS`.
        corpus: to train on.
        sizes: seeds and steps.
        folder: where weights are kept; None: nowhere.
        progress: shows the steps.
    """
    model = models.build(name, sizes.model_seed)
    how = sizes.training
    facts = [name, corpus.digest, repr((models.SIZES[name], how, sizes.model_seed)), torch.__version__]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
    kept = None if folder is None else folder / f"{name}-{key}.pt"
    if kept is not None and kept.is_file():
        progress.say(f"{name}: weights of {kept.name}")
        found = torch.load(kept, weights_only=True)
        model.load_state_dict(found["weights"])
        return model, found["loss"]
    with progress.count(f"{name}: training", how.steps) as advance:
        rows = text.tokens(corpus.train)
        loss = models.train(model, rows, how, lambda step, loss: advance(f"{loss:.2f} nats a byte"))
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"weights": model.state_dict(), "loss": loss}, kept)
    return model, loss


def measured(
    name: str, model: Any, held_out: torch.Tensor, train: torch.Tensor, how: Measuring, progress: Progress
) -> list[dict[str, Any]]:
    """Entries of the record, one a format, for the model as it is; texts are (tokens,) int64."""
    windows = text.windows(held_out, how.windows, how.length)
    with progress.step(f"{name}: calibration"):
        found_ways = measure.ways(name, model, text.windows(train, how.calibration, how.length))
    with progress.step(f"{name}: comparing with the ops"):
        checked = measure.check(model, windows[0, : how.prefix], found_ways)
    batches = -(-how.windows // measure.batch_windows(model, windows[:, :-1]))
    with progress.count(f"{name}: held-out text", len(found_ways) * batches) as advance:
        found = measure.measure(model, windows, found_ways, lambda: advance(""))
    return [measure.entry(way, found, checked.get(way.name)) for way in found_ways]


def both_variants(
    name: str, corpus: text.Corpus, sizes: Sizes, folder: pathlib.Path | None, progress: Progress
) -> dict[str, Any]:
    """What the record has of a model."""
    facts: dict[str, Any] = {"title": TITLES[name]}
    parts = (corpus.held_out, corpus.train)
    if name == real.MODEL:
        with progress.step(f"{name}: loading"):
            model, tokenizer = real.load()
            held_out, train = (real.tokens(tokenizer, part) for part in parts)
        how = sizes.of_real
        facts |= {"token": "token", "packages": real.versions()}
    else:
        model, loss = trained(name, corpus, sizes, folder, progress)
        held_out, train = map(text.tokens, parts)
        how = sizes.of_trained
        facts |= {"token": "byte", "training_loss": round(loss, 4), "size": models.SIZES[name]._asdict()}
    variants = {}
    for variant in VARIANTS:
        if variant != VARIANTS[0]:
            models.add_outliers(model)
        variants[variant] = measured(name, model, held_out, train, how, progress)
    parameters = sum(p.numel() for p in model.parameters())
    return {**facts, "parameters": parameters, "measuring": how._asdict(), "variants": variants}


def default_models() -> tuple[str, ...]:
    """All, but the real one where its packages are missing."""
    return tuple(name for name in TITLES if name != real.MODEL or not real.missing())


def run(
    names: Sequence[str], sizes: Sizes, progress: Progress, folder: pathlib.Path | None = None
) -> dict[str, Any]:  # fmt: skip
    """The record of some models: versions, seeds, text, and for each model the entries of both variants.

    Raises:
        ModuleNotFoundError: the packages of the real model are not installed.
        measure.Mismatch: decoding step by step gave other probabilities.
    """
    torch.set_num_threads(THREADS)
    with progress.step("collecting text"):
        corpus = text.collect()
    progress.say(f"{sum(corpus.characters.values()):,} characters: {corpus.characters}")
    found = {name: both_variants(name, corpus, sizes, folder, progress) for name in TITLES if name in names}
    return {
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "python": platform.python_version(),
        "processor": platform.machine(),
        "threads": THREADS,
        "seeds": {"weights": sizes.model_seed, "batches": sizes.training.seed},
        "training": sizes.training._asdict(),
        "outlier": models.OUTLIER,
        "text": {
            "characters": corpus.characters,
            "train_bytes": len(corpus.train),
            "held_out_bytes": len(corpus.held_out),
            "digest": corpus.digest,
        },
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "models": found,
    }


def joined(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """A record with the models of another run: those of `new`, and of `old` what `new` lacks.

    Raises:
        ValueError: they differ in versions, text, seeds or sizes.
    """
    moved = [key for key in new if key not in ("date", "models") and old.get(key) != json.loads(json.dumps(new[key]))]
    if moved:
        raise ValueError(f"record: got another {', '.join(moved)} than the run; needs a run of all models")
    found = {**old["models"], **new["models"]}
    return {**new, "models": {name: found[name] for name in TITLES if name in found}}
