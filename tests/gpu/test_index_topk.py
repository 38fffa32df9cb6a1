"""The highest logits of each row: the kernel chooses what the definition chooses, in its order, in every element."""

import dataclasses
from typing import Any

import pytest
import torch

from cute_kernels import index_topk
from cute_kernels.indexer import topk_op
from cute_kernels.indexer.reference import index_topk_reference
from cute_kernels.indexer.topk_spec import CLUSTERS, LONG_QUADS, PORTABLE, SHORT_QUADS, TopkSpec, quads_for
from cute_kernels.runtime import memory
from tests.kit.graphs import capture
from tests.kit.index_cases import FAMILIES, lengths_around, logits_of, table_of

SHAPES = [(1, 0), *((c, min(c, 2)) for c in CLUSTERS)]
"""CTAs of a row, and quads whose keys they keep."""
NUMBERS = {"dtype": torch.int32, "device": "cuda"}


def kernel_specs() -> list[TopkSpec]:
    flags = (False, True)
    return [
        TopkSpec(cluster, quads, has_table=table, has_starts=starts, held=held)
        for cluster, held in SHAPES
        for quads in ((SHORT_QUADS, LONG_QUADS) if cluster <= PORTABLE else (SHORT_QUADS,))
        for table in flags
        for starts in (flags if quads == SHORT_QUADS else (False,))
    ]


@pytest.fixture(params=SHAPES, ids=str)
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the number of CTAs of a row and what they keep in the calls of a test, whatever the plan says."""
    ctas, held = request.param

    def for_launch(rows: int, width: int, num_sms: int, **options: bool) -> TopkSpec:
        planned = planned_launch(rows, width, num_sms, **options)
        return dataclasses.replace(planned, cluster=ctas, quads=quads_for(width, ctas), held=held)

    planned_launch = TopkSpec.for_launch
    monkeypatch.setattr(topk_op.TopkSpec, "for_launch", for_launch)
    topk_op._prepared.clear()
    yield ctas
    topk_op._prepared.clear()


def numbers(values: Any) -> torch.Tensor:
    return torch.as_tensor(values).to(**NUMBERS)


def poisoned(rows: int, topk: int) -> torch.Tensor:
    return torch.full((rows, topk), 0x7F7F7F7F, **NUMBERS)


def check(logits: torch.Tensor, lengths: torch.Tensor, topk: int, **options: Any) -> torch.Tensor:
    """The result of a call after a check that it equals the definition's result."""
    out = poisoned(logits.shape[0], topk)
    index_topk(logits, lengths, topk, **options, out=out)
    expected = index_topk_reference(logits, lengths, topk, **options)
    wrong = (out != expected).any(1).nonzero().flatten().tolist()
    assert not wrong, f"rows {wrong} of lengths {lengths[wrong].tolist()}"
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_values(family: str, cluster: int) -> None:
    logits = logits_of(family, 4, 40_001).cuda()
    for topk in (1, 1000, 2048):
        check(logits, numbers([40_001, 39_999, 20_000, topk + 1]), topk)


@pytest.mark.parametrize("topk", [1, 64, 512, 1000, 1024, 2048])
def test_lengths(topk: int, cluster: int) -> None:
    """NaN and large numbers past a row's length must have no effect."""
    lengths = lengths_around(topk, 9_000)
    for family in ("normal", "integers"):
        logits = logits_of(family, len(lengths), 9_000)
        for row, length in zip(logits, lengths.tolist(), strict=True):
            row[max(length, 0) :] = 1e30 if length % 2 else torch.nan
        check(logits.cuda(), lengths.cuda(), topk)


@pytest.mark.parametrize("page_size", [1, 16, 32, 48, 64, 256])
def test_slots_through_a_table(page_size: int, cluster: int) -> None:
    logits, lengths = logits_of("normal", 6, 10_007).cuda(), numbers([10_007, 9, 4000, 10_000, 2049, 0])
    for batch in (1, 2, 6):
        table = table_of(batch, 10_007 - 300, page_size).cuda()  # it ends before some rows do
        slots = check(logits, lengths, 2048, block_table=table, page_size=page_size)
        assert (slots[0] == -1).any() and (slots[0] > 0).any()


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
@pytest.mark.parametrize("apart", [8192, 8193, 8198, 8303])
def test_strides(apart: int, offset: int, cluster: int) -> None:
    """Rows begin anywhere, surrounded by NaN and large numbers."""
    wide = torch.full((5 * apart + 8,), 1e30, dtype=torch.float32, device="cuda")
    wide[::3] = torch.nan
    rows = wide[offset:].as_strided((5, 8192), (apart, 1))
    rows.copy_(logits_of("normal", 5, 8192))
    check(rows, numbers([8192, 8191, 8190, 8189, 3000]), 1000)


def test_starts(cluster: int) -> None:
    """For rows of prompts, position 0 is the first logit from a start on."""
    logits = logits_of("normal", 8, 12_345).cuda()
    starts = numbers([0, 1, 2, 3, 5000, 12_345, -7, 2**31 - 1])
    lengths = numbers([12_345, 12_000, 2**31 - 1, 700, 7_345, 5, 5000, 1])
    table = table_of(4, 12_345, 64).cuda()
    check(logits, lengths, 1000, row_starts=starts)
    check(logits, lengths, 1000, row_starts=starts, block_table=table, page_size=64)


def test_long_rows(cluster: int) -> None:
    """Rows have more logits than a short form can mark, as many as a cluster of one can hold on this card."""
    width = 589_000 if cluster == 1 else 1_048_576
    for family in ("normal", "zeros, few positive", "equal numbers, few higher", "integers"):
        logits = logits_of(family, 2, width).cuda()
        check(logits, numbers([width, width - 77_777]), 2048)
        check(logits, numbers([width, 3000]), 2048, block_table=table_of(2, width, 64).cuda(), page_size=64)


@pytest.mark.parametrize("ties", [-2047, -1, 0, 1, 5000])
def test_a_plateau_begins_at_the_last_place(ties: int, cluster: int) -> None:
    """Zeros are the plateau, and 1, k - 1, k, k + 1 or many more numbers lie above it."""
    logits = torch.zeros(3, 30_000, dtype=torch.float32, device="cuda")
    places = torch.randperm(30_000, generator=torch.Generator().manual_seed(1))[: 2048 + ties if ties < 5000 else 9000]
    logits[:, places.cuda()] = torch.rand(len(places), device="cuda") + 0.5
    logits[1] *= -1
    logits[2, 17] = torch.inf
    check(logits, numbers([30_000] * 3), 2048)


def test_a_row_does_not_depend_on_others() -> None:
    logits, lengths = logits_of("integers", 40, 20_000).cuda(), torch.randint(0, 20_000, (40,)).int().cuda()
    whole = check(logits, lengths, 2048)
    order = torch.randperm(40).cuda()
    assert torch.equal(index_topk(logits[order], lengths[order], 2048), whole[order])
    halves = [index_topk(logits[i::2], lengths[i::2], 2048) for i in range(2)]
    assert torch.equal(halves[0], whole[::2]) and torch.equal(halves[1], whole[1::2])
    assert all(torch.equal(index_topk(logits, lengths, 2048), whole) for _ in range(20))


def test_many_rows() -> None:
    logits = logits_of("normal", 1024, 4096).cuda()
    check(logits, torch.randint(0, 4097, (1024,)).int().cuda(), 2048)
    check(logits_of("integers", 300, 33_000).cuda(), torch.full((300,), 33_000, **NUMBERS), 512)


@pytest.mark.parametrize("num_sms", [16, 78, 132, 1000])
def test_other_cards_choose_the_same(num_sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    known = memory.constants(torch.device("cuda", 0))
    monkeypatch.setattr(memory, "constants", lambda device: known._replace(num_sms=num_sms))
    topk_op._prepared.clear()
    check(logits_of("integers", 8, 70_000).cuda(), numbers([70_000] * 7 + [2050]), 2048)
    topk_op._prepared.clear()


def test_graph_replays_with_other_lengths_and_logits() -> None:
    """The graph is captured at full length. Lengths, logits and the table change in place between replays."""
    logits, lengths = logits_of("normal", 4, 33_000).cuda(), numbers([33_000] * 4)
    table, out = table_of(2, 33_000, 64).cuda(), poisoned(4, 2048)
    options: dict[str, Any] = {"block_table": table, "page_size": 64}
    graph, _ = capture(lambda: index_topk(logits, lengths, 2048, **options, out=out))
    for seed, drawn in enumerate([[33_000, 2049, 2048, 0], [5, 20_000, 33_000, 40_000], [0, 0, 0, 0]]):
        logits.copy_(logits_of("integers", 4, 33_000, seed))
        lengths.copy_(torch.tensor(drawn))
        table.copy_(table_of(2, 33_000, 64, seed))
        for _ in range(20):
            out.fill_(77)
            graph.replay()
            assert torch.equal(out, index_topk_reference(logits, lengths, 2048, **options))


def test_two_streams_at_once() -> None:
    logits = [logits_of("integers", 8, 50_000, seed).cuda() for seed in range(2)]
    lengths = numbers([50_000] * 8)
    expected = [index_topk_reference(rows, lengths, 2048) for rows in logits]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[i].append(index_topk(logits[i], lengths, 2048))
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected[i]) for i in range(2) for result in found[i])


def test_no_rows_and_no_logits() -> None:
    assert index_topk(torch.zeros(0, 50, device="cuda"), numbers([]), 5).shape == (0, 5)
    assert (index_topk(torch.zeros(3, 0, device="cuda"), numbers([1, 2, 3]), 5) == -1).all()
