"""Pages keep their word: examples run as pasted, links and named paths exist, and README fits on a few screens."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
README, CONTRIBUTING = ROOT / "README.md", ROOT / "CONTRIBUTING.md"
USERS = sorted((ROOT / "docs" / "users").glob("*.md"))
PAGES = [README, CONTRIBUTING, *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = {
    f"{page.stem}-{number}": (page, example)
    for page in [README, *USERS]
    for number, example in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
}
LIMITS = {
    # README and docs/users print these words and a number. One rounding to bfloat16 is 1.7e-3.
    "relative error": 3e-3,
    "merged against whole, relative error": 5e-3,
    "with a sink, relative error": 5e-3,
    "sparse against dense, relative error": 3e-3,
    "sink of 0, relative error": 5e-3,
    "BNSH against pages, relative error": 3e-3,
    "INT8 against bfloat16, relative error": 2e-2,  # quantization, scales per token and head
    "656 bytes against bfloat16, relative error": 4e-2,  # half an ulp of e4m3 is up to 6e-2
    "chunk against whole": 2**-6,  # a bit of bfloat16, should a sum round differently
    "packed against batch": 2**-6,
}
OPERATIONS = {
    "mla_fp8_decode",
    "mla_fp8_append",
    "gqa_decode",
    "kv_int8_append",
    "sink_attention",
    "merge_states",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_can_be_pasted(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page, example = EXAMPLES[name]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch.manual_seed(0)
    names: dict[str, object] = {}
    exec(compile(example, str(page), "exec"), names)
    for line in capsys.readouterr().out.splitlines():
        what, _, value = line.rpartition(": ")
        assert float(value) < LIMITS[what], line
    for tensor in names.values():
        if isinstance(tensor, torch.Tensor) and tensor.is_leaf and tensor.requires_grad:
            assert tensor.grad is not None and tensor.grad.abs().max() > 0


@pytest.mark.parametrize("pages", [[README], USERS], ids=["README", "users"])
def test_every_operation_has_an_example(pages: list[Path]) -> None:
    text = "".join(example for page, example in EXAMPLES.values() if page in pages)
    assert {name for name in OPERATIONS if f"{name}(" in text} == OPERATIONS


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
    places = (ROOT, package, *(path for path in package.iterdir() if path.is_dir()))  # what stands in a room, too
    missing = {name for name in named if not any((place / name).exists() for place in places)}
    assert not {name for name in missing if not name.startswith(made)}


def _prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def _anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
