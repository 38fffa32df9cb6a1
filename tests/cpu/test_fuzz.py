"""Random calls find every kind of fault of an operator: alone, in a thread, or beside an output."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cute_kernels
from bench.fuzzing import processes, rounds, strategies
from bench.fuzzing.calls import Call, Mode, WrongResult
from bench.fuzzing.memory import Image, contiguous_stride, padded_stride, span
from bench.fuzzing.rounds import Checked, Finding, Outcome, Work, check, run_round
from scripts import fuzz
from tests.kit.compare import bits

CPU = torch.device("cpu")
WORK = Work(3, calls=24, turns=2)
OPS = ("mla_fp8_decode", "gqa_decode", "mla_fp8_append", "kv_int8_append", "merge_states", "sink_attention")


def calls_of(work: Work) -> list[Call]:
    found: list[Call] = []
    rounds.for_each_call(work, CPU, found.append)
    return found


def test_kernels_are_few_and_can_be_built() -> None:
    specs = strategies.kernel_specs()
    assert len(specs) <= 650 and [spec for spec in specs if spec.can_implement()] == []


def test_a_round_is_named_by_its_seed_and_has_every_operator() -> None:
    first, second = calls_of(WORK), calls_of(WORK)
    assert len(first) == len(second) == WORK.calls
    for one, other in zip(first, second, strict=True):
        assert one.shape == other.shape
        for name, value in one.arguments.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(bits(value), bits(other.arguments[name]))
    others = (calls_of(Work(seed, calls=24)) for seed in range(3))
    seen = {call.op for calls in (first, *others) for call in calls}
    assert seen - {"kv_append"} == set(OPS)  # one append in four is not INT8


def test_calls_of_one_kind_alone() -> None:
    made = calls_of(WORK._replace(only="sink_gradients"))
    assert {call.op for call in made} == {"sink_attention"} and all(call.d_out is not None for call in made)


def test_a_round_of_right_calls_finds_nothing() -> None:
    outcome = run_round(WORK._replace(invalid=60), CPU)
    assert outcome.findings == [] and outcome.invalid_calls == 60
    assert outcome.calls == WORK.calls + 7 * WORK.turns and len(outcome.shapes) > 8


def damaged(op: str, when: Callable[[], bool]) -> Callable[..., Any]:
    right = getattr(cute_kernels, op)

    def wrong(*arguments: Any, **options: Any) -> Any:
        result = right(*arguments, **options)
        target = options["kv_cache" if op == "mla_fp8_append" else "k_cache"] if result is None else result
        target = target[0] if isinstance(target, tuple) else target
        if when() and target.numel():
            with torch.no_grad():
                bits(target.detach())[..., -1:] ^= 0x40
        return result

    return wrong


@pytest.mark.parametrize("op", OPS)
def test_a_wrong_result_is_found_by_the_oracle(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute_kernels, op, damaged(op, lambda: True), raising=False)
    rounds_made = (run_round(Work(seed, calls=24), CPU).findings for seed in range(5))
    findings = next(found for found in rounds_made if found)
    assert all(finding.said.startswith(op) for finding in findings)


@pytest.mark.parametrize("op", ["mla_fp8_decode", "gqa_decode"])
def test_a_bit_that_is_wrong_in_another_thread_alone_is_found(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    aside = damaged(op, lambda: threading.current_thread() is not threading.main_thread())
    monkeypatch.setattr(cute_kernels, op, aside, raising=False)
    findings = run_round(WORK._replace(turns=6), CPU).findings
    assert findings and all(f.said.startswith(op) and "other bits than alone" in f.said for f in findings)


def test_an_error_in_a_thread_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cute_kernels.gqa_decode

    def wrong(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError("too much")
        return right(*arguments, **options)

    monkeypatch.setattr(cute_kernels, "gqa_decode", wrong, raising=False)
    findings = run_round(WORK._replace(turns=20), CPU).findings
    assert any("from a thread: MemoryError: too much" in finding.said for finding in findings)


def test_a_valid_call_that_is_refused_and_an_invalid_one_that_is_not_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise ValueError("q: got something; needs something else")

    monkeypatch.setattr(cute_kernels, "gqa_decode", refuse, raising=False)
    assert any("raised ValueError" in finding.said for finding in run_round(WORK, CPU).findings)
    monkeypatch.undo()
    for name, table in list(rounds.TABLES.items()):
        accepting = dataclasses.replace(table, adapter=lambda **arguments: None)
        monkeypatch.setitem(rounds.TABLES, name, accepting)
    outcome = run_round(Work(3, calls=1, invalid=20), CPU)
    assert len([f for f in outcome.findings if "was not refused" in f.said]) == 20


# ---- memory around outputs


def call_of(run: Callable[..., Any], d: int = 4) -> Call:
    shape = (2, 3, d)
    image = Image.of_outputs({"out": (torch.float32, shape, padded_stride(shape, 4, (1, 0, 0)), 16)}, CPU)
    cute_kernels.made_up = run
    modes = (Mode(("out",), ("out",)), Mode((), ("out",)))
    return Call("made_up", {}, image, modes, lambda values: [] if (values["out"] == 1).all() else ["not 1"])


@pytest.fixture(autouse=True)
def forget() -> Any:
    yield
    vars(cute_kernels).pop("made_up", None)


def test_words_beside_an_output_and_other_tensors_are_found() -> None:
    def right(out: Any = None) -> torch.Tensor:
        return torch.ones(2, 3, 4) if out is None else out.fill_(1)

    def beside(out: Any = None) -> torch.Tensor:
        right(out).as_strided((30,), (1,), out.storage_offset()).fill_(1)
        return out

    assert isinstance(check(call_of(right), CPU), Checked)
    assert "words around the outputs were overwritten" in "; ".join(check(call_of(beside), CPU))
    assert "returned another tensor" in "; ".join(check(call_of(lambda out=None: torch.ones(2, 3, 4)), CPU))
    assert "0 results, needs 1" in "; ".join(check(call_of(lambda out=None: None), CPU))


def test_later_results_must_have_the_bits_dtype_and_shape_of_the_first() -> None:
    found = check(call_of(lambda out=None: torch.ones(2, 3, 4) if out is None else out.fill_(1)), CPU)
    assert isinstance(found, Checked)
    wrong, mode = torch.zeros((), dtype=torch.int64), found.call.modes[1]
    found.expected.count_wrong(mode, None, {"out": torch.ones(2, 3, 4)}, wrong)
    assert wrong == 0
    found.expected.count_wrong(mode, None, {"out": torch.ones(2, 3, 4).nextafter(torch.tensor(2.0))}, wrong)
    assert wrong == 1
    with pytest.raises(WrongResult, match="out: torch.float16"):
        found.expected.count_wrong(mode, None, {"out": torch.ones(2, 3, 4).half()}, wrong)


def test_strides_of_padded_tensors_do_not_overlap() -> None:
    stride = padded_stride((2, 3, 4), 8, (1, 2, 0))
    places = {i * stride[0] + j * stride[1] + k for i in range(2) for j in range(3) for k in range(4)}
    assert len(places) == 24 and stride[2] == 1 and not (stride[0] % 8 or stride[1] % 8)
    assert span((2, 3, 4), stride) == max(places) + 1
    assert contiguous_stride((2, 3, 4)) == (12, 4, 1) and span((2, 0, 4), (0, 4, 1)) == 0


# ---- processes


def wrong_round(work: Work, *others: Any) -> Outcome:
    return Outcome(calls=2200, invalid_calls=500, findings=[Finding(work.seed, "wrong")] * (work.seed == 2))


def test_a_run_is_sound_if_all_was_made_and_nothing_was_wrong() -> None:
    plan = fuzz.Plan(6000, 1500, workers=0)
    total = processes.run_rounds(fuzz.rounds_of(plan, torch.device("cuda")), CPU, 0, run=wrong_round)
    assert total.outcome.calls >= plan.calls and total.ranges() == [[0, 2]] and len(total.outcome.findings) == 1
    good = {"calls": 6000, "invalid_calls": 1500, "wrong": 0, "faults": 0, "out_of_memory": 0}
    assert fuzz.sound(good, plan)
    for change in ({"wrong": 1}, {"faults": 1}, {"out_of_memory": 1}, {"calls": 5999}, {"invalid_calls": 1499}):
        assert not fuzz.sound({**good, **change}, plan)


def test_a_process_that_dies_or_loses_its_device_is_a_fault_and_others_go_on() -> None:
    from tests.cpu import fuzz_workers

    total = processes.run_rounds(iter([Work(n) for n in range(4)]), CPU, 2, run=fuzz_workers.fail)
    assert total.ranges() == [[0, 0], [3, 3]]
    died, lost = sorted(total.faults)
    assert "died with status 11" in died and "the device failed" in lost
