"""Which rank keeps which token, against lists made in plain Python; merged shards of one process equal the whole."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from cute_kernels import gqa_decode, merge_states, mla_fp8_decode
from cute_kernels.distributed import (
    context_parallel_decode,
    context_parallel_prefill,
    shard_block_table,
    shard_indices,
    shard_lengths,
    shard_slots,
)
from cute_kernels.distributed.exchange import Member, Rows, Target
from cute_kernels.distributed.prefill import own_heads
from tests.kit.compare import check_decode
from tests.kit.context_shards import kept
from tests.kit.mla_cases import dense_case

DEALS = [(1, 1), (2, 1), (4, 1), (4, 3), (3, 16), (8, 64)]
"""(ranks, interleave)"""
EXTREMES = [0, 1, -1, 5, 16, 17, 63, 64, 65, 1000, -(2**31)]


def ints(values: list[Any], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def deal(world_size: int, interleave: int) -> Iterator[dict[str, int]]:
    for rank in range(world_size):
        yield {"rank": rank, "world_size": world_size, "interleave": interleave}


# ---- against plain Python


@pytest.mark.parametrize(("world_size", "interleave"), DEALS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths(world_size: int, interleave: int, dtype: torch.dtype) -> None:
    for who in deal(world_size, interleave):
        got = shard_lengths(ints(EXTREMES, dtype), **who)
        assert got.dtype == torch.int32
        assert got.tolist() == [len(kept(n, **who)) for n in EXTREMES]
        by_query = shard_lengths(ints(EXTREMES, dtype), **who, s_q=3)
        assert by_query.tolist() == [[len(kept(n - 2 + j, **who)) for j in range(3)] for n in EXTREMES]
        everything = shard_lengths(ints(EXTREMES, dtype), **who, s_q=2, causal=False)
        assert everything.tolist() == [[n, n] for n in got.tolist()]


def test_the_longest_context() -> None:
    longest = 2**31 - 1
    shares = [int(shard_lengths(ints([longest]), rank=rank, world_size=8, interleave=64)) for rank in range(8)]
    assert sum(shares) == longest


@pytest.mark.parametrize("options", [{}, {"s_q": 2}, {"s_q": 2, "causal": False}], ids=str)
def test_lengths_of_int64_beyond_int32(options: dict[str, Any]) -> None:
    """A share beyond int32 becomes the largest int32 and does not wrap."""
    lengths = [2**31 - 1, 2**31, 2**32 + 7, 2**33, 2**62, 2**63 - 1]
    for world_size, interleave in [(1, 1), (2, 1), (4, 64), (8, 2**59)]:
        for rank in range(world_size):
            who = {"rank": rank, "world_size": world_size, "interleave": interleave}
            got = shard_lengths(ints(lengths, torch.int64), **who, **options)
            s_q, stripe = options.get("s_q", 1), interleave * world_size
            for length, shares in zip(lengths, got.view(len(lengths), s_q).tolist(), strict=True):
                for query, share in enumerate(shares):
                    seen = length - s_q + 1 + query if options.get("causal", True) else length
                    own = seen // stripe * interleave + min(max(seen % stripe - rank * interleave, 0), interleave)
                    assert share == min(own, 2**31 - 1)


@pytest.mark.parametrize("world_size, interleave", [(2, 2**62), (2**63, 1), (4, 2**200)])
def test_a_stripe_that_no_position_reaches_is_refused(world_size: int, interleave: int) -> None:
    who = {"rank": 0, "world_size": world_size, "interleave": interleave}
    message = f"interleave: got {interleave} with world_size {world_size}; needs a product below 2\\^63"
    table = ints([[0, 1]])
    for call in (
        lambda: shard_lengths(ints([5]), **who),
        lambda: shard_slots(ints([5]), **who),
        lambda: shard_indices(ints([[[5]]]), **who),
        lambda: shard_block_table(table, 1, **who),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(("world_size", "interleave"), DEALS)
def test_slots(world_size: int, interleave: int) -> None:
    """Local positions count a rank's tokens in order, and its table says where they lie."""
    context, page_size = 130, 4
    positions = ints([[*range(context), -1, -(2**31)], [*range(context), 2**31 - 1, -7]])
    table = ints([[7, 3, 9, 0, -1, 5] * 6, list(range(40, 4, -1))])
    for who in deal(world_size, interleave):
        slots = shard_slots(positions, table, page_size, **who, num_pages=41)
        assert slots.dtype == torch.int64 and slots.shape == positions.shape
        for row in range(2):
            expected = [-1] * positions.shape[1]
            for i, p in enumerate(kept(context, **who)):
                page = int(table[row, i // page_size]) if i // page_size < table.shape[1] else -1
                expected[p] = page * page_size + i % page_size if page >= 0 else -1
            assert slots[row].tolist() == expected


def test_slots_of_one_whole_cache() -> None:
    """Without a table, numbers are slots of a cache whose pages hold tokens of every rank."""
    who = {"rank": 1, "world_size": 2, "interleave": 2}
    whole = ints([page * 8 + offset for page in range(3) for offset in range(8)])  # pages of 2 x 4
    expected = [page * 4 + i for page in range(3) for i in (-1, -1, 0, 1, -1, -1, 2, 3)]
    got = shard_slots(whole, **who).tolist()
    assert [slot if slot >= 0 else -1 for slot in got] == [
        slot if offset % 4 >= 2 else -1 for offset, slot in enumerate(expected)
    ]


@pytest.mark.parametrize(("world_size", "interleave"), [(1, 4), (2, 4), (4, 8), (3, 16)])
@pytest.mark.parametrize("width", [0, 1, 7, 24])
def test_block_tables(world_size: int, interleave: int, width: int) -> None:
    page_size = 4
    table = torch.arange(2 * width, dtype=torch.int32).view(2, width)
    tables = [shard_block_table(table, page_size, **who) for who in deal(world_size, interleave)]
    assert len({t.shape for t in tables}) == 1
    for who, own in zip(deal(world_size, interleave), tables, strict=True):
        first_tokens = [p for p in kept(width * page_size, **who) if p % page_size == 0]
        pages = table[:, [p // page_size for p in first_tokens]]
        assert torch.equal(own[:, : pages.shape[1]], pages)
        assert (own[:, pages.shape[1] :] == -1).all()


@pytest.mark.parametrize(("world_size", "interleave"), DEALS)
@pytest.mark.parametrize("lengths", ["none", "row", "query"])
def test_indices(world_size: int, interleave: int, lengths: str) -> None:
    gen = torch.Generator().manual_seed(world_size)
    indices = torch.randint(-5, 200, (2, 3, 50), generator=gen, dtype=torch.int32)
    indices[0, 0, :3] = ints([-(2**31), 2**31 - 1, 0])
    table = torch.randperm(400, generator=gen)[:200].int().view(2, 100)
    limit = {"none": None, "row": ints([17, -4]), "query": ints([[50, 0, 99], [1, 2**31 - 1, -(2**31)]])}[lengths]
    found: list[list[list[int]]] = [[[] for _ in range(3)] for _ in range(2)]
    for who in deal(world_size, interleave):
        own, counts = shard_indices(indices, table, 2, **who, topk_length=limit, num_pages=400)
        assert own.dtype == counts.dtype == torch.int32
        assert own.is_contiguous() and own.shape == indices.shape
        slots = shard_slots(indices, table, 2, **who, num_pages=400)
        for row in range(2):
            for query in range(3):
                count = int(counts[row, query])
                assert (own[row, query, count:] == -1).all()
                most = 50 if limit is None else int(limit[row] if limit.dim() == 1 else limit[row, query])
                in_order = [s for s in slots[row, query, : max(most, 0)].tolist() if s >= 0]
                assert own[row, query, :count].tolist() == in_order
                found[row][query] += in_order
    whole = [[len([p for p in indices[r, j][: _limit(limit, r, j)].tolist() if 0 <= p < 200 * world_size])
              for j in range(3)] for r in range(2)]  # fmt: skip
    assert [[len(of) for of in row] for row in found] == whole


def _limit(limit: torch.Tensor | None, row: int, query: int) -> int:
    return 50 if limit is None else max(int(limit[row] if limit.dim() == 1 else limit[row, query]), 0)


def test_slots_that_int32_cannot_name_are_dropped() -> None:
    """Wrapped to int32, they would be other slots."""
    table = ints([[2**31 - 1, 1]])
    own, counts = shard_indices(ints([[[0, 64, 1]]]), table, 64, rank=0, world_size=1)
    assert own.tolist() == [[[64, -1, -1]]] and counts.tolist() == [[1]]


def test_every_head_of_a_chunk_belongs_to_one_rank() -> None:
    for world_size in range(1, 10):
        for h_kv in range(1, 10):
            for ratio in (1, 2, 3, 8):
                shares = [own_heads(h_kv * ratio, h_kv, rank, world_size) for rank in range(world_size)]
                heads = [h for share in shares for h in range(share.start, share.stop)]
                assert heads == list(range(h_kv * ratio))
                for share in shares:  # whole heads of the cache, or a part of one
                    first, last = share.start // ratio, (share.stop - 1) // ratio
                    assert share.start >= share.stop or first == last or (share.stop - share.start) % ratio == 0


# ---- a real program


def all_shards(device: str = "cpu") -> list[torch.Tensor]:
    """Results of every function, from tensors with an explicit dtype and device."""

    def of(values: list[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    who = {"rank": 1, "world_size": 2, "interleave": 4}
    table, indices = of([[3, 1, 2], [0, 4, 5]]), of([[[5, 0, 12, -1]], [[4, 7, 6, 30]]])
    return [
        shard_lengths(of([5, 30]), **who),
        shard_lengths(of([5, 30]), **who, s_q=3),
        shard_slots(indices, table, 4, **who),
        shard_block_table(table, 4, **who),
        *shard_indices(indices, table, 4, **who, topk_length=of([3, 9])),
        *shard_indices(indices, **who),
    ]  # fmt: skip


def test_no_value_is_read_on_the_host() -> None:
    """Fake tensors have no values: reading one raises. Without reads nothing synchronizes, and graphs can capture."""
    shapes = [t.shape for t in all_shards()]
    with FakeTensorMode():
        assert [t.shape for t in all_shards()] == shapes


def test_torch_defaults_change_nothing() -> None:
    expected = all_shards()
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        got = all_shards()
    finally:
        torch.set_default_dtype(dtype)
        torch.set_default_device(None)
    for a, b in zip(got, expected, strict=True):
        assert a.device.type == "cpu" and torch.equal(a, b)


@pytest.mark.parametrize("interleave", [8, 16, 1024])
def test_pages_of_one_cache_shared_out(interleave: int) -> None:
    """Every rank's table over the same pages, decoded one after the other and merged, must give the whole."""
    case = dense_case(seqlens=[0, 5, 77, 130], h_q=8, page_size=8, sink="finite", seed=3)
    whole = case.arguments()
    assert case.block_table is not None and case.cache_seqlens is not None
    partials = []
    for who in deal(3, interleave):
        table = shard_block_table(case.block_table, 8, **who)
        lengths = shard_lengths(case.cache_seqlens, **who)
        call = {**whole, "block_table": table, "cache_seqlens": lengths, "s_aux": None}
        partials.append(mla_fp8_decode(**call, return_lse=True))
    out, lse = merge_states(*(torch.stack(tensors) for tensors in zip(*partials, strict=True)), s_aux=case.s_aux)
    check_decode(out, lse, **whole).require()


# ---- what is refused


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of this process alone."""
    store = tmp_path_factory.mktemp("alone") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def mla_call() -> dict[str, Any]:
    return {
        "q": torch.zeros(2, 2, 8, 576, dtype=torch.bfloat16),
        "kv_cache": torch.zeros(4, 8, 656, dtype=torch.uint8),
        "block_table": ints([[0, 1], [2, 3]]),
        "cache_seqlens": ints([9, 3]),
    }  # fmt: skip


def gqa_call() -> dict[str, Any]:
    cache = torch.zeros(4, 8, 2, 64, dtype=torch.bfloat16)
    return {
        "q": torch.zeros(2, 2, 8, 64, dtype=torch.bfloat16), "k_cache": cache, "v_cache": cache, "layout": "paged_NHD",
        "block_table": ints([[0, 1], [2, 3]]), "cache_seqlens": ints([9, 3]),
    }  # fmt: skip


SLOPES = torch.ones(8)
REFUSED: list[tuple[str, dict[str, Any], str, type[Exception]]] = [
    ("mla", {"heads": "all"}, "heads: got 'all'; needs 'gather' or 'scatter'", ValueError),
    ("mla", {"interleave": 0}, "interleave: got 0; needs at least 1", ValueError),
    ("mla", {"interleave": 2.0}, "interleave: got float; needs an int", TypeError),
    ("mla", {"cache_seqlens": None}, "cache_seqlens: got None; needs a tensor: the lengths of the whole", ValueError),
    ("mla", {"cache_seqlens": ints([1])}, r"cache_seqlens: got shape \(1,\); needs \(2\)", ValueError),
    ("mla", {"cache_seqlens": ints([1, 2], torch.int64)}, "cache_seqlens: got dtype torch.int64", TypeError),
    ("mla", {"local_lengths": ints([1, 2])}, r"local_lengths: got shape \(2,\); needs \(2, 2\)", ValueError),
    ("mla", {"q": torch.zeros(2, 8, 576)}, "q: got 3 dimensions", ValueError),
    ("mla", {"q": None}, "q: got NoneType; needs a torch.Tensor", TypeError),
    ("mla", {"block_table": ints([0, 1])}, "block_table: got shape", ValueError),
    ("mla", {"s_aux": torch.zeros(3)}, r"s_aux: got shape \(3,\); needs \(8,\)", ValueError),
    ("mla", {"s_aux": torch.zeros(8, dtype=torch.float64)}, "s_aux: got dtype torch.float64", TypeError),
    ("mla", {"out": torch.zeros(2, 2, 8, 512)}, "out: got dtype torch.float32; needs torch.bfloat16", TypeError),
    ("mla", {"lse": torch.zeros(2, 8, 2)}, r"lse: got shape \(2, 8, 2\)", ValueError),
    ("mla", {"s_aux": torch.zeros(8, requires_grad=True)}, "s_aux: got a tensor that requires gradients", ValueError),
    ("mla", {"kv_cache": torch.zeros(4, 8, 640, dtype=torch.uint8)}, "kv_cache: got", ValueError),
    ("gqa", {"window": 3, "interleave": 2}, "window: got 3; needs a positive multiple of 2, interleave x", ValueError),
    ("gqa", {"window": 0}, "window: got 0; needs a positive multiple of 1", ValueError),
    ("gqa", {"window": 2.0}, "window: got float; needs an int", TypeError),
    ("gqa", {"window": 4, "causal": False}, "window: got 4 with 2 query tokens and causal=False", ValueError),
    ("gqa", {"alibi_slopes": SLOPES, "interleave": 2}, "alibi_slopes: got slopes with interleave 2; needs", ValueError),
    ("gqa", {"alibi_slopes": SLOPES[:3]}, r"alibi_slopes: got shape \(3,\); needs \(8,\) or \(2, 8\)", ValueError),
]  # fmt: skip


@pytest.mark.parametrize(("op", "changed", "message", "error"), REFUSED)
def test_refused_in_words(op: str, changed: dict[str, Any], message: str, error: type[Exception], alone: None) -> None:
    decode, call = (mla_fp8_decode, mla_call()) if op == "mla" else (gqa_decode, gqa_call())
    context_parallel_decode(decode, **call)  # what is changed is what is wrong
    with pytest.raises(error, match=message):
        context_parallel_decode(decode, **{**call, **changed})


def test_other_callables(alone: None) -> None:
    call = mla_call()
    out, lse = mla_fp8_decode(**call, return_lse=True)
    got = context_parallel_decode(lambda: (out, lse), return_lse=True)
    assert torch.equal(got[0], out) and torch.equal(got[1], lse)
    with pytest.raises(TypeError, match=r"decode: got a callable that returns Tensor; needs one that returns"):
        context_parallel_decode(lambda: out)
    with pytest.raises(TypeError, match="decode: got NoneType; needs a decode op"):
        context_parallel_decode(None)
    with pytest.raises(ValueError, match="gather_q: got True; needs False"):
        context_parallel_decode(lambda: (out, lse), gather_q=True)


def test_a_partial_is_the_same_call(alone: None) -> None:
    """A partial's sinks are applied once, like those of a plain call."""
    from functools import partial

    call = {**mla_call(), "s_aux": torch.zeros(8)}
    q, cache = call.pop("q"), call.pop("kv_cache")
    cache.random_(0, 64)
    cache[..., 512:] = 0
    expected = context_parallel_decode(mla_fp8_decode, None, q, cache, **call)
    assert torch.equal(context_parallel_decode(partial(mla_fp8_decode, q, cache, **call)), expected)
    with pytest.raises(TypeError, match="q: got two values; needs one"):
        context_parallel_decode(mla_fp8_decode, None, q, cache, **call, q=q)
    with pytest.raises(TypeError, match="args: got 3 of them"):
        context_parallel_decode(mla_fp8_decode, None, q, cache, cache, **call)


def test_heads_that_ranks_cannot_share() -> None:
    shape, device = (1, 1, 6), torch.device("cpu")
    with pytest.raises(ValueError, match="q: got 6 heads; needs a multiple of 4 for heads='scatter'"):
        Target.of("scatter", Member(None, 0, 4), shape, 64, torch.bfloat16, device, None, None, None)


def test_sinks_of_a_rank_or_of_all() -> None:
    shape, device, sinks = (1, 1, 8), torch.device("cpu"), torch.arange(8.0)
    member = Member(None, 1, 4)
    for given in (sinks, sinks[2:4]):
        target = Target.of("scatter", member, shape, 64, torch.bfloat16, device, given, None, None)
        assert target.s_aux is not None and target.s_aux.tolist() == [2.0, 3.0]


def test_a_prefill_that_is_refused(alone: None) -> None:
    q, k = torch.zeros(1, 3, 4, 64, dtype=torch.bfloat16), torch.zeros(1, 3, 2, 64, dtype=torch.bfloat16)
    context_parallel_prefill(q, k, k, k, k)
    for changed, message in (
        ({"k_context": k[..., :1, :]}, "k_context: got shape"),
        ({"v_context": k[:, :1]}, "v_context: got shape"),
        ({"v": k[:, :1]}, "v: got shape"),
        ({"q": q[..., :3, :]}, "q: got 3 heads; needs a multiple of the 2 heads of k"),
        ({"heads": None}, "heads: got None"),
        ({"q": q.float().requires_grad_()}, "q: got a tensor that requires gradients"),
    ):
        with pytest.raises(ValueError, match=message):
            context_parallel_prefill(**{"q": q, "k": k, "v": k, "k_context": k, "v_context": k, **changed})
    with pytest.raises(TypeError, match="cu_seqlens_context: got NoneType"):
        context_parallel_prefill(q[0], k[0], k[0], k[0], k[0], cu_seqlens_q=ints([0, 3]))


def test_it_traces(alone: None) -> None:
    call = mla_call()
    decode = torch.compile(lambda q: context_parallel_decode(mla_fp8_decode, **{**call, "q": q}), backend="eager",
                           fullgraph=True)  # fmt: skip
    assert torch.equal(decode(call["q"]), mla_fp8_decode(**call))


def test_rows_carry_a_word_of_their_call() -> None:
    """Every byte of a row that is sent is written, and different calls have different words. tests/gpu tests GPUs."""
    cpu = torch.device("cpu")

    def word(shape: tuple[int, ...] = (2, 1, 8), d: int = 64, dtype: torch.dtype = torch.bfloat16, *call: int) -> int:
        rows = Rows.empty(shape, d, dtype, cpu, call)
        words = rows.bytes[..., -12:].view(torch.int32)
        assert words.shape == (*shape, 3) and (words == words.flatten()[0]).all()
        rows.lse.fill_(1.5)
        rows.out.fill_(2)
        assert (words == words.flatten()[0]).all(), "nothing is written over"
        return int(words.flatten()[0])

    calls = [
        word(), word((1, 2, 8)), word((2, 1, 16)), word((2, 1, 8), 128), word((2, 1, 8), 64, torch.float16),
        word((2, 1, 8), 64, torch.float32), word((2, 1, 8), 64, torch.bfloat16, 1),
        word((2, 1, 8), 64, torch.bfloat16, 2), word((2, 1, 8), 64, torch.bfloat16, 2, 2**62),
    ]  # fmt: skip
    assert len(set(calls)) == len(calls) and word() == calls[0]
