"""Text that every Python has: its licence, the help topics of `pydoc` and the docstrings of its standard library.

The same Python release gives the same text, byte for byte; the record has its digest. A digest decides whether a
document, a topic or a docstring, is trained on or held out; no document occurs twice.
"""

from __future__ import annotations

import ast
import hashlib
import pathlib
import sysconfig
import warnings
from collections.abc import Iterator
from typing import Final, NamedTuple

import torch

BETWEEN: Final = "\n\n\n"
"""Text between two documents."""
HELD_OUT: Final = 13
"""Documents whose digest begins with a byte below this, 5%, are held out."""
SHORTEST: Final = 40
"""Docstrings of fewer characters are left out: most say "Return self." or the like."""
LEFT_OUT: Final = frozenset(
    "dist-packages ensurepip idle_test idlelib lib2to3 site-packages test tests turtledemo".split()
)
"""Folders without docstrings of the standard library."""


class Corpus(NamedTuple):
    """Bytes to train on and bytes held out.

    characters  number of characters of each source
    digest      sha256 of both, the first 16 digits
    """

    train: bytes
    held_out: bytes
    characters: dict[str, int]
    digest: str


def licence(stdlib: pathlib.Path) -> Iterator[str]:
    """Yields the licence of Python, which not every distribution includes."""
    for path in (stdlib / "LICENSE.txt", stdlib.parent / "LICENSE"):
        if path.is_file():
            yield path.read_text(encoding="utf-8")
            return


def topics() -> Iterator[str]:
    """Yields what `help("TOPIC")` prints, by the names of the topics."""
    from pydoc_data.topics import topics as found

    for name in sorted(found):
        yield found[name]


def docstrings(stdlib: pathlib.Path) -> Iterator[str]:
    """Yields docstrings of modules, classes and functions, by path, then in `ast.walk` order; nothing is imported."""
    for path in sorted(stdlib.rglob("*.py"), key=lambda path: path.relative_to(stdlib).as_posix()):
        if LEFT_OUT & set(path.relative_to(stdlib).parts):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some modules have escapes that future Pythons refuse
            try:
                tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError):
                continue  # a template, or a file that is wrong on purpose
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found = ast.get_docstring(node)
                if found and len(found) >= SHORTEST:
                    yield found


def collect() -> Corpus:
    """Collects all documents of this Python."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    sources = {"licence": licence(root), "pydoc topics": topics(), "docstrings": docstrings(root)}
    seen: set[str] = set()
    parts: dict[bool, list[str]] = {False: [], True: []}
    characters = dict.fromkeys(sources, 0)
    for name, documents in sources.items():
        for document in documents:
            if document not in seen:
                seen.add(document)
                # a document's digest decides, so that its position does not
                parts[hashlib.sha256(document.encode()).digest()[0] < HELD_OUT].append(document)
                characters[name] += len(document)
    train, held_out = (BETWEEN.join(parts[key]).encode() for key in (False, True))
    digest = hashlib.sha256(hashlib.sha256(train).digest() + hashlib.sha256(held_out).digest())
    return Corpus(train, held_out, characters, digest.hexdigest()[:16])


def tokens(text: bytes) -> torch.Tensor:
    """Returns (bytes,) int64: a token is a byte."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int64)


def windows(found: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """Returns (count, length) of (tokens,): windows at equal distances, the first at the start.

    Raises:
        ValueError: the windows overlap.
    """
    if count * length > len(found):
        raise ValueError(f"count: got {count} windows of {length} tokens; needs at most {len(found)} tokens")
    step = len(found) // count
    return torch.stack([found[start : start + length] for start in range(0, count * step, step)])
