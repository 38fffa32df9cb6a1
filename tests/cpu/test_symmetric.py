"""Context parallelism over symmetric memory, without a GPU: what is chosen and refused, and the order of the code."""

import ctypes
import functools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cute_kernels.distributed import context_parallel_decode, symmetric
from cute_kernels.distributed.exchange import Member, Rows, Target
from cute_kernels.merge import peers_op
from cute_kernels.merge.peers_op import PeerMemory, buffer_bytes, needed_bytes, unsupported
from cute_kernels.merge.peers_spec import CTAS, FLAG_BYTES, MAX_RANKS, PeerMergeSpec, shipped_specs
from tests.kit import sass

GPU = torch.device("cuda", 0)
HALF = symmetric.HALF_BYTES


class Group:
    """Stands in for a process group of torch."""


class Ranks:
    """Rank 1 of a group that never meets: its buffers have no memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world_size: int = 4) -> None:
        self.group: Any = Group()
        self.member = Member(self.group, 1, world_size)
        self.capturing, self.reason, self.failure = False, "", ""
        self.made: list[int] = []
        monkeypatch.setattr(symmetric, "is_capturing", lambda device: self.capturing)
        monkeypatch.setattr(symmetric, "_make", self._make)
        monkeypatch.setattr(symmetric, "_buffers", [self])

    def _make(self, shared: Any, member: Member, device: torch.device, half_bytes: int) -> None:
        self.made.append(half_bytes)
        shared.reason = self.reason
        if not self.reason:
            memory = PeerMemory(1, torch.empty(member.world_size, device="meta"), torch.empty(0), 0, half_bytes, 0)
            shared.buffers.append(SimpleNamespace(memory=memory, failure=lambda: self.failure))

    def buffer(self, how: str | None, queries: int = 1, heads: str = "gather", device: torch.device = GPU) -> Any:
        """Half the bytes of the buffer that a call with 128 heads of 512 bfloat16 gets, or None."""
        on_meta = Rows.empty((queries, 1, 128), 512, torch.bfloat16, torch.device("meta"))
        rows: Any = SimpleNamespace(bytes=SimpleNamespace(device=device), out=on_meta.out, lse=on_meta.lse)
        found = symmetric.peer_buffer(how, self.member, rows, Target(heads, None, None, None))
        return found and found.memory.half_bytes


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


MOST = HALF // (4 * 128 * 1040)
"""The most query tokens that four ranks have room for."""


def test_the_first_call_makes_the_buffer_of_all_others(ranks: Ranks) -> None:
    assert [ranks.buffer(how) for how in (None, "symmetric", None)] == [HALF] * 3
    assert ranks.made == [HALF]
    other = Ranks.__new__(Ranks)
    other.__dict__.update(ranks.__dict__, group=(group := Group()), member=ranks.member._replace(group=group))
    assert other.buffer(None) == HALF and ranks.made == [HALF, HALF], "a group has buffers of its own"


def test_none_takes_a_collective_for_what_does_not_fit(ranks: Ranks) -> None:
    assert ranks.buffer(None, MOST + 1) is None
    assert ranks.made == [], "nothing was needed"
    assert ranks.buffer(None, MOST) == HALF
    assert ranks.buffer(None, MOST + 1) is None
    assert ranks.buffer(None, 4 * MOST, heads="scatter") == HALF, "a quarter of the rows"
    assert ranks.buffer(None, 4 * MOST + 1, heads="scatter") is None


def test_symmetric_makes_room_and_keeps_what_graphs_hold(ranks: Ranks) -> None:
    assert ranks.buffer("symmetric") == HALF
    larger = ranks.buffer("symmetric", 2 * MOST)
    assert 2 * MOST * 128 * 4 * 1040 <= larger == 2 * HALF
    assert ranks.buffer(None, 2 * MOST) == larger
    (shared,) = symmetric._shared[ranks.group].values()
    assert [buffer.memory.half_bytes for buffer in shared.buffers] == [HALF, larger]


def test_needs_that_grow_step_by_step_share_few_buffers(ranks: Ranks) -> None:
    """Graphs hold addresses, so every buffer is kept. All together are less than twice the largest."""
    for queries in range(MOST, MOST + 200):
        assert ranks.buffer("symmetric", queries) >= needed_bytes(128 * queries, 512, torch.bfloat16, 4)
    assert ranks.made == [HALF << n for n in range(len(ranks.made))] and len(ranks.made) == 4
    assert sum(map(buffer_bytes, ranks.made)) < 2 * buffer_bytes(ranks.made[-1])


def test_under_capture_nothing_is_made(ranks: Ranks) -> None:
    ranks.capturing = True
    assert ranks.buffer(None) is None
    with pytest.raises(
        RuntimeError, match="combine: got 'symmetric' under graph capture with buffers of 0 bytes; needs"
    ):
        ranks.buffer("symmetric")
    assert ranks.made == []
    ranks.capturing = False
    ranks.buffer(None)
    ranks.capturing = True
    assert ranks.buffer(None) == ranks.buffer("symmetric") == HALF
    with pytest.raises(RuntimeError, match=f"buffers of {HALF} bytes; needs {2 * MOST * 128 * 4 * 1040} bytes"):
        ranks.buffer("symmetric", 2 * MOST)


def test_ranks_that_share_no_memory_are_asked_once(ranks: Ranks) -> None:
    ranks.reason = "rank 2: no access"
    assert [ranks.buffer(None) for _ in range(3)] == [None] * 3
    with pytest.raises(RuntimeError, match="needs 532480 bytes, but ranks share no memory: rank 2: no access"):
        ranks.buffer("symmetric")
    assert ranks.made == [HALF]


def test_ranks_that_cannot_share_more_keep_what_they_have(ranks: Ranks) -> None:
    assert ranks.buffer("symmetric") == HALF
    ranks.reason = "rank 2: out of memory"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"but ranks share no more than {HALF} bytes: rank 2: out of memory"):
            ranks.buffer("symmetric", 2 * MOST)
    assert [ranks.buffer(how) for how in (None, "symmetric")] == [HALF, HALF]
    assert ranks.buffer(None, 2 * MOST) is None
    assert len(ranks.made) == 2, "asked once"


def test_a_collective_is_a_collective(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks.buffer("collective") is None
    assert ranks.buffer(None, device=torch.device("cpu")) is None
    with pytest.raises(ValueError, match="combine: got 'symmetric' for tensors on cpu; needs CUDA tensors"):
        ranks.buffer("symmetric", device=torch.device("cpu"))
    alone = Ranks(monkeypatch, world_size=1)
    assert alone.buffer(None) is None and alone.buffer("symmetric") == HALF
    many = Ranks(monkeypatch, world_size=MAX_RANKS + 1)
    assert many.buffer(None) is None
    with pytest.raises(ValueError, match="combine: got 'symmetric'; needs 'collective', since there are 65 ranks"):
        many.buffer("symmetric")


def test_a_wait_in_vain_is_told_by_the_next_call(ranks: Ranks) -> None:
    ranks.buffer("symmetric")
    symmetric.raise_if_failed(ranks.member)
    ranks.failure = "rank 1 of 4 waited for rank 3 in vain"
    with pytest.raises(RuntimeError, match="context_parallel_decode: rank 1 of 4 waited for rank 3 in vain"):
        symmetric.raise_if_failed(ranks.member)


def test_a_report_names_the_rank_and_the_timeout() -> None:
    buffer = symmetric._Buffer.__new__(symmetric._Buffer)
    buffer._report = ctypes.c_int32(0)
    buffer._member, buffer._limit = Member(None, 1, 4), symmetric._DEFAULT_TIMEOUT
    assert buffer.failure() == ""
    buffer._report.value = 1
    assert buffer.failure().startswith("rank 1 of 4 waited for rank 0 in vain")
    assert "timeout of 600 s" in buffer.failure()


class Streams:
    """Streams of a card that does not exist, and which of them waited for which."""

    def __init__(self) -> None:
        self.now = 0
        self.capturing = False
        self.waits: list[tuple[int, int | None, int]] = []
        """(stream, the stream whose event it waits for, thread)"""

    def current(self, device: torch.device) -> Any:
        number = self.now

        def wait_event(event: Any) -> None:
            self.waits.append((number, event.stream, threading.get_ident()))

        return SimpleNamespace(number=number, wait_event=wait_event)


class Event:
    """An event after a launch on a stream; before it is recorded there is none."""

    stream: int | None = None

    def record(self, stream: Any) -> None:
        self.stream = stream.number


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    found = Streams()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: found.now, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", found.current)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(symmetric, "is_capturing", lambda device: found.capturing)
    return found


def test_launches_on_several_streams_follow_each_other(streams: Streams) -> None:
    """A launch waits for the event of the previous one. Captured launches do not wait, and nothing waits for them."""
    order = symmetric._Order(GPU)
    for stream, capturing in ((0, False), (0, False), (1, False), (1, False), (2, True), (0, False), (0, True)):
        streams.now, streams.capturing = stream, capturing
        with order.next():
            pass
    assert [wait[:2] for wait in streams.waits] == [(1, 0), (0, 1)]


def test_a_launch_that_fails_is_not_waited_for(streams: Streams) -> None:
    """The failed launch must also leave no lock."""
    order = symmetric._Order(GPU)
    with pytest.raises(ValueError, match="out"), order.next():
        raise ValueError("out")
    assert not order._lock.locked() and order._last is None
    with order.next():
        assert order._lock.locked()
    assert order._last == (0, threading.get_ident())


def test_threads_do_not_share_a_stream_of_one_handle(streams: Streams) -> None:
    """The handle is that of CUDA's default stream of each thread."""
    order = symmetric._Order(GPU)

    def launch() -> None:
        with order.next():
            pass

    launch()
    other = threading.Thread(target=launch)
    other.start()
    other.join()
    launch()
    launch()
    assert [thread for *_, thread in streams.waits] == [other.ident, threading.get_ident()]


# ---- how ranks agree


@pytest.fixture
def alone() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_one_obstacle_is_everybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "_gathered", lambda member, mine: ["", mine, "its own", ""])
    member = Member(None, 1, 4)
    assert symmetric._agree(member, "no room") == "rank 1: no room"
    assert symmetric._agree(member, "") == "rank 2: its own"


@pytest.mark.parametrize(
    "gpu, of_peer, access, found",
    [
        (0, ("here", "b"), True, ""),
        (0, ("here", "b"), False, "GPU 0 has no access to GPU 1 of rank 1"),
        (0, ("here", "a"), False, ""),  # torch says whether two ranks of one GPU are allowed
        (0, ("here", "not visible"), False, ""),
        (1, ("here", "not visible"), False, ""),  # it is not taken for GPU 0, to which this one has no access
        (0, ("there", "b"), True, "they are on several hosts, here, there"),
    ],
)
def test_obstacles(gpu: int, of_peer: Any, access: bool, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", gpu)
    monkeypatch.setattr(symmetric, "_gathered", lambda member, mine: [mine, of_peer])
    monkeypatch.setattr(symmetric.socket, "gethostname", lambda: "here")
    uuids = {device: "ab"[gpu], 0: "a", 1: "b"}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: access)
    assert symmetric._obstacle(Member(None, 0, 2), device) == found


def test_an_error_of_torch_is_a_reason(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> None:
        raise OSError("no such memory")

    monkeypatch.setattr(symmetric, "_obstacle", lambda member, device: "")
    monkeypatch.setattr(symmetric, "_Buffer", fails)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    shared = symmetric._Shared()
    symmetric._make(shared, Member.of(None), GPU, HALF)
    assert shared.reason == "rank 0: OSError: no such memory" and not shared.buffers


def test_waits_last_as_long_as_the_groups(alone: Any) -> None:
    assert symmetric._timeout(alone, torch.device("cpu")).total_seconds() == 1800  # gloo's own default
    assert symmetric._timeout(Group(), GPU) == symmetric._DEFAULT_TIMEOUT


def test_arguments_of_a_call(alone: Any) -> None:
    def partial() -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.ones((1, 1, 4, 64), dtype=torch.bfloat16, device="cpu")
        return out, torch.zeros((1, 1, 4), dtype=torch.float32, device="cpu")

    with pytest.raises(ValueError, match="combine: got 'nvls'; needs None or 'collective' or 'symmetric'"):
        context_parallel_decode(partial, combine="nvls")
    with pytest.raises(ValueError, match="combine: got 'symmetric' for tensors on cpu"):
        context_parallel_decode(partial, combine="symmetric")
    for combine in (None, "collective"):
        assert torch.equal(context_parallel_decode(partial, combine=combine), partial()[0])


def test_a_partial_of_another_callable_keeps_its_arguments(alone: Any) -> None:
    def foreign(scale: float, return_lse: bool = False) -> Any:
        out = torch.full((1, 1, 4, 64), scale, dtype=torch.bfloat16, device="cpu")
        return (out, torch.zeros((1, 1, 4), dtype=torch.float32, device="cpu")) if return_lse else out

    out = context_parallel_decode(functools.partial(foreign, return_lse=True), None, 2.0)
    assert torch.equal(out, foreign(2.0))


def test_gradients_of_a_callable_are_refused(alone: Any) -> None:
    out = torch.ones((1, 1, 4, 64), dtype=torch.bfloat16, device="cpu", requires_grad=True)
    with pytest.raises(ValueError, match="decode: got a tensor that requires gradients"):
        context_parallel_decode(lambda: (out * 2, torch.zeros((1, 1, 4), dtype=torch.float32, device="cpu")))


def test_a_call_without_rows_makes_no_buffer(ranks: Ranks) -> None:
    assert ranks.buffer(None, queries=0) is None and ranks.buffer("symmetric", queries=0) is None
    assert not ranks.made


# ---- sizes


def test_rows_are_as_long_as_what_is_sent() -> None:
    for d, dtype in ((512, torch.bfloat16), (72, torch.float16), (8, torch.float32)):
        rows = Rows.empty((3, 2, 8), d, dtype, torch.device("cpu"))
        spec = peers_op._spec(d, dtype, None)
        assert rows.bytes.shape[-1] == 16 * spec.row_vectors
        exact = 4 * rows.bytes.numel()
        assert exact <= needed_bytes(48, d, dtype, 4) < exact + 128
        assert spec.merge.lanes * 16 >= d * dtype.itemsize and spec.merge.round >= 8, "a host's ranks in one round"
    assert buffer_bytes(HALF) == FLAG_BYTES + 2 * HALF and FLAG_BYTES == 4 * CTAS * MAX_RANKS


@pytest.mark.parametrize(
    "shape, dtype, says",
    [
        ((2, 1, 16, 512), torch.bfloat16, ""),
        ((16, 8), torch.float32, ""),
        ((2, 1, 1, 16, 512), torch.bfloat16, "the result has 5 dimensions; 4 are the most"),
        ((2, 1, 16, 520), torch.bfloat16, "d is 520; a row is a multiple of 8 up to 512"),
        ((2, 1, 16, 512), torch.float64, "dtype is torch.float64; known are float32, bfloat16, float16"),
    ],
)
def test_what_can_be_merged(shape: tuple[int, ...], dtype: torch.dtype, says: str) -> None:
    assert unsupported(shape, dtype, 8) == says


@pytest.mark.parametrize("heads, shift", [(16, 0), (4, 4)])
@pytest.mark.parametrize("leading", [(), (3,), (3, 2)])
def test_what_the_kernel_is_given(
    leading: tuple[int, ...], heads: int, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For "scatter" it gets every rank's part of the heads, for "gather" all heads, in four dimensions."""
    calls: list[tuple[Any, ...]] = []
    kernel: Callable[..., None] = lambda *arguments: calls.append(arguments)  # noqa: E731
    monkeypatch.setattr(peers_op, "require_sm90", lambda name, device: None)
    monkeypatch.setattr(peers_op, "get_kernel", lambda spec: kernel)
    monkeypatch.setattr(peers_op, "_prepared", peers_op.PreparedLaunches())
    rows = Rows.empty((*leading, 16), 64, torch.bfloat16, torch.device("cpu"))
    out, lse = rows.out.new_empty((*leading, heads, 64)), rows.lse.new_empty((*leading, heads))
    peers, counts = torch.zeros(4, dtype=torch.int64), torch.zeros(CTAS, dtype=torch.int32)
    memory = PeerMemory(2, peers, counts, 1234, needed_bytes(lse.numel(), 64, out.dtype, 4), 5678)
    for _ in range(2):
        peers_op.merge_with_peers(rows.bytes, memory, None, out, lse)
    one, again = calls
    assert one[3:] == again[3:] == (
        rows.bytes.data_ptr(), peers.data_ptr(), counts.data_ptr(), 1234, memory.half_bytes, 5678, 4, 2, 16, shift
    )  # fmt: skip
    assert one[1].shape == (*(1,) * (2 - len(leading)), *leading, heads, 64) and one[1].data_ptr() == out.data_ptr()
    assert one[2].shape == one[1].shape[:-1] and one[2].data_ptr() == lse.data_ptr()
    small = memory._replace(half_bytes=memory.half_bytes - 128)
    with pytest.raises(ValueError, match=f"memory: got halves of {small.half_bytes} bytes; needs"):
        peers_op.merge_with_peers(rows.bytes, small, None, out, lse)


# ---- the order in the code


@pytest.mark.parametrize("spec", shipped_specs()[:2], ids=repr)
def test_flags_are_ordered_at_system_scope(spec: PeerMergeSpec) -> None:
    """The order is rows, barrier, fence, flag; then the wait, L1 dropped, barrier, and only then the states."""
    (lines,) = sass.listings([spec])

    def places(*parts: str) -> list[int]:
        return [i for i, line in enumerate(lines) if all(part in line for part in parts)]

    barriers = places("BAR.SYNC")
    assert len(barriers) == 2
    stores_of_rows = [i for i in places("STG.E.128") if i < barriers[0]]
    assert len(stores_of_rows) == PeerMergeSpec.copies
    (fence,) = [i for i in places("MEMBAR.ALL.SYS") if barriers[0] < i < barriers[1]]
    (flag,) = [i for i in places("STG.E.STRONG.SYS") if barriers[0] < i < barriers[1]]
    waits = [i for i in places("LDG.E.STRONG.SYS") if barriers[0] < i < barriers[1]]
    dropped = [i for i in places("CCTL.IVALL") if waits and waits[0] < i < barriers[1]]
    assert fence < flag < min(waits) and len(dropped) == len(waits) > 0
    assert min(i for i in places("LDG.E.128") if i > barriers[0]) > barriers[1]
    assert places("BPT.TRAP"), "a wait has an end"
