"""Tables of the perplexity of small language models through each format of a cache: see scripts/perplexity.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from bench.report import markdown
from fp8_mla.formats import FORMATS

Record = Mapping[str, Any]
REAL: Final = "smollm2"
COLUMNS: Final = ("perplexity", "difference to bfloat16, %", "divergence")


def whole(record: Record) -> list[str]:
    """Returns the table and the facts about the record."""
    return [*table(record), "", *(f"- {fact}" for fact in facts(record))]


def table(record: Record) -> list[str]:
    """Returns lines of Markdown: a row for each format of each model, the variants next to each other."""
    models = record["models"]
    variants = list(next(iter(models.values()))["variants"])
    header = ["cache", "bytes", *(f"{variant}: {column}" for variant in variants for column in COLUMNS)]
    rows = []
    for name, model in models.items():
        rows.append([f"**{name}**, {model['title']}", f"a {model['token']}", *[""] * (len(header) - 2)])
        for entries in zip(*model["variants"].values(), strict=True):
            row = [entries[0]["format"], f"{entries[0]['bytes']:g}"]
            rows.append([*row, *(cell for entry in entries for cell in _cells(entry))])
    return markdown.table(header, rows)


def brief(record: Record) -> list[str]:
    """Returns lines of Markdown: the formats of the real model and of latents, without the perplexities themselves."""
    models = record["models"]
    variants = list(next(iter(models.values()))["variants"])
    header = ["cache", "bytes", *(f"{variant}: {column}" for variant in variants for column in COLUMNS[1:])]
    rows = []
    for name, model in models.items():
        for entries in zip(*model["variants"].values(), strict=True):
            if name == REAL or entries[0]["format"] in FORMATS:
                cells = (cell for entry in entries for cell in _cells(entry)[1:])
                rows.append([entries[0]["format"], f"{entries[0]['bytes']:g}", *cells])
    return markdown.table(header, rows)


def _cells(entry: Record) -> list[str]:
    if entry["format"] == "bfloat16":
        return [f"{entry['perplexity']:.4f}", "0", "0"]
    difference = f"{_percent(entry['difference_percent'], sign='+')} ± {_percent(entry['standard_error'])}"
    return [f"{entry['perplexity']:.4f}", difference, markdown.scientific(entry["divergence"])]


def _percent(value: float, sign: str = "") -> str:
    """Formats a thousandth of a percent: rounding to bfloat16 changes as much."""
    return f"{round(value, 3):{sign}g}"


def facts(record: Record) -> list[str]:
    """Returns sentences about how the record was made."""
    text, training, models = record["text"], record["training"], record["models"]
    sources = ", ".join(f"{name} {count:,}" for name, count in text["characters"].items())
    small = {name: model for name, model in models.items() if "training_loss" in model}
    losses = "; ".join(
        f"{name} {model['parameters'] / 1e6:.1f} million parameters, {model['training_loss']:.2f} nats a byte"
        for name, model in small.items()
    )
    windows = "; ".join(
        f"{name} {model['measuring']['windows']} x {model['measuring']['length']} {model['token']}s"
        for name, model in models.items()
    )
    packages = [
        f"{package} {version}" for model in models.values() for package, version in model.get("packages", {}).items()
    ]
    seeds = ", ".join(f"{name} {seed}" for name, seed in record["seeds"].items())
    versions = ", ".join([f"torch {record['torch']}", f"transformers {record['transformers']}", *packages])
    return [
        f"Recorded {record['date']} with {versions} and Python {record['python']} on {record['processor']}, "
        f"seeds: {seeds}.",
        f"Text: {sum(text['characters'].values()):,} characters ({sources}), {text['held_out_bytes']:,} bytes of them "
        f"held out. Measured: {windows}.",
        f"Trained here, {training['steps']} steps of {training['batch']} x {training['context']} bytes: {losses}.",
        "Attention is held to the ops over the same cache, to a unit in the last place of bfloat16.",
    ]
