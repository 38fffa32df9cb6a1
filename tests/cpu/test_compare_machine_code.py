"""The command that compares machine code and plans: what counts as the same, and what it says."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench import plans
from bench.machine_code import CodeDigest
from scripts import compare_machine_code as command
from scripts.compare_machine_code import Tree, compare, tell

ROOT = Path(__file__).resolve().parents[2]
ONE, TWO, THREE = (CodeDigest(letter * 64, letter * 64) for letter in "123")


def test_nothing_differs() -> None:
    tree = Tree({"A()": ONE, "B()": TWO}, {"mla batch=1": {"ctas": 1}})
    found = compare(tree, tree)
    assert found.exit_status == 0
    assert tell(found, tree, tree) == "machine code unchanged: 2 specifications, 1 plans"


def test_plans_name_machine_code_and_lose_fields_that_are_dropped() -> None:
    """Plans with specifications of different text are equal where the machine code is equal, and only there."""
    before = Tree({"A(x=1)": ONE}, {"mla batch=1": [{"spec": "A(x=1)", "ctas": 1, "us": 2.0}]})
    after = Tree({"A()": ONE}, {"mla batch=1": [{"spec": "A()", "ctas": 1}]})
    assert compare(before, after, ["us"]).exit_status == 0
    assert len(compare(before, after).plans) == 1, "us is a difference unless it is named"
    other = Tree({"A()": TWO}, after.plans)
    assert len(compare(before, other, ["us"]).plans) == 1


def test_each_difference_is_named() -> None:
    before = Tree({"A()": ONE, "B()": TWO, "Gone()": TWO}, {"mla batch=1": {"ctas": 1}, "mla batch=2": {"ctas": 2}})
    after = Tree({"A()": CodeDigest(ONE.sass, "4" * 64), "B()": THREE}, {"mla batch=1": {"ctas": 3}})
    found = compare(before, after)
    assert found.exit_status == 1
    assert found.specs == ["A(): launch changed", "B(): sass and launch changed", "Gone(): no longer built"]
    report = tell(found, before, after)
    assert "plan: mla batch=1: {'ctas': 1} -> {'ctas': 3}" in report
    assert "plan: mla batch=2: {'ctas': 2} -> no plan" in report
    assert report.endswith("differing: 3 of 3 specifications, 2 of 2 plans")


def test_another_text_of_the_same_code_is_no_difference() -> None:
    before = Tree({"A(x=1)": ONE, "A(x=2)": ONE, "B()": TWO}, {})
    after = Tree({"A(y=1)": ONE, "A(y=2)": ONE, "B()": TWO}, {})
    found = compare(before, after)
    assert (found.exit_status, found.specs, found.renamed) == (0, [], 2)
    assert "2 specifications have another text and the same machine code" in tell(found, before, after)
    more = compare(before, Tree({**after.digests, "A(y=3)": ONE}, {}))
    assert more.specs == ["A(y=3): new"]


def test_what_cannot_be_read_is_not_called_the_same() -> None:
    tree = Tree({"A()": ONE}, {f"mla {plans.UNREADABLE}": "ImportError: gone"})
    found = compare(tree, tree)
    assert found.exit_status == 2
    assert "not compared: mla cannot be listed: ImportError: gone" in tell(found, tree, tree)


def test_all_plans_are_in_the_snapshot() -> None:
    found = plans.snapshot()
    assert not [name for name in found if name.endswith(plans.UNREADABLE)]
    assert {name.partition(" ")[0] for name in found} == {"mla", "gqa", "sink"}
    assert len(found) > 5000
    refused = [name for name, plan in found.items() if str(plan).startswith("refused")]
    assert not refused
    cut = found["mla sparse=False batch=7 s_q=1 h_q=128 max_keys=131072 ragged=True"]
    assert "balanced=True" in cut[0]["spec"] and cut[0]["max_ctas"] == 132 and cut[1]["max_ctas"] == 78


def test_a_plan_with_other_arguments_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cute_kernels.sink.plan.route", lambda *, only: only)
    monkeypatch.setattr(plans, "_mla_shapes", lambda: iter(()))
    monkeypatch.setattr(plans, "_gqa_shapes", lambda: iter(()))
    found = plans.snapshot()
    assert "TypeError" in found[f"sink route {plans.UNREADABLE}"]
    assert any(name.startswith("sink order batch") for name in found)


def test_every_room_is_compared() -> None:
    found = {type(spec).__name__ for spec in command.specs_of_tree(ROOT)}
    assert {"MlaDecodeSpec", "MlaAppendSpec", "GqaDecodeSpec", "KvAppendSpec", "MergeSpec", "SinkForwardSpec"} <= found


def test_an_unknown_commit_is_said() -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "scripts/compare_machine_code.py", "no-such-commit"],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 2
    assert "commit: got no-such-commit" in result.stderr
