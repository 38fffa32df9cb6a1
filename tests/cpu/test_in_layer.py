"""The three timings of a computation, on a card whose times are known: what they subtract, when they rest, in turns."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import in_layer, nvml
from bench.in_layer import Timing, prepare, time_calls, time_together
from bench.timing import Expected, WrongReplay
from tests.kit.fake_card import LOADED_MHZ, MHZ, OVERHEAD_US, Card, Work

SLOWER = MHZ / LOADED_MHZ


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


@pytest.mark.parametrize("sets", [2, 64])
@pytest.mark.parametrize("us", [5.0, 300.0, 1500.0])
def test_the_small_kernels_and_the_start_of_a_graph_are_subtracted(card: Card, us: float, sets: int) -> None:
    found = time_calls([Work(us)] * sets)
    assert (found.us, found.us_p10, found.us_p90) == pytest.approx((us, us, us), rel=1e-6)
    assert found.us_sustained == pytest.approx(us, rel=1e-6)
    assert found.us_back_to_back == pytest.approx(us + OVERHEAD_US / sets, rel=1e-6)
    assert (found.sm_mhz, found.sm_mhz_rested) == (MHZ, MHZ)


def test_calls_that_overlap_are_faster_back_to_back_alone(card: Card) -> None:
    found = time_calls([Work(10.0, overlap_us=2.0)] * 50)
    assert (found.us, found.us_sustained) == pytest.approx((10.0, 10.0))
    assert found.us_back_to_back == pytest.approx(10.0 - 2.0 * 49 / 50 + OVERHEAD_US / 50)


@pytest.mark.parametrize("us", [20.0, 290.0, 1800.0])
def test_rested_times_are_at_the_full_clock_and_sustained_ones_are_not(card: Card, us: float) -> None:
    found = time_calls([Work(us, hungry=True)] * 2)
    assert (found.us, found.us_p90) == pytest.approx((us, us))
    assert found.us_sustained == pytest.approx(us * SLOWER)
    assert (found.sm_mhz, found.sm_mhz_rested) == (LOADED_MHZ, MHZ)


def test_a_long_call_has_one_rest_and_a_graph_for_each_set(card: Card) -> None:
    works = [Work(17_000.0, hungry=True), Work(17_000.0, hungry=True)]
    graphs = prepare(works)
    assert graphs.calls == 1 and len(graphs.in_layer) == len(graphs.back_to_back) == 2
    card.log.clear()
    found = time_together({"": graphs})[""]
    assert (found.us, found.us_sustained) == pytest.approx((17_000 * SLOWER, 17_000 * SLOWER))
    assert [entry[0] for entry in card.log].count("rest") == 1
    replayed = {works.index(entry[0][-1]) for entry in card.log if entry[0] != "rest" and entry[0][-1] in works}
    assert replayed == {0, 1}


def test_at_least_20_replays_in_layer_and_load_of_the_same_calls_before_a_sustained_time(card: Card) -> None:
    work = Work(100.0, hungry=True)
    graphs = prepare([work] * 2)
    card.log.clear()
    time_together({"": graphs})
    layered = [entry for entry in card.log if len(entry[0]) == 4]
    last_rest = max(start for what, start, _ in card.log if what == "rest")
    load = [entry for entry in layered if entry[1] > last_rest + 0.15]
    assert len(layered) - len(load) >= in_layer.REPLAYS
    assert sum(seconds for *_, seconds in load) >= 0.99 * in_layer.LOAD_SECONDS
    assert gap_in_load(card) < 1e-6, "the card has never waited"


def gap_in_load(card: Card) -> float:
    """The longest pause of the card after its last rest and 0.15 s more."""
    last_rest = max(start for what, start, _ in card.log if what == "rest")
    load = [entry for entry in card.log if entry[1] > last_rest + 0.15]
    return max(after[1] - before[1] - before[2] for before, after in itertools.pairwise(load))


@pytest.mark.parametrize("us", [10.0, 300.0, 2500.0, 17_000.0])
def test_the_same_computation_under_two_names_has_the_same_times(card: Card, us: float) -> None:
    one, other = (prepare([Work(us, hungry=True)] * 2) for _ in range(2))
    found = time_together({"ours": one, "peer": other})
    for name in ("us", "us_back_to_back", "us_sustained"):
        assert getattr(found["peer"], name) / getattr(found["ours"], name) == pytest.approx(1.0, abs=0.01), name


def test_the_same_computation_has_the_ratio_1_while_the_clock_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch, drift=0.5)
    one, other = (prepare([Work(300.0, hungry=True)] * 2) for _ in range(2))
    found = time_together({"ours": one, "peer": other})
    sustained = [timing.us_sustained for timing in found.values()]
    assert sustained[1] == pytest.approx(sustained[0], rel=5e-3) and (sustained[0] or 0.0) > 350.0 * SLOWER
    assert found["peer"].sustained_ratio(found["ours"]) == pytest.approx(1.0, abs=2e-3)


@pytest.mark.parametrize("names", [("ours", "peer"), ("ours", "other", "peer")], ids=["two", "three"])
@pytest.mark.parametrize("us", [300.0, 2500.0, 9000.0, 17_000.0, 25_000.0])
def test_work_that_lowers_the_clock_favours_neither_the_first_nor_the_last(
    monkeypatch: pytest.MonkeyPatch, us: float, names: tuple[str, ...]
) -> None:
    """1.3 times as long after half a second, as measured: in one order only, the last of three of 25 ms has 1.055."""
    Card(monkeypatch, fade=0.6)
    found = time_together({name: prepare([Work(us, hungry=True)] * 2) for name in names}, sustained=False)
    for name in ("us", "us_back_to_back"):
        assert getattr(found["peer"], name) / getattr(found["ours"], name) == pytest.approx(1.0, abs=0.01), name


def test_a_ratio_under_load_needs_times_of_the_same_rounds() -> None:
    one, two, none = (Timing(1.0, 1.0, 1.0, 1.0, rounds_us=rounds) for rounds in ((2.0, 4.0, 6.0), (1.0, 1.0, 2.0), ()))
    assert one.sustained_ratio(two) == 3.0 and none.sustained_ratio(none) is None
    assert one.sustained_ratio(none) is None and none.sustained_ratio(one) is None


def test_computations_take_turns_replay_by_replay_and_under_load_of_20_ms(card: Card) -> None:
    works = {"a": Work(50.0), "b": Work(80.0)}
    graphs = {name: prepare([work] * 2) for name, work in works.items()}
    card.log.clear()
    found = time_together(graphs)
    assert found["b"].us / found["a"].us == pytest.approx(1.6)
    names = {work: name for name, work in works.items()}
    order = [names[entry[0][-1]] for entry in card.log if entry[0] != "rest" and entry[0][-1] in names]
    runs = [(name, len(list(group))) for name, group in itertools.groupby(order)]
    assert len([count for _, count in runs if count <= 2]) > in_layer.REPLAYS, "replay by replay after a rest"
    turns = [(name, count * graphs[name].calls * works[name].us * 1e-6) for name, count in runs if count > 50]
    assert len(turns) > 2 * in_layer.ROUNDS
    assert all(0.7 * in_layer.TURN_SECONDS < seconds < 2.2 * in_layer.TURN_SECONDS for _, seconds in turns), turns
    assert gap_in_load(card) < 1e-6, "one load without a pause"


def test_what_a_case_costs(card: Card) -> None:
    """Rested, about 0.15 s a way; 0.4 s more under load, and 0.2 s a way."""
    started = card.host
    time_together({"": prepare([Work(12.0)] * 64)}, sustained=False)
    assert card.host - started < 0.2
    started = card.host
    time_together({name: prepare([Work(12.0)] * 64) for name in "ab"}, sustained=False)
    assert card.host - started < 0.4
    started = card.host
    time_calls([Work(300.0, hungry=True)] * 2)
    assert card.host - started < 0.8
    started = card.host
    time_together({name: prepare([Work(300.0, hungry=True)] * 2) for name in "ab"})
    assert card.host - started < 1.2
    started = card.host
    time_together({name: prepare([Work(25_000.0)] * 2) for name in "abc"})
    assert card.host - started < 3.2, "fewer replays of long calls"


def test_load_may_be_asked_of_some(card: Card) -> None:
    ways = {name: prepare([Work(50.0)] * 2) for name in "abc"}
    started = card.host
    found = time_together(ways, sustained=["b"])
    assert [found[name].us_sustained is not None for name in "abc"] == [False, True, False]
    assert card.host - started < 0.8
    assert [timing.us for timing in found.values()] == pytest.approx([50.0] * 3)


def test_a_fast_computation_is_rested_beside_a_slow_one(card: Card) -> None:
    """2.5 ms a call, as MLA over 16384 keys: replays of several computations do not add up to a load."""
    ways = {"ours": prepare([Work(2500.0, hungry=True)] * 2), "peer": prepare([Work(3500.0, hungry=True)] * 2)}
    found = time_together(ways)
    assert (found["ours"].us, found["peer"].us_p90) == pytest.approx((2500.0, 3500.0))
    assert found["ours"].us_sustained == pytest.approx(2500.0 * SLOWER)


def test_power_is_energy_over_time(card: Card) -> None:
    graphs = prepare([Work(300.0, hungry=True)] * 2)
    assert time_together({"": graphs})[""].watts is None
    found = time_together({"": graphs}, power=True)[""]
    assert found.watts == pytest.approx(600.0) and found.us_loaded_alone == pytest.approx(300.0 * SLOWER)
    alone = time_together({"": prepare([Work(12.0)] * 8)}, power=True)[""]
    assert alone.us_loaded_alone == pytest.approx(12.0)


def test_without_nvml_there_is_no_clock(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "sm_mhz", lambda: None)
    monkeypatch.setattr(nvml, "joules", lambda: None)
    found = time_together({"": prepare([Work(12.0)] * 8)}, power=True)[""]
    assert found.sm_mhz is found.sm_mhz_rested is found.watts is None
    assert set(found.as_record()) == {"us", "us_p10", "us_p90", "us_back_to_back", "us_sustained", "us_loaded_alone"}


def test_the_record_of_a_timing() -> None:
    found = Timing(1.23456, 1.2, 1.3, 1.1, 1.5, 1650.4, 1980.0, 699.6, sets_compared=3).as_record()
    assert found == {
        "us": 1.235,
        "us_p10": 1.2,
        "us_p90": 1.3,
        "us_back_to_back": 1.1,
        "us_sustained": 1.5,
        "sm_mhz": 1650,
        "sm_mhz_rested": 1980,
        "watts": 700,
        "sets_compared": 3,
    }
    assert set(Timing(1.0, 1.0, 1.0, 1.0).as_record()) == {"us", "us_p10", "us_p90", "us_back_to_back"}


@pytest.mark.parametrize("nothing", [prepare, time_together])
def test_nothing_to_time_is_an_error(nothing: Any) -> None:
    with pytest.raises(ValueError, match="got none"):
        nothing({})


# --- what the graphs wrote


def test_both_graphs_of_each_set_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that writes one wrong bit in the timed replays or over poison costs the time, whichever it is."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def right() -> tuple[torch.Tensor, ...]:
        return (torch.arange(4, dtype=torch.float32),)

    def graphs(wrong: str) -> in_layer.Graphs:
        kinds = {}
        for kind in ("in-layer", "back to back"):
            results = [right(), right()]

            def replay(kind: str = kind, results: list[Any] = results) -> None:
                for result in results:
                    result[0].copy_(right()[0])
                if kind == wrong:
                    results[1][0][2] = 7.0

            kinds[kind] = ((replay,), results)
        expected = Expected.of(("out",), [right, right])
        return in_layer.Graphs(2, kinds["back to back"][0], kinds["in-layer"][0], tuple(kinds.values()), expected)

    assert graphs("").require_expected() == 2
    for kind in ("in-layer", "back to back"):
        with pytest.raises(WrongReplay, match="a replay over poison: set 1, out: 1 of 4"):
            graphs(kind).require_expected()
    assert in_layer.Graphs(1, (), ()).require_expected() == 0


# --- NVML


class Library:
    """NVML that knows one GPU."""

    def __init__(self, *, fails: str = "") -> None:
        self.fails = fails

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == self.fails:
                return 3
            if name == "nvmlDeviceGetHandleByUUID":
                return 0 if arguments[0].value == b"GPU-1" else 6
            values = {"nvmlDeviceGetClockInfo": 1755, "nvmlDeviceGetTotalEnergyConsumption": 12_345_678}
            if name in values:
                assert name != "nvmlDeviceGetClockInfo" or arguments[1].value == 1, "that of the SMs"
                arguments[-1]._obj.value = values[name]
            return 0

        return call


def test_nvml_names_the_gpu_by_its_uuid() -> None:
    sensors = nvml.Sensors(Library(), "GPU-1")
    assert (sensors.sm_mhz(), sensors.joules()) == (1755.0, 12_345.678)
    with pytest.raises(OSError, match="nvmlDeviceGetHandleByUUID: error 6"):
        nvml.Sensors(Library(), "GPU-2")
    with pytest.raises(OSError, match="nvmlInit_v2: error 3"):
        nvml.Sensors(Library(fails="nvmlInit_v2"), "GPU-1")
    assert nvml.Sensors(Library(fails="nvmlDeviceGetClockInfo"), "GPU-1").sm_mhz() is None
    assert nvml.Sensors(Library(fails="nvmlDeviceGetTotalEnergyConsumption"), "GPU-1").joules() is None


@pytest.mark.parametrize("uuid", ["GPU-1", "1"])
def test_the_current_gpu_has_a_uuid(uuid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid))
    assert nvml.uuid_of_current_device() == "GPU-1"
    monkeypatch.setattr(nvml, "LIBRARY", "libnone.so.1")
    nvml._sensors.cache_clear()
    assert nvml.sm_mhz() is None and nvml.joules() is None
