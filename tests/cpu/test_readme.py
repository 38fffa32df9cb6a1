"""Examples in the documentation run as pasted, its links and paths exist, and README has a limited length."""

import re
from pathlib import Path

import pytest
import torch

from tests.kit import examples
from tests.kit.examples import EXAMPLES, README, ROOT, USERS

CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PAGES = [README, CONTRIBUTING, *sorted((ROOT / "docs").rglob("*.md"))]
OPERATIONS = {
    "mla_fp8_decode",
    "mla_fp8_append",
    "gqa_decode",
    "kv_int8_append",
    "sink_attention",
    "merge_states",
}


INDEXER = {"index_append", "index_decode", "index_topk"}
"""Functions for which README has no room."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_can_be_pasted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    examples.run(name)


@pytest.mark.parametrize(
    ("pages", "wanted"), [([README], OPERATIONS), (USERS, OPERATIONS | INDEXER)], ids=["README", "users"]
)
def test_every_operation_has_an_example(pages: list[Path], wanted: set[str]) -> None:
    text = "".join(example for page, example in EXAMPLES.values() if page in pages)
    assert {name for name in wanted if f"{name}(" in text} == wanted


@pytest.mark.parametrize(("page", "limit"), [(README, 120), (CONTRIBUTING, 150)], ids=["README", "CONTRIBUTING"])
def test_a_page_stays_short(page: Path, limit: int) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= limit


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    prose = _prose(page)
    links = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r"^\[[^\]]+\]: (\S+)$", prose, re.MULTILINE)
    for link in links:
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    labels = set(re.findall(r"^\[([^\]]+)\]: ", prose, re.MULTILINE))
    used = set(re.findall(r"\]\[([\w-]+)\]", prose)) if labels else set()
    assert not broken and used == labels


def test_paths_that_contributing_names_exist() -> None:
    named = {name for name in re.findall(r"`([\w./]+)`", _prose(CONTRIBUTING)) if "/" in name}
    made = ("build/", ".venv/")  # not in a fresh checkout
    package = ROOT / "cute_kernels"
    places = (ROOT, package, *(path for path in package.iterdir() if path.is_dir()))  # also package directories
    missing = {name for name in named if not any((place / name).exists() for place in places)}
    assert not {name for name in missing if not name.startswith(made)}


def test_pages_that_sources_name_exist() -> None:
    sources = [
        file for folder in ("cute_kernels", "fp8_mla", "bench", "scripts") for file in (ROOT / folder).rglob("*.py")
    ]
    named = {
        (page, file) for file in sources for page in re.findall(r"docs/[\w/]+\.md", file.read_text(encoding="utf-8"))
    }
    assert not [f"{file.relative_to(ROOT)}: {page}" for page, file in sorted(named) if not (ROOT / page).exists()]


def _prose(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
