"""The table of a record of perplexities, and the page between whose markers it stands. Needs no torch."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any, Final

from bench import jsonl
from bench.report import markdown

BLOCK: Final = "perplexity"
BEGIN, END = markdown.marks(BLOCK)
RECORD: Final = pathlib.Path("results", "accuracy", "perplexity.json")
"""Not results/*.json: those are records of cards."""
PAGE: Final = pathlib.Path("docs", "users", "accuracy.md")
COLUMNS: Final = ("perplexity", "difference to bfloat16, %", "divergence")


def read(path: pathlib.Path) -> dict[str, Any]:
    """A record from its file.

    Raises:
        ValueError: it lacks what the table needs.
    """
    record = json.loads(path.read_text(encoding="utf-8"))
    for name, model in record.get("models", {}).items():
        formats = [[entry["format"] for entry in entries] for entries in model["variants"].values()]
        if not formats or any(names != formats[0] for names in formats):
            raise ValueError(f"{path.name}: {name} has other formats in one variant than in another")
    if not record.get("models"):
        raise ValueError(f"{path.name}: got no models, needs some")
    return record


def write(record: Mapping[str, Any], path: pathlib.Path) -> None:
    """A record to its file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(jsonl.folded(record) + "\n", encoding="utf-8")


def table(record: Mapping[str, Any]) -> list[str]:
    """Lines of Markdown: a row for each format of each model, the variants next to each other."""
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


def _cells(entry: Mapping[str, Any]) -> list[str]:
    if entry["format"] == "bfloat16":
        return [f"{entry['perplexity']:.4f}", "0", "0"]
    difference = f"{_percent(entry['difference_percent'], sign='+')} ± {_percent(entry['standard_error'])}"
    return [f"{entry['perplexity']:.4f}", difference, markdown.scientific(entry["divergence"])]


def _percent(value: float, sign: str = "") -> str:
    """To a thousandth of a percent: rounding to bfloat16 changes as much."""
    return f"{round(value, 3):{sign}g}"


def facts(record: Mapping[str, Any]) -> list[str]:
    """Sentences on what the record is of."""
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


def block(record: Mapping[str, Any]) -> str:
    """What stands between the markers."""
    return "\n".join([*table(record), "", *(f"- {fact}" for fact in facts(record))])


def fill(text: str, record: Mapping[str, Any]) -> str:
    """The page with the record's table between its marks; raises as `markdown.fill`."""
    return markdown.fill(text, BLOCK, block(record))
