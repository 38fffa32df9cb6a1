"""The tables of a record of perplexities, and the pages between whose markers they stand. Needs no torch."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any, Final

from bench import jsonl
from bench.report import markdown
from fp8_mla.formats import FORMATS

RECORD: Final = pathlib.Path("results", "accuracy", "perplexity.json")
"""Not results/*.json: those are records of cards."""
REAL: Final = "smollm2"
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


def brief(record: Mapping[str, Any]) -> list[str]:
    """Lines of Markdown: the formats of the real model and those of latents, without the perplexities themselves."""
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


def filled(root: pathlib.Path) -> dict[pathlib.Path, str]:
    """Both pages of a checkout with the tables of its record between their marks; raises as `markdown.fill`."""
    record = read(root / RECORD)
    blocks = {
        root / "docs" / "users" / "accuracy.md": ("perplexity-brief", brief(record)),
        root / "results" / "README.md": ("perplexity", [*table(record), "", *(f"- {fact}" for fact in facts(record))]),
    }
    return {
        page: markdown.fill(page.read_text(encoding="utf-8"), name, "\n".join(lines))
        for page, (name, lines) in blocks.items()
    }
