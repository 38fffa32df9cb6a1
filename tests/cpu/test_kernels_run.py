"""Which machine code a case has run, and which machine code in a record is no longer built."""

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from bench import gqa as bench_gqa
from bench import kernels_run, records
from bench import sink as bench_sink
from bench.cases import case_name, name_kernels
from bench.records import kernel_id
from cute_kernels.gqa import append_op as gqa_append_op
from cute_kernels.gqa import op as gqa_op
from cute_kernels.merge import op as merge_op
from cute_kernels.mla import append_op as mla_append_op
from cute_kernels.mla import op as mla_op
from cute_kernels.mla.append_spec import MlaAppendSpec
from cute_kernels.runtime import compile
from tests.cpu.tiny_spec import TinySpec
from tests.kit.made_up_records import TOOLCHAIN, coded_record, some_record

OPS: tuple[Any, ...] = (mla_op, mla_append_op, gqa_op, gqa_append_op, merge_op)


def digest(spec: Any, version: int = 0) -> Any:
    return SimpleNamespace(sass=f"{hash(spec) % 2**64 + version:064x}", launch="1" * 64)


def digests(specs: Any) -> dict[Any, Any]:
    return {spec: digest(spec) for spec in specs}


def test_what_a_case_asks_for_is_noted_although_it_was_prepared_before(monkeypatch):
    loaded = {TinySpec(width): object() for width in (32, 64, 96)}
    monkeypatch.setattr(compile, "_kernels", loaded)
    monkeypatch.setattr(compile, "_load_or_compile", lambda spec: spec)
    for op in OPS:
        monkeypatch.setitem(op._prepared, "a call of these shapes", object())
    with kernels_run.noting() as asked:
        assert all(not op._prepared for op in OPS), "a prepared call asks for nothing"
        assert compile.get_kernel(TinySpec(64)) is loaded[TinySpec(64)]
        for _ in range(2):
            compile.get_kernel(TinySpec(128))
    assert list(asked) == [TinySpec(64), TinySpec(128)]
    compile.get_kernel(TinySpec(32))
    assert list(asked) == [TinySpec(64), TinySpec(128)], "noted after the block"
    assert compile._kernels is loaded and TinySpec(128) in loaded, "what was loaded in the block stays loaded"


def test_a_module_that_remembers_calls_is_forgotten_whatever_room_it_is_in(monkeypatch):
    module: Any = SimpleNamespace(_prepared={"a call": 1})
    monkeypatch.setitem(sys.modules, "cute_kernels.of_a_new_room", module)
    with pytest.raises(KeyError), kernels_run.noting():
        raise KeyError
    assert module._prepared == {}
    assert type(compile._kernels) is dict, "as before, also where a case raises"


def test_cases_name_their_kernels():
    specs = [TinySpec(32), TinySpec(64), TinySpec(96)]
    code = SimpleNamespace(digests_of_specs=digests, toolchain=lambda: TOOLCHAIN)
    cases: list[dict[str, Any]] = [{"op": "a"}, {"op": "b", "failed": "no"}, {"op": "c"}]
    facts = name_kernels(cases, [specs[:2], specs[:1], []], specs[2:], code)
    names = [kernel_id(digest(spec).sass, digest(spec).launch) for spec in specs]
    assert [case["kernels"] for case in cases] == [names[:2], names[:1], []]
    assert list(facts["kernels"]) == names and facts["toolchain"] == TOOLCHAIN
    assert facts["kernels"][names[1]]["spec"] == "TinySpec(width=64, fault='')"
    same = {spec: digest(TinySpec()) for spec in specs}
    assert kernels_run.ids(specs, same) == list(kernels_run.described(same)), "two specs of the same code"
    assert next(iter(kernels_run.described(same).values()))["spec"] == repr(specs[0])


def test_a_spec_is_found_by_its_text():
    known = kernels_run.shipped_specs()
    assert len({type(spec) for spec in known}) >= 9
    for spec in [*known, *(bench.spec for bench in bench_gqa.DECODE_CASES), *bench_sink.specs()]:
        assert kernels_run.spec_of(repr(spec)) == spec
    text = repr(MlaAppendSpec.for_launch(5))
    for gone in (
        text.replace("MlaAppendSpec", "AppendSpec"),
        text.replace("(", "(rows=1, "),
        "print(1)",
        "1 +",
        "f()()",
    ):
        assert kernels_run.spec_of(gone) is None


@dataclass(frozen=True)
class Renamed:
    """A spec whose class and fields have other names than when it was recorded."""

    width: int
    kernel: ClassVar[str] = "none:None"

    def can_implement(self) -> list[str]:
        return []


def test_renames_leave_machine_code_built_and_changes_do_not(monkeypatch):
    monkeypatch.setattr(kernels_run, "SPEC_MODULES", (*kernels_run.SPEC_MODULES, "tests.cpu.tiny_spec"))
    kernels_run._spec_classes.cache_clear()
    specs = [TinySpec(32), TinySpec(64), TinySpec(96)]
    recorded = kernels_run.described(digests(specs))
    names = list(recorded)
    asked: list[Any] = []

    def now(changed: dict[Any, Any]) -> Any:
        def of(specs: Any) -> dict[Any, Any]:
            asked.extend(specs)
            return {spec: changed.get(spec) or digest(spec) for spec in specs}

        return of

    def known() -> list[Any]:
        return [Renamed(64), *specs]

    assert kernels_run.no_longer_built(recorded, now({}), lambda: pytest.fail("all were found")) == []
    changed = {TinySpec(64): digest(TinySpec(64), 1)}
    assert kernels_run.no_longer_built(recorded, now(changed), known) == names[1:2]
    assert kernels_run.no_longer_built(recorded, now({**changed, Renamed(64): digest(specs[1])}), known) == []
    # the class has another name now
    monkeypatch.setitem(recorded, names[0], {**recorded[names[0]], "spec": "SmallSpec(columns=32)"})
    asked.clear()
    assert kernels_run.no_longer_built(recorded, now({}), known) == []
    assert sorted(asked, key=repr) == sorted(known(), key=repr), "each once"
    kernels_run._spec_classes.cache_clear()


def test_older_kernels_are_kept_beside_the_record(tmp_path):
    record, path = coded_record(), tmp_path / "h200.json"
    assert kernels_run.read_older(path) == frozenset()
    first, second, *_ = record["kernels"]
    kernels_run.write_older(path, record["kernels"], [second, first])
    text = (tmp_path / "h200.older").read_text()
    assert text.startswith("# Of h200.json: machine code that is no longer built.")
    assert f"{first}  MlaAppendSpec(tokens_per_cta=0)\n" in text
    assert kernels_run.read_older(path) == {first, second}
    marked = kernels_run.marked(record, [second])["cases"]
    assert [case.get("older", False) for case in marked] == [False, True, *[False] * (len(marked) - 2)]
    assert kernels_run.marked(some_record(), [second]) == some_record(), "of which nothing is known"
    kernels_run.write_older(path, record["kernels"], [])
    assert list(tmp_path.iterdir()) == []


def test_comparisons_need_machine_code_of_the_same_toolchain():
    assert kernels_run.not_comparable(some_record(), TOOLCHAIN) == "it names no machine code"
    assert kernels_run.not_comparable(coded_record(), TOOLCHAIN) == ""
    reason = kernels_run.not_comparable(coded_record(), {**TOOLCHAIN, "cuda": "cu12"})
    assert reason == "it is of another toolchain: cuda cu13, here cu12"
    record = coded_record()
    assert set(kernels_run.of_cases(record)) == set(record["kernels"])
    assert list(kernels_run.of_cases({**record, "cases": record["cases"][:1]})) == record["cases"][0]["kernels"]


def test_the_pages_know_which_recorded_machine_code_is_no_longer_built(root):
    """Says which recorded cases are of other code than what is built now, and that the pages must mark them."""
    path = root / "results" / "h200.json"
    record = records.read(path)
    if not record.get("kernels"):
        pytest.skip("results/h200.json names no machine code: of what it ran nothing is known")
    code = kernels_run.machine_code()
    if reason := kernels_run.not_comparable(record, code.toolchain()):
        pytest.skip(f"results/h200.json: {reason}")
    kernels = kernels_run.of_cases(record)

    older = kernels_run.no_longer_built(kernels, code.digests_of_specs, kernels_run.shipped_specs)
    cases = [case_name(case) for case in kernels_run.marked(record, older)["cases"] if "older" in case]
    said = "; ".join(cases) or "none"
    assert kernels_run.read_older(path) & set(kernels) == set(older), (
        f"cases of machine code that is no longer built: {said}. Run python scripts/results_table.py --compare"
    )
