"""What is kept between calls: workspaces, counters of graphs, buffers that nobody reads. No GPU is needed."""

import contextlib
import ctypes
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cute_kernels.runtime import counters, graphs, memory, workspace
from cute_kernels.runtime.counters import LAUNCHES, CounterSlab

CPU = torch.device("cpu")


class Fakes:
    """The current stream, and the graph that is captured on it, if any."""

    def __init__(self) -> None:
        self.stream = 7
        self.graph: int | None = None
        self.ended: set[int] = set()

    def end_capture(self) -> None:
        self.graph = None

    def life(self, graph: int) -> Any:
        """A `GraphLife` that ends when the test says so."""
        life: Any = type("Life", (), {})()
        life.has_ended = lambda: graph in self.ended
        return life


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    fake = Fakes()
    for module in (memory, counters):
        monkeypatch.setattr(module, "is_capturing", lambda device: fake.graph is not None)
    monkeypatch.setattr(workspace, "is_gpu_capturing", lambda index: fake.graph is not None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: fake.stream, raising=False)
    monkeypatch.setattr(counters, "graph_under_capture", lambda device: (fake.graph, fake.graph))
    monkeypatch.setattr(counters, "GraphLife", fake.life)
    monkeypatch.setattr(workspace, "_this_thread", workspace._ThreadWorkspaces())
    yield fake


def need(size: int, num_counters: int, slab: CounterSlab | None = None) -> workspace.Need:
    made = workspace.reserve(CPU, size, num_counters)
    return made._replace(counters=slab or made.counters)


# --- workspaces


def test_a_stream_has_one_workspace(fakes: Fakes) -> None:
    first = workspace.addresses(need(1000, 3))
    assert all(first) and workspace.addresses(need(10, 1)) == first
    assert workspace.addresses(need(0, 0)) == (0, 0)
    fakes.stream = 8
    assert set(workspace.addresses(need(1000, 3))).isdisjoint(first)
    fakes.stream = 7
    assert workspace.addresses(need(1000, 3)) == first


def test_a_workspace_grows_and_never_shrinks(fakes: Fakes) -> None:
    for size, num_counters in ((1000, 3), (3, 1000), (2000, 1), (1, 1)):
        workspace.addresses(need(size, num_counters))
    (made,) = workspace.kept()
    assert (len(made.values), len(made.counters)) == (2048, 1024)
    assert made.addresses == (made.values.data_ptr(), made.counters.data_ptr())
    assert not made.counters.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_default_dtype_changes_no_workspace(fakes: Fakes, dtype: torch.dtype) -> None:
    """With another default dtype, a workspace for two million floats had room for one million."""
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            workspace.addresses(need(2_097_152, 9))
            unread = memory.unread((3, 5), CPU)
    finally:
        torch.set_default_dtype(torch.float32)
    (made,) = workspace.kept()
    assert made.values.dtype is torch.float32 and made.counters.dtype is torch.int32
    assert made.values.nbytes >= 2_097_152 * 4 and made.values.device == CPU
    assert unread.dtype is torch.float32 and unread.device == CPU


def test_threads_have_workspaces_of_their_own_which_end_with_them(fakes: Fakes) -> None:
    mine = workspace.addresses(need(100, 1))
    seen: list[Any] = []

    def other() -> None:
        seen.append(workspace.addresses(need(100, 1)))
        seen.append(weakref.ref(workspace.kept()[0].values))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    gc.collect()
    assert set(seen[0]).isdisjoint(mine)
    assert seen[1]() is None, "the memory of a thread that has ended is still there"


def test_a_thread_keeps_the_workspaces_of_its_last_streams(fakes: Fakes) -> None:
    for stream in range(workspace.STREAMS + 5):
        fakes.stream = stream
        workspace.addresses(need(64, 1))
    kept = [stream for _, stream in workspace._this_thread.workspaces]
    assert kept == list(range(5, workspace.STREAMS + 5))


# --- counters of graphs


def test_no_two_launches_of_graphs_share_counters(fakes: Fakes) -> None:
    slab = CounterSlab(CPU)
    slab.refill(5)
    wanted = need(0, 5, slab)
    eager = workspace.addresses(wanted)[1]
    taken = []
    for graph in (1, 2):
        fakes.graph = graph
        taken += [workspace.addresses(wanted)[1] for _ in range(LAUNCHES // 2)]
    places = sorted({eager, *taken})
    assert len(places) == LAUNCHES + 1
    assert min(b - a for a, b in zip(places, places[1:], strict=False)) >= 5 * 4
    assert slab.borrowed() >= LAUNCHES * 5


def test_counters_come_back_when_their_graph_ends(fakes: Fakes) -> None:
    slab = CounterSlab(CPU)
    slab.refill(64)

    def capture(graph: int) -> list[int | None]:
        fakes.graph = graph
        places = [slab.borrow(64) for _ in range(10)]
        fakes.graph = None
        return places

    first, second = capture(1), capture(2)
    assert None not in first + second and set(first).isdisjoint(second)
    assert slab.borrowed() == 20 * 64
    fakes.ended.add(1)
    assert slab.borrowed() == 10 * 64
    third = capture(3)
    assert set(third) == set(first), "counters of a graph that has ended are used again"
    assert set(third).isdisjoint(second)


def test_a_slab_is_refilled_outside_of_capture_alone(fakes: Fakes) -> None:
    slab = CounterSlab(CPU)
    places = 1 << 14
    slab.refill(places)
    wanted = need(0, places, slab)
    low: list[bool] = []
    fakes.graph = 1
    taken = [slab.borrow(places) for _ in range(LAUNCHES)]
    low.append(slab.is_low)
    slab.refill(places)
    assert slab.borrow(places) is None, "memory was allocated under capture"
    assert workspace.addresses(wanted)[1], "a launch without counters of the slab records a memset"
    fakes.end_capture()
    workspace.addresses(wanted)  # an eager call
    low.append(slab.is_low)
    fakes.graph = 2
    more = [slab.borrow(places) for _ in range(LAUNCHES)]
    assert None not in taken + more and set(more).isdisjoint(taken)
    assert low == [True, False]


def test_the_rest_of_a_slab_is_lent_after_the_next_one_is_made(fakes: Fakes) -> None:
    slab = CounterSlab(CPU)
    slab.refill(1)
    fakes.graph = 1
    taken = [slab.borrow(1)]
    fakes.end_capture()
    slab.refill(1 << 12)  # the first slab has no room for `LAUNCHES` of these, but for one
    fakes.graph = 2
    taken += [slab.borrow(1 << 12) for _ in range(LAUNCHES + 1)]
    assert None not in taken and len(set(taken)) == LAUNCHES + 2


def test_captures_again_and_again_need_no_more_memory(fakes: Fakes) -> None:
    slab = CounterSlab(CPU)
    for graph in range(50):
        slab.refill(1 << 12)
        fakes.graph = graph
        assert None not in [slab.borrow(1 << 12) for _ in range(61)]
        fakes.graph = None
        fakes.ended.add(graph)
    assert sum(len(one) for one in slab._slabs) <= 2 * LAUNCHES * (1 << 12)


def test_counters_are_lent_for_good_where_the_driver_does_not_tell(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(device: torch.device) -> tuple[int, int]:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(counters, "graph_under_capture", refuse)
    slab = CounterSlab(CPU)
    slab.refill(1)
    fakes.graph = 1
    taken = [slab.borrow(1) for _ in range(100)]
    fakes.graph, fakes.ended = None, {-1, 1}
    assert len(set(taken)) == 100 and slab.borrowed() == 100 * 32


class Driver:
    """The driver's user objects. A callback is called when the last reference to its object goes."""

    def __init__(self) -> None:
        self.references = 0
        self.of_graph = 0
        self.callback: Any = None

    def cuUserObjectCreate(self, made: Any, argument: int, callback: Any, references: int, flags: int) -> int:
        post = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(callback.value)
        self.callback, self.references = (lambda: post(argument)), references
        return 0

    def cuGraphRetainUserObject(self, graph: int, made: Any, count: int, flags: int) -> int:
        self.of_graph = count
        self.references += 0 if flags == 1 else count  # CU_GRAPH_USER_OBJECT_MOVE takes the caller's references
        return 0

    def end_graph(self) -> None:
        self.references -= self.of_graph
        if self.references == 0:
            self.callback()


def test_the_life_of_a_graph_is_told_by_a_semaphore(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this process kept a reference, which it never gives back, nobody would learn that the graph has ended."""
    driver = Driver()
    monkeypatch.setattr(graphs, "_cuda", lambda: driver)
    life = graphs.GraphLife(1234)
    assert not life.has_ended() and not life.has_ended()
    driver.end_graph()
    assert life.has_ended()


def test_a_driver_that_refuses_is_an_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(Driver):
        def cuUserObjectCreate(self, *arguments: Any) -> int:
            return 801

    monkeypatch.setattr(graphs, "_cuda", Refusing)
    with pytest.raises(OSError, match="801"):
        graphs.GraphLife(1)


# --- capture


def test_capture_is_asked_of_the_devices_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU 1 is current, and GPU 0 captures. A device without an index is the current one of its type."""
    entered: list[int] = [1]

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        entered.append(index)
        yield
        entered.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: entered[-1], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: entered[-1] == 0, raising=False)
    assert [memory.is_capturing(torch.device(name)) for name in ("cuda:0", "cuda:1", "cuda")] == [True, False, False]
    entered[0] = 0
    assert [memory.is_capturing(torch.device(name)) for name in ("cuda", "cpu", "cpu:0")] == [True, False, False]


# --- what is made once


def test_results_that_nobody_reads_are_never_freed() -> None:
    unread = memory._Unread()
    first = unread.get((3, 4), CPU)
    address = first.data_ptr()
    alive = weakref.ref(first.untyped_storage())
    del first
    large = unread.get((1 << 20,), CPU)
    assert unread.get((2, 1 << 19), CPU).data_ptr() == large.data_ptr()
    assert alive() is not None or unread._buffers[CPU][0].data_ptr() == address
    assert len(unread._buffers[CPU]) == 2


def test_a_graph_owns_what_the_buffer_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    unread = memory._Unread()
    small = unread.get((8,), CPU)
    monkeypatch.setattr(memory, "is_capturing", lambda device: True)
    assert unread.get((8,), CPU).data_ptr() == small.data_ptr()
    assert unread.get((1 << 20,), CPU).shape == (1 << 20,) and len(unread._buffers[CPU]) == 1


def test_threads_that_ask_at_once_get_the_same() -> None:
    barrier = threading.Barrier(8)
    calls = []

    def make(device: torch.device) -> object:
        calls.append(device)
        return object()

    get = memory.once_per_device(make)
    got: list[object] = []

    def ask() -> None:
        barrier.wait()
        got.append(get(CPU))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and len(set(map(id, got))) == 1


def test_nothing_is_kept_of_what_failed() -> None:
    answers = iter([RuntimeError("not now"), 5])

    def make(device: torch.device) -> int:
        answer: Any = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    get = memory.once_per_device(make)
    with pytest.raises(RuntimeError, match="not now"):
        get(CPU)
    assert get(CPU) == 5
