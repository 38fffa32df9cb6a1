"""Records on disk: one line of JSON with the facts of the whole record, then one line for each case.

Other results are one JSON value; its long parts have lines of their own: `folded`.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

LIST = "list"
"""Key of a line that tells which list of the record the line belongs to."""
LONGEST = 1800
"""Most characters of a line, as far as possible."""


def read(path: pathlib.Path) -> dict[str, Any]:
    """Reads a record with its lists, as `write` got it.

    Raises:
        ValueError: a line is not JSON.
    """
    first, *lines = path.read_text(encoding="utf-8").splitlines()
    record: dict[str, Any] = json.loads(first)
    for line in lines:
        entry = json.loads(line)
        record.setdefault(entry.pop(LIST), []).append(entry)
    return record


def write(record: Mapping[str, Any], path: pathlib.Path) -> None:
    """Writes a record whole or not at all: a reader never sees half a file."""
    lists = {
        name: value
        for name, value in record.items()
        if isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value)
    }
    rows = [{name: value for name, value in record.items() if name not in lists}]
    rows += [{LIST: name, **entry} for name, entries in lists.items() for entry in entries]
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows), encoding="utf-8")
    draft.replace(path)


def folded(value: Any) -> str:
    """Formats a value as JSON; parts that fit have a line of their own."""
    line = json.dumps(value, allow_nan=False)
    if len(line) <= LONGEST or not isinstance(value, Mapping | list):
        return line
    if isinstance(value, Mapping):
        return "{\n" + ",\n".join(f"{json.dumps(key)}: {folded(one)}" for key, one in value.items()) + "\n}"
    return "[\n" + ",\n".join(map(folded, value)) + "\n]"
