"""Compares the machine code and the plans of this checkout with those of a commit. Needs no GPU.

    python scripts/compare_machine_code.py              with HEAD: what have changes that are not committed done?
    python scripts/compare_machine_code.py COMMIT       with another one
    python scripts/compare_machine_code.py --only mla   of specifications whose text has "mla" in it, and no plans
    python scripts/compare_machine_code.py COMMIT --dropped us    plans have lost the field "us", which decides nothing

Takes all specifications that a room ships or has as candidates, and those of the covering arrays of the tests. Prints
"machine code unchanged: N specifications, M plans", or what differs. Exit status 1 where anything does, 2 where
something could not be compared. What is compiled once is kept in build/machine_code by sources and compiler, of
whatever commit.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# What looks is this checkout's; what is looked at comes from PYTHONPATH, which may be another commit's.
sys.path.insert(0, str(ROOT))
from bench import plans as plans_module  # noqa: E402
from bench.machine_code import STORE, CodeDigest, Store, digests_of_specs  # noqa: E402

sys.path.remove(str(ROOT))

SHOWN = 20
"""Differing plans that are printed; the rest is counted."""


@dataclass(frozen=True)
class Tree:
    """What one checkout builds: digests of specifications by their repr, plans by their shapes."""

    digests: Mapping[str, CodeDigest]
    plans: Mapping[str, Any]


@dataclass(frozen=True)
class Difference:
    """What two trees do not have in common, in words."""

    specs: list[str]
    plans: list[str]
    unreadable: list[str]
    renamed: int

    @property
    def exit_status(self) -> int:
        """0 for none, 1 for some, 2 where that is not known."""
        return 2 if self.unreadable else 1 if self.specs or self.plans else 0


def plans_by_code(tree: Tree, dropped: Sequence[str] = ()) -> dict[str, Any]:
    """The plans of a tree with the machine code of each specification in the place of its repr.

    A specification whose field has another name is then the same plan. Fields of plans that are `dropped` are left out.
    """
    ids = {spec: f"code {digest.id}" for spec, digest in tree.digests.items()}

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(one) for key, one in value.items() if key not in dropped}
        if isinstance(value, list):
            return [plain(one) for one in value]
        return ids.get(value, value) if isinstance(value, str) else value

    return {name: plain(plan) for name, plan in tree.plans.items()}


def compare(before: Tree, after: Tree, dropped: Sequence[str] = ()) -> Difference:
    """Everything in which two trees differ, but for `dropped` fields of plans.

    Specifications that one tree alone has are paired by their machine code: a field with another name changes the repr
    of each.
    """
    before, after = (Tree(tree.digests, plans_by_code(tree, dropped)) for tree in (before, after))
    specs = [
        f"{spec}: {_changed(before.digests[spec], digest)}"
        for spec, digest in after.digests.items()
        if spec in before.digests and before.digests[spec] != digest
    ]
    gone = {spec: digest for spec, digest in before.digests.items() if spec not in after.digests}
    new = {spec: digest for spec, digest in after.digests.items() if spec not in before.digests}
    pairs = Counter(gone.values()) & Counter(new.values())
    for word, only in (("no longer built", gone), ("new", new)):
        left = pairs.copy()
        for spec, digest in only.items():
            if left[digest]:
                left[digest] -= 1
            else:
                specs.append(f"{spec}: {word}")
    shapes = {**before.plans, **after.plans}
    unreadable = [name for name in shapes if name.endswith(plans_module.UNREADABLE)]
    plans = [
        f"{name}: {before.plans.get(name, 'no plan')} -> {after.plans.get(name, 'no plan')}"
        for name in shapes
        if name not in unreadable and before.plans.get(name) != after.plans.get(name)
    ]
    return Difference(specs, plans, [f"{name}: {shapes[name]}" for name in unreadable], pairs.total())


def _changed(before: CodeDigest, after: CodeDigest) -> str:
    parts = [name for name in ("sass", "launch") if getattr(before, name) != getattr(after, name)]
    return f"{' and '.join(parts)} changed"


def tell(difference: Difference, before: Tree, after: Tree) -> str:
    """A difference as a report."""
    lines = [f"machine code: {line}" for line in difference.specs]
    lines += [f"plan: {line}" for line in difference.plans[:SHOWN]]
    if more := len(difference.plans) - SHOWN:
        lines += [f"... and {more} more plans"] * (more > 0)
    lines += [f"not compared: {line}" for line in difference.unreadable]
    if difference.renamed:
        lines.append(f"{difference.renamed} specifications have another text and the same machine code")
    if difference.exit_status == 0:
        lines.append(f"machine code unchanged: {len(after.digests)} specifications, {len(after.plans)} plans")
    else:
        lines.append(
            f"differing: {len(difference.specs)} of {len({**before.digests, **after.digests})} specifications, "
            f"{len(difference.plans)} of {len({**before.plans, **after.plans})} plans"
        )
    return "\n".join(lines)


# ---- one tree, looked at by a process of its own


def specs_of_tree(root: Path) -> list[Any]:
    """What the rooms of the tree ship or have as candidates, and what its covering arrays run."""
    files = sorted((root / "cute_kernels").rglob("*spec.py"))
    modules = [importlib.import_module(".".join(file.relative_to(root).with_suffix("").parts)) for file in files]
    with contextlib.suppress(ImportError):  # of a commit before there were any
        modules.append(importlib.import_module("tests.kit.covering"))
    listed = [
        getattr(module, name)()
        for module in modules
        for name in ("shipped_specs", "candidate_specs", "all_specs")
        if module.__name__ == getattr(getattr(module, name, None), "__module__", None)
    ]
    return list(dict.fromkeys(spec for specs in listed for spec in specs))


def look(root: Path, only: str, store: Store, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Digests and plans of the tree that this process imports."""
    import cute_kernels

    if Path(cute_kernels.__file__).resolve().parents[1] != root.resolve():
        raise RuntimeError(f"cute_kernels: got that of {cute_kernels.__file__}; needs that of {root}")
    specs = [spec for spec in specs_of_tree(root) if only.lower() in repr(spec).lower()]
    digests = digests_of_specs(specs, store, progress=progress)
    plans = {} if only else plans_module.snapshot()
    return {"digests": {repr(spec): dataclasses.asdict(digest) for spec, digest in digests.items()}, "plans": plans}


@contextlib.contextmanager
def reporting(title: str) -> Iterator[Callable[[int, int], None]]:
    """A function that shows how many of how many are compiled: a bar where rich is installed, lines elsewhere."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield lambda done, total: print(f"{title}: {done} of {total} compiled", file=sys.stderr, flush=True)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    from rich.console import Console

    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def read_tree(root: Path, title: str, only: str) -> Tree:
    """Looks at a tree in a new process.

    Raises:
        RuntimeError: it failed; what it said is on stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "tree.json"
        command = [sys.executable, __file__, "--look", str(root), "--title", title, "--only", only, "--out", str(out)]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        if subprocess.run(command, cwd=folder, env=environment).returncode != 0:
            raise RuntimeError(f"{title} could not be looked at")
        facts = json.loads(out.read_text(encoding="utf-8"))
    return Tree({spec: CodeDigest(**digest) for spec, digest in facts["digests"].items()}, facts["plans"])


@contextlib.contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """The files of a commit in a temporary directory.

    Raises:
        RuntimeError: git does not know it.
    """
    archive = subprocess.run(["git", "archive", "--format=tar", commit], cwd=ROOT, capture_output=True)
    if archive.returncode != 0:
        raise RuntimeError(f"commit: got {commit}; {archive.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
        yield Path(folder).resolve()


def main() -> int:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default="HEAD")
    parser.add_argument("--only", default="", metavar="TEXT", help="specifications whose text has this, and no plans")
    parser.add_argument("--dropped", nargs="*", default=(), metavar="FIELD", help="fields that plans have lost")
    parser.add_argument("--look", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--title", default="", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.look:
        with reporting(given.title) as progress:
            facts = look(given.look, given.only, Store(STORE), progress)
        given.out.write_text(json.dumps(facts), encoding="utf-8")
        return 0
    Store(STORE).prune()
    try:
        with checkout(given.commit) as folder:
            before = read_tree(folder, given.commit, given.only)
        after = read_tree(ROOT, "this checkout", given.only)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    difference = compare(before, after, given.dropped)
    print(tell(difference, before, after))
    return difference.exit_status


if __name__ == "__main__":
    sys.exit(main())
