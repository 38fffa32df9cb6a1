"""scripts/perplexity.py without a model: the text is the same each time, and the page shows what the record says."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from bench.perplexity import page, text
from bench.perplexity.page import BEGIN, END, PAGE, RECORD
from bench.progress import Progress
from scripts import perplexity

ROOT = Path(__file__).resolve().parents[2]
LONG = "This docstring has more than forty characters. "


# --- the text


def docstrings(prefix: str, count: int) -> str:
    return "\n".join(f'def {prefix}{i}():\n    """{LONG}{prefix} {i}"""\n' for i in range(count))


def stdlib(root: Path, files: list[str]) -> Path:
    """A made-up standard library whose files are written in the order given."""
    contents = {
        "b.py": docstrings("b", 90) + docstrings("shared", 1),
        "a/z.py": docstrings("a", 90) + docstrings("shared", 1),
        "a/short.py": '"""Too short."""\n',
        "wrong.py": "def (:\n",
        "test/t.py": docstrings("unwanted", 3),
        "LICENSE.txt": "A licence, of a made-up Python.",
    }
    assert set(files) == set(contents)
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(contents[name], encoding="utf-8")
    return root


FILES = ["b.py", "a/z.py", "a/short.py", "wrong.py", "test/t.py", "LICENSE.txt"]


def test_the_same_files_give_the_same_text_in_whatever_order_they_were_made(tmp_path: Path) -> None:
    one = text.collect(stdlib(tmp_path / "one", FILES))
    other = text.collect(stdlib(tmp_path / "other", FILES[::-1]))
    assert one == other
    (tmp_path / "other" / "b.py").write_text(docstrings("c", 90), encoding="utf-8")
    assert text.collect(tmp_path / "other").digest != one.digest


def test_documents_occur_once_and_are_trained_on_or_held_out(tmp_path: Path) -> None:
    corpus = text.collect(stdlib(tmp_path, FILES))
    parts = [set(part.decode().split(text.BETWEEN)) for part in (corpus.train, corpus.held_out)]
    assert not parts[0] & parts[1]
    both = corpus.train + corpus.held_out
    for prefix in "ab":
        for i in range(90):
            assert both.count(f"{LONG}{prefix} {i}".encode() + b"\n") <= 1
            assert f"{LONG}{prefix} {i}".encode() in both
    assert both.count(f"{LONG}shared 0".encode()) == 1
    assert b"unwanted" not in both and b"Too short." not in both and b"of a made-up Python" in both
    assert 0.01 < len(corpus.held_out) / len(both) < 0.15
    assert corpus.characters["licence"] == 31
    assert corpus.characters["docstrings"] == sum(len(f"{LONG}{p} {i}") for p in "ab" for i in range(90)) + len(
        f"{LONG}shared 0"
    )


def test_this_python_has_help_topics() -> None:
    found = list(text.topics())
    assert len(found) > 50 and found == list(text.topics())


def test_a_library_without_documents_to_hold_out_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "topics", lambda: iter(["one"]))
    with pytest.raises(ValueError, match=f"stdlib: got 1 documents below {tmp_path}"):
        text.collect(tmp_path)


def test_windows_are_at_equal_distances() -> None:
    tokens = text.tokens(bytes(range(100)))
    found = text.windows(tokens, 3, 20)
    assert found[:, 0].tolist() == [0, 33, 66] and found[2].tolist() == list(range(66, 86))
    with pytest.raises(ValueError, match="count: got 6 windows of 20 tokens; needs at most 100 tokens"):
        text.windows(tokens, 6, 20)


# --- the page


def entry(name: str, **more: Any) -> dict[str, Any]:
    values = {"bytes": 256.0, "perplexity": 5.25, "difference_percent": 0.0, "standard_error": 0.0, "divergence": 0.0}
    return {"format": name, **values, "check": None, **more}


@pytest.fixture
def record() -> dict[str, Any]:
    int8 = {"bytes": 132.5, "perplexity": 5.26, "difference_percent": 0.19, "standard_error": 0.01, "divergence": 1e-4}
    better = {**int8, "difference_percent": -0.0123, "check": {"attention": 0.51, "steps": 1e-6, "own": 4e-6}}
    models = {
        name: {
            "title": f"Model {name}",
            "parameters": 3_344_640,
            "token": "byte",
            "measuring": {"windows": 64, "length": 256},
            "training_loss": 1.777,
            "variants": {
                "as trained": [entry("bfloat16"), entry("int8", **better)],
                "outlier channels": [entry("bfloat16"), entry("int8", **int8)],
            },
        }
        for name in ("one", "two")
    }
    del models["two"]["training_loss"]
    models["two"] |= {"token": "token", "packages": {"weights": "0.1"}}
    return {
        "torch": "2.13.0", "transformers": "5.23.0", "python": "3.11.7", "processor": "x86_64", "date": "2026-01-02",
        "seeds": {"weights": 0, "batches": 1}, "training": {"steps": 400, "batch": 8, "context": 256},
        "models": models,
        "text": {"characters": {"licence": 1000, "docstrings": 2000}, "held_out_bytes": 150},
    }  # fmt: skip


def test_the_table_has_a_row_for_each_format(record: dict[str, Any]) -> None:
    header, _, *rows = page.table(record)
    assert header.count("|") == 9 and "| as trained: perplexity |" in header
    assert rows == [
        "| **one**, Model one | a byte |  |  |  |  |  |  |",
        "| bfloat16 | 256 | 5.2500 | 0 | 0 | 5.2500 | 0 | 0 |",
        "| int8 | 132.5 | 5.2600 | -0.012 ± 0.01 % | 1.0e-04 | 5.2600 | +0.19 ± 0.01 % | 1.0e-04 |",
        "| **two**, Model two | a token |  |  |  |  |  |  |",
        *rows[1:3],
    ]


def test_the_facts_name_versions_seeds_and_the_check(record: dict[str, Any]) -> None:
    found = " ".join(page.facts(record))
    for words in (
        "torch 2.13.0, transformers 5.23.0, weights 0.1 and Python 3.11.7", "weights 0, batches 1", "3,000 characters",
        "150 bytes of them held out", "400 steps of 8 x 256 bytes: one 3.3 million parameters, 1.78 nats a byte.",
        "Measured: one 64 x 256 bytes; two 64 x 256 tokens",
        "differ by at most 0.51 of what is allowed", "from float32: one 1e-06 nats and 25%; two 1e-06 nats and 25%.",
    ):  # fmt: skip
        assert words in found


def test_a_record_whose_variants_have_other_formats_is_refused(record: dict[str, Any], tmp_path: Path) -> None:
    record["models"]["two"]["variants"]["as trained"].pop()
    path = tmp_path / "perplexity.json"
    page.write(record, path)
    with pytest.raises(ValueError, match="perplexity.json: two has other formats in one variant"):
        page.read(path)
    page.write({**record, "models": {}}, path)
    with pytest.raises(ValueError, match="got no models"):
        page.read(path)


def test_the_page_is_rewritten_and_checked(
    record: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page.write(record, tmp_path / RECORD)
    target = tmp_path / PAGE
    target.parent.mkdir(parents=True)
    target.write_text(f"Before.\n\n{BEGIN}\nold\n{END}\n\nAfter.\n", encoding="utf-8")
    assert perplexity.main(["--check"], root=tmp_path) == 1
    assert f"{PAGE} is out of date" in capsys.readouterr().err and "old" in target.read_text(encoding="utf-8")
    assert perplexity.main(["--table"], root=tmp_path) == 0
    new = target.read_text(encoding="utf-8")
    assert new == f"Before.\n\n{BEGIN}\n{page.block(record)}\n{END}\n\nAfter.\n"
    assert perplexity.main(["--check"], root=tmp_path) == 0


@pytest.mark.parametrize("wrong", [BEGIN, f"{END}{BEGIN}", f"{BEGIN}{BEGIN}{END}"])
def test_a_page_without_the_markers_is_an_error(
    wrong: str, record: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page.write(record, tmp_path / RECORD)
    (tmp_path / PAGE).parent.mkdir(parents=True)
    (tmp_path / PAGE).write_text(wrong, encoding="utf-8")
    assert perplexity.main(["--table"], root=tmp_path) == 1
    assert f"{PAGE}: needs {BEGIN}" in capsys.readouterr().err
    assert (tmp_path / PAGE).read_text(encoding="utf-8") == wrong


# --- how far it is


def test_progress_says_each_tenth_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress().count("training", 40) as advance:
        for step in range(40):
            advance(f"loss {step}")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert "4/40  training  loss 3" in lines[0] and "[########################] 40/40" in lines[-1]


def test_progress_has_a_bar_on_a_terminal() -> None:
    console = pytest.importorskip("rich.console", reason="needs rich")
    written = io.StringIO()
    shown = Progress()
    shown._console = console.Console(file=written, force_terminal=True, width=120)
    with shown.count("training", 4) as advance:
        for _ in range(4):
            advance("[words]")
    assert "training  [words]" in written.getvalue() and "4/4" in written.getvalue()


# --- what is recorded


def test_the_recorded_table_is_in_the_page() -> None:
    assert perplexity.main(["--check"], root=ROOT) == 0


def test_the_record_passed_its_own_check() -> None:
    record = json.loads((ROOT / RECORD).read_text(encoding="utf-8"))
    checked = 0
    for model in record["models"].values():
        for entries in model["variants"].values():
            for found in entries:
                if found["check"] is not None:
                    checked += 1
                    assert found["check"]["attention"] <= 1 and found["check"]["steps"] <= found["check"]["own"], found
    assert checked == 2 * (8 + 8 + 1 + 4), "formats of both ops, in both variants"


def test_in_the_record_finer_scales_lose_less_where_channels_are_large() -> None:
    record = page.read(ROOT / RECORD)
    entries = record["models"]["smollm2"]["variants"]["outlier channels"]
    found = {entry["format"]: entry["divergence"] for entry in entries}
    for coarse, fine in (
        ("int8, per_tensor", "int8, per_head"),
        ("int8, per_head", "int8, per_token_head"),
        ("int8, per_token", "int8, per_token_head"),
        ("int8, per_token_head", "int8, per_group of 32"),
    ):
        assert found[fine] < found[coarse], (coarse, fine)
