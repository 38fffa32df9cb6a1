"""Random calls find each planted fault, and find nothing without one."""

import functools
import itertools
import json
import random
import threading
from typing import Any

import pytest
import torch

import cute_kernels
from bench.fuzzing import invalid, processes
from bench.fuzzing.calls import Call, Expected, Mode, WrongResult
from bench.fuzzing.generate import GENERATORS, MAX_SPECS, draw_call, kernel_specs
from bench.fuzzing.memory import Image, Place, contiguous_stride, padded_stride
from bench.fuzzing.rounds import Fault, Gate, Outcome, Work, run_round
from bench.timing import bits
from cute_kernels.runtime.cache import KernelSpec
from scripts import fuzz
from tests.kit import fuzz_workers
from tests.kit.values import FAMILIES

CPU = torch.device("cpu")
OPS = sorted(cute_kernels.__all__)


@functools.cache
def kind_of(seed: int) -> str | None:
    """The op that a seed names a call of, if that has something to read and no gradients."""
    call = draw_call(seed, CPU)
    return call.op if call.specs and call.d_out is None else None


def seeds_of(op: str, number: int = 1) -> list[int]:
    """The first seeds that name calls of an op."""
    return list(itertools.islice((seed for seed in itertools.count() if kind_of(seed) == op), number))


def plant(monkeypatch: pytest.MonkeyPatch, op: str, change: Any) -> None:
    """Replaces an op by a function whose first argument is the real op."""
    real = getattr(cute_kernels, op)
    monkeypatch.setattr(cute_kernels, op, lambda *args, **kwargs: change(real, *args, **kwargs))


# ---- calls


def test_specifications_are_few_and_can_be_built():
    specs = kernel_specs()
    assert len(set(specs)) == len(specs) <= MAX_SPECS
    assert not [spec for spec in specs if spec.can_implement()]
    assert sum(share for share, _ in GENERATORS) == 100


@pytest.mark.parametrize("op", OPS)
def test_a_seed_names_a_call_exactly(op):
    (seed,) = seeds_of(op)
    one, other = draw_call(seed, CPU), draw_call(seed, CPU)
    assert one.arguments.keys() == other.arguments.keys()
    for name, value in one.arguments.items():
        again = other.arguments[name]
        if isinstance(value, torch.Tensor):
            assert value.stride() == again.stride()
            value, again = bits(value).tolist(), bits(again).tolist()
        assert value == again, name
    assert torch.equal(one.image.before, other.image.before)
    assert one.image.places == other.image.places
    assert one.modes == other.modes


def test_calls_stay_within_the_specifications_and_take_many_of_them():
    known, taken, shapes = set(kernel_specs()), set[KernelSpec](), set()
    for seed in range(40):
        call = draw_call(seed, CPU)
        assert known.issuperset(call.specs)
        taken.update(call.specs)
        shapes.add((call.op, *call.shape))
    assert len(taken) > 20
    assert len(shapes) > 30


def test_calls_have_values_of_many_families():
    found = [draw_call(seed, CPU).shape[-1] for seed in range(60) if kind_of(seed) in ("mla_fp8_decode", None)]
    assert len(set(found) & set(FAMILIES)) > 4 and found.count("") > 5


@pytest.mark.parametrize("op", OPS)
def test_valid_and_invalid_calls_of_every_op(op):
    """Nothing is found. Appends and merges are quick, so more of them run."""
    (seed,) = seeds_of(op)
    base = seed * invalid.PER_CALL  # each invalid call changes the valid call of this seed
    made, problems = invalid.run_invalid(base, base + invalid.PER_CALL, CPU)
    assert problems == []
    assert made == invalid.PER_CALL
    outcome = run_round(Work(seed, seed + 1, turns=1), CPU)
    assert outcome.findings == []
    assert outcome.calls == 1 + 7


def test_every_kind_of_wrong_argument_is_among_the_invalid_calls():
    labels: dict[str, set[str]] = {}
    for op in OPS:
        (seed,) = seeds_of(op)
        _, wrong = invalid.wrong_calls(draw_call(seed, CPU))
        labels[op] = {way.label for way in wrong.ways}
    for op in OPS:
        said = " ".join(labels[op])
        for kind in ("is None", "of torch.", "elsewhere", "more along axis", "one axis more", "odd address"):
            assert kind in said, (op, kind)
        assert len(labels[op]) > 15
    assert "last stride of 2" in " ".join(labels["gqa_decode"])
    assert any("requires gradients" in label for label in labels["mla_fp8_append"])


# ---- what is planted is found


def test_a_wrong_result_is_reported_with_its_seed(monkeypatch, capsys, tmp_path):
    """The oracle sees an error of a fifth; the command prints the seed and how to repeat it."""

    def change(real: Any, *args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        out = result[0] if isinstance(result, tuple) else result
        out.mul_(1.2)
        return result

    plant(monkeypatch, "merge_states", change)
    (seed,) = seeds_of("merge_states")
    monkeypatch.setattr(fuzz, "SEEDS_OF_ROUND", 1)
    out = tmp_path / "fuzz.json"
    plan = ["--calls", "1", "--invalid-calls", "0", "--workers", "0", "--first-seed", str(seed), "--out", str(out)]
    assert fuzz.main(plan) == 1
    result = json.loads(out.read_text())
    assert result["wrong"] == 1
    assert result["findings"][0]["seed"] == seed
    assert f"python scripts/fuzz.py --seed {seed}" in capsys.readouterr().out
    assert fuzz.main(["--seed", str(seed)]) == 1
    assert f"seed {seed}: merge_states" in capsys.readouterr().out
    monkeypatch.undo()
    assert fuzz.main(["--seed", str(seed)]) == 0


@pytest.mark.parametrize("op", ["gqa_decode", "kv_int8_append", "sink_attention"])
def test_one_bit_that_only_other_threads_get_is_reported(monkeypatch, op):
    (seed,) = seeds_of(op)
    call = draw_call(seed, CPU)

    def change(real: Any, *args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if threading.current_thread() is not threading.main_thread():
            first = result[0] if isinstance(result, tuple) else result
            target = kwargs["k_cache"] if op == "kv_int8_append" else first.detach()
            whole = target.view({1: torch.uint8, 2: torch.int16}[target.element_size()])
            whole[(0,) * whole.dim()] ^= 1
        return result

    plant(monkeypatch, op, change)
    outcome = run_round(Work(seed, seed + 1, turns=2), CPU)
    assert outcome.findings
    assert {finding.seed for finding in outcome.findings} == {call.seed}
    assert "other bits than alone" in outcome.findings[0].said
    assert f"--seeds {seed} {seed + 1}" in outcome.findings[0].said


def test_a_valid_call_that_is_refused_is_reported(monkeypatch):
    def refuse(real: Any, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("q: got what it needs")

    plant(monkeypatch, "mla_fp8_append", refuse)
    (seed,) = seeds_of("mla_fp8_append")
    outcome = run_round(Work(seed, seed + 1, turns=2), CPU)
    assert [finding.seed for finding in outcome.findings] == [seed]
    assert "raised ValueError: q: got what it needs" in outcome.findings[0].said
    assert outcome.calls == 1, "what was wrong alone is not made again by threads"


def test_an_error_in_a_thread_is_reported_and_ends_the_round(monkeypatch):
    def refuse(real: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("not from here")
        return real(*args, **kwargs)

    plant(monkeypatch, "mla_fp8_append", refuse)
    (seed,) = seeds_of("mla_fp8_append")
    outcome = run_round(Work(seed, seed + 1, turns=500), CPU)
    assert any("from a thread: ValueError: not from here" in finding.said for finding in outcome.findings)
    assert {finding.seed for finding in outcome.findings} == {seed}
    assert outcome.calls < 500


def test_bytes_beside_an_output_are_reported(monkeypatch):
    def write_more(real: Any, *args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        cache = kwargs["kv_cache"]
        end = cache.storage_offset() + sum((n - 1) * step for n, step in zip(cache.shape, cache.stride(), strict=True))
        cache.view(torch.uint8).as_strided((1,), (1,), end + 1).fill_(7)
        return result

    plant(monkeypatch, "mla_fp8_append", write_more)
    (seed,) = seeds_of("mla_fp8_append")
    (finding,) = run_round(Work(seed, seed + 1), CPU).findings
    assert "1 words around the outputs were overwritten" in finding.said


@pytest.mark.parametrize("prepared", [False, True])
def test_an_invalid_call_that_is_accepted_is_reported_with_its_seed(monkeypatch, prepared):
    def accept(real: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return real(*args, **kwargs)
        except (TypeError, ValueError):
            return None

    plant(monkeypatch, "mla_fp8_append", accept)
    base = seeds_of("mla_fp8_append")[0] * invalid.PER_CALL
    made, problems = invalid.run_invalid(base, base + 10, CPU, prepared=prepared)
    assert made == 10
    assert [seed for seed, _ in problems] == list(range(base, base + 10))
    assert all(said.startswith("mla_fp8_append: ") and said.endswith(": accepted") for _, said in problems)


def test_a_refusal_must_name_the_argument_have_the_right_type_and_write_nothing(monkeypatch):
    (seed,) = seeds_of("kv_int8_append")
    base = seed * invalid.PER_CALL

    def said_with(error: Exception, writes: bool = False) -> str:
        def refuse(real: Any, *args: Any, **kwargs: Any) -> Any:
            if writes and kwargs["v_scale"] is not None and not isinstance(kwargs["v_scale"], str | list | float):
                kwargs["v_scale"].fill_(9) if kwargs["v_scale"].device.type == "cpu" else None
            raise error

        with monkeypatch.context() as patched:
            plant(patched, "kv_int8_append", refuse)
            _, problems = invalid.run_invalid(base, base + 12, CPU, prepared=False)
        return " ".join(said for _, said in problems)

    assert "RuntimeError instead of ValueError or TypeError: CUDA" in said_with(RuntimeError("CUDA error"))
    assert "AssertionError instead of" in said_with(AssertionError("k, v, k_cache"))
    assert "ValueError without" in said_with(ValueError("something is wrong"))
    assert "ValueError without" in said_with(ValueError("kk_cachev"))
    every = ValueError(" ".join(invalid.RULES["kv_int8_append"]) + " layout")
    assert said_with(every) == ""
    assert "something was written" in said_with(every, writes=True)


# ---- memory and threads


def test_an_image_sees_what_is_written_around_its_tensors():
    shape = (2, 3, 5)
    stride = padded_stride(shape, 8, random.Random(1))
    image = Image.of_outputs(
        {"a": (torch.bfloat16, shape, stride, 16), "b": (torch.float32, (4,), (2,), 4)}, CPU, random.Random(0)
    )
    block = image.before.clone()
    views = image.views(block)
    assert views["a"].data_ptr() % 16 == 0
    assert views["a"].isnan().all() and views["b"].isnan().all()
    for view in views.values():
        view.fill_(1)
    assert image.strays(block) == 0
    assert torch.equal(image.after({name: view.clone() for name, view in views.items()}), block)
    place = image.places["b"]
    block[place.offset + 1] = 3  # between two elements
    assert image.strays(block) == 1
    block[0] = 0
    block[-1] = 0
    assert image.strays(block) == 3
    assert place == Place(torch.float32, (4,), (2,), place.offset)


def test_strides_of_padded_tensors_do_not_overlap():
    rng = random.Random(3)
    for _ in range(50):
        shape = tuple(rng.randint(1, 4) for _ in range(3)) + (8,)
        t = torch.empty_strided(shape, padded_stride(shape, 8, rng), dtype=torch.int32)
        t.copy_(torch.arange(t.numel(), dtype=torch.int32).view(shape))
        assert torch.equal(t.reshape(-1), torch.arange(t.numel(), dtype=torch.int32))
        assert all(step % 8 == 0 for step in t.stride()[:-1])
    assert contiguous_stride((2, 3, 4)) == (12, 4, 1)


def simple_call(unstable: frozenset[str] = frozenset()) -> Call:
    outputs = {"out": (torch.float32, (3,), (1,), 4), "lse": (torch.float32, (2,), (1,), 4)}
    modes = (Mode(("out", "lse"), ("out", "lse")), Mode(("out",), ("out", "lse")), Mode((), ("out",)))
    image = Image.of_outputs(outputs, CPU, random.Random(0))
    return Call(0, "merge_states", {}, image, modes, lambda values: [], (), (), unstable=unstable)


@pytest.mark.parametrize("wrong_name", [None, "out", "lse"])
def test_results_are_compared_whether_given_or_returned(wrong_name):
    call = simple_call()
    values = {"out": torch.tensor([1.0, 2.0, 3.0]), "lse": torch.tensor([-torch.inf, torch.nan])}
    expected = Expected(call, values)
    for mode in call.modes:
        got = {name: value.clone() for name, value in values.items() if name in (*mode.given, *mode.returns)}
        if wrong_name in got:
            got[wrong_name][1] += torch.tensor(1.0) if wrong_name == "out" else torch.nan
            got[wrong_name].view(torch.int32)[0] ^= 1
        block = call.image.after({name: got[name] for name in mode.given}) if mode.given else None
        wrong = torch.zeros((), dtype=torch.int64)
        expected.count_wrong(mode, block, got, wrong)
        assert bool(wrong) == (wrong_name in got)


def test_results_of_another_shape_are_wrong_and_unstable_ones_are_not_compared():
    values = {"out": torch.ones(3), "lse": torch.ones(2)}
    mode, wrong = Mode((), ("out", "lse")), torch.zeros((), dtype=torch.int64)
    with pytest.raises(WrongResult, match=r"^lse: torch.float32 \(3,\), needs"):
        Expected(simple_call(), values).count_wrong(mode, None, {"lse": torch.ones(3)}, wrong)
    call = simple_call(frozenset({"lse"}))
    Expected(call, values).count_wrong(mode, None, {"out": torch.ones(3), "lse": torch.zeros(2)}, wrong)
    assert wrong == 0


def test_a_closed_gate_waits_for_those_inside_and_keeps_others_out():
    gate, entered, leave, later = Gate(), threading.Event(), threading.Event(), threading.Event()
    order: list[str] = []

    def first() -> None:
        with gate.inside():
            entered.set()
            leave.wait(10)
            order.append("left")

    def second() -> None:
        later.wait(10)
        with gate.inside():
            order.append("second")

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    entered.wait(10)
    threading.Timer(0.1, leave.set).start()
    with gate.closed():
        order.append("closed")
        later.set()
        threads[1].join(0.1)
        order.append("opens")
    for thread in threads:
        thread.join(10)
    assert order == ["left", "closed", "opens", "second"]


# ---- runs


@pytest.mark.parametrize("plan", [fuzz.FULL, fuzz.SHORT, fuzz.WITHOUT_GPU], ids=["full", "short", "without"])
def test_rounds_have_all_calls_of_a_plan_and_no_seed_twice(plan):
    for device in (CPU, torch.device("cuda")):
        rounds = list(fuzz.rounds_of(plan, device))
        least = sum(work.last - work.first + 7 * work.turns for work in rounds)
        assert least >= plan.calls
        assert sum(work.invalid_last - work.invalid_first for work in rounds) >= plan.invalid_calls
        total = processes.Total()
        for work in rounds:
            total.add(work, Outcome())
        (first, last), (invalid_first, invalid_last) = total.seeds()
        assert last - first + 1 == sum(work.last - work.first for work in rounds)
        assert invalid_first == invalid.FIRST
        # other seeds of valid calls also give other invalid calls
        assert invalid_last < invalid.FIRST + (last + 1) * invalid.PER_CALL


def test_full_plans_are_what_is_asked_for():
    assert fuzz.FULL.calls >= 100_000
    assert fuzz.FULL.invalid_calls >= 20_000
    assert fuzz.default_plan(False, torch.device("cuda")) == fuzz.FULL


def test_the_result_of_a_small_run(tmp_path, capsys):
    out = tmp_path / "fuzz.json"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fuzz, "SEEDS_OF_ROUND", 4)
        arguments = ["--calls", "40", "--invalid-calls", "150", "--workers", "0", "--first-seed", "1000"]
        status = fuzz.main([*arguments, "--out", str(out)])
    result = json.loads(out.read_text())
    assert status == 0, result["findings"]
    assert set(result) >= {
        "calls", "invalid_calls", "wrong", "faults", "seconds", "seeds", "shapes", "specifications",
    }  # fmt: skip
    assert result["calls"] >= 40
    assert result["invalid_calls"] >= 150
    assert result["wrong"] == result["faults"] == 0
    first = invalid.FIRST + 1000 * invalid.PER_CALL
    assert result["seeds"] == [[1000, 1007], [first, first + result["invalid_calls"] - 1]]
    assert 4 <= result["shapes"] <= 8
    assert result["specifications"] == len(kernel_specs())
    assert f"invalid_calls  {result['invalid_calls']}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        ({"wrong": 1}, False),
        ({"faults": 1}, False),
        ({"calls": 99}, False),
        ({"invalid_calls": 49}, False),
    ],
)
def test_a_run_is_sound_if_all_was_made_and_nothing_was_wrong(changes, good):
    result = {"calls": 100, "invalid_calls": 50, "wrong": 0, "faults": 0, **changes}
    assert fuzz.sound(result, fuzz.Plan(100, 50)) is good


# ---- processes


def three_rounds() -> Any:
    return iter([Work(first, first + 10, invalid.FIRST, invalid.FIRST) for first in (0, 10, 20)])


def test_rounds_of_processes_are_added_up():
    total = processes.run_rounds(three_rounds(), CPU, 2, run=fuzz_workers.count)
    assert (total.outcome.calls, total.outcome.invalid_calls) == (30, 3)
    assert total.seeds() == [[0, 29]]
    assert total.faults == []
    assert [finding.seed for finding in total.outcome.findings] == [23]
    assert len(total.outcome.shapes) == 3


@pytest.mark.parametrize("run", [fuzz_workers.die, fuzz_workers.hang], ids=["dies", "hangs"])
def test_a_process_that_ends_or_hangs_is_a_fault_and_others_go_on(run, monkeypatch):
    if run is fuzz_workers.hang:
        monkeypatch.setattr(processes, "HANG_S", 1.0)
    reports = []
    total = processes.run_rounds(
        three_rounds(), CPU, 1, run=run, report=lambda total: reports.append(len(total.faults))
    )
    (fault,) = total.faults
    assert fault.startswith("seeds 10 to 19, threads at [0, 0, ")
    if run is fuzz_workers.die:
        assert fault.endswith("[0, 0, 11, 0, 0, 0, 0]: it died with status 11")
    else:
        assert fault.endswith("it did not answer for 1 s")
    assert total.seeds() == [[0, 9], [20, 29]]
    assert total.outcome.calls == 20
    assert reports == [0, 1, 1]


def test_a_lost_device_and_any_other_error_are_faults():
    total = processes.run_rounds(three_rounds(), CPU, 1, run=fuzz_workers.fail)
    assert "the device failed: an illegal memory access" in total.faults[0]
    assert "LookupError: no such thing" in total.faults[1]
    assert total.seeds() == [[0, 9]]
    alone = processes.run_rounds(three_rounds(), CPU, 0, run=lose)
    assert len(alone.faults) == 1
    assert alone.seeds() == []


def lose(work: Work, *others: Any) -> Outcome:
    raise Fault("lost")
