"""`mla_fp8_decode` on the GPU against the float64 oracle, under the tolerance rule of `tests.kit.compare`.

A full product of all sizes would be hundreds of thousands of calls; `covering_cases` makes few in which every pair of
values of two factors occurs.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_kernels import mla_fp8_decode
from cute_kernels.mla.plan import EXCHANGES
from cute_kernels.runtime import workspace
from fp8_mla import QK_DIM, ROPE_OFFSET, SCALE_OFFSET, TOKEN_BYTES, V_DIM, reference_decode
from tests.kit.bits import require_same_bits_each_time
from tests.kit.compare import emulate_bf16_decode, relative_error
from tests.kit.mla_cases import (
    SCALE_KINDS,
    DecodeCase,
    covering_cases,
    dense_case,
    generator,
    latent_tokens,
    ragged_lengths,
    sparse_case,
)

pytestmark = pytest.mark.usefixtures("free_memory")
HEADS = (1, 8, 16, 32, 64, 96, 128)
QUERIES = (1, 2, 3)
BATCHES = (1, 4, 74, 321)
PAGE_SIZES = (1, 2, 61, 64, 576)
TOPKS = (1, 63, 64, 576, 2048)
SINKS = ("none", "finite", "inf")

SPARSE = covering_cases(
    {
        "h_q": HEADS,
        "s_q": QUERIES,
        "batch": BATCHES,
        "page_size": PAGE_SIZES,
        "topk": TOPKS,
        "scales": SCALE_KINDS,
        "lengths": ("none", "batch", "query"),
        "sink": SINKS,
        "outliers": (False, True),
        "padded": (True, False),
        "exchange": (None, *EXCHANGES),
    }
)
DENSE = covering_cases(
    {
        "h_q": HEADS,
        "s_q": QUERIES,
        "batch": BATCHES,
        "page_size": PAGE_SIZES,
        "longest": (130, 700, 2500),
        "scales": SCALE_KINDS,
        "causal": (True, False),
        "sink": SINKS,
        "padded": (True, False),
        "exchange": (None, *EXCHANGES),
    }
)


def sparse(**options: Any) -> Any:
    """A sparse `DecodeCase` on the GPU. Typed Any here and below, because a call makes plain which tensors are None."""
    return sparse_case(**options, device="cuda")


def dense(**options: Any) -> Any:
    """A `DecodeCase` with a block table on the GPU."""
    return dense_case(**options, device="cuda")


def label(sizes: dict[str, Any]) -> str:
    return "-".join(f"{name}{value}" for name, value in sizes.items())


@pytest.fixture(params=(None, *EXCHANGES), ids=str)
def exchange(request: pytest.FixtureRequest) -> str | None:
    """The exchange between CTAs, planned or forced, for tests of tiles and keys; it affects neither Q nor sinks."""
    return request.param


def planned(case: DecodeCase, **options: Any) -> Any:
    return mla_fp8_decode(case.q, case.kv_cache, **{**case.options(), **options})


@pytest.fixture
def decode(exchange: str | None) -> Callable[..., Any]:
    return functools.partial(planned, exchange=exchange)


@pytest.fixture
def run_forced(run_decode: Callable[..., Any], exchange: str | None) -> Callable[..., Any]:
    return functools.partial(run_decode, exchange=exchange)


@pytest.mark.parametrize("sizes", SPARSE, ids=label)
def test_sparse(run_decode, sizes):
    sizes = dict(sizes)
    seed, exchange = SPARSE.index(sizes), sizes.pop("exchange")
    run_decode(sparse(**sizes, num_slots=20_000, seed=seed), padded=sizes["padded"], exchange=exchange)


@pytest.mark.parametrize("sizes", DENSE, ids=label)
def test_dense(run_decode, sizes):
    sizes = dict(sizes)
    seed, exchange = DENSE.index(sizes), sizes.pop("exchange")
    seqlens = ragged_lengths(sizes.pop("batch"), sizes.pop("longest"), sizes["page_size"], seed)
    run_decode(dense(**sizes, seqlens=seqlens, seed=seed), padded=sizes["padded"], exchange=exchange)


@pytest.mark.parametrize("h_q", [2, 7, 33, 63, 65, 100, 127])
def test_any_number_of_heads(run_decode, h_q):
    run_decode(sparse(batch=3, h_q=h_q, s_q=2, topk=200, seed=h_q, sink="finite"))


def test_every_topk_length_around_the_tiles(run_forced):
    case = sparse(batch=260, h_q=16, topk=259, invalid=False)
    lengths = torch.arange(260, device="cuda").int()
    for num_splits in (None, 1, 2):
        run_forced(dataclasses.replace(case, topk_length=lengths), num_splits=num_splits)


@pytest.mark.parametrize("causal", [True, False])
def test_every_sequence_length_around_tiles_and_pages(run_forced, causal):
    case = dense(seqlens=range(260), h_q=16, s_q=3, page_size=61, causal=causal)
    for num_splits in (None, 1, 2):
        run_forced(case, num_splits=num_splits)


@pytest.mark.parametrize("topk", [1, 130, 2048])
def test_every_entry_valid_or_none(run_decode, topk):
    case = sparse(batch=5, h_q=64, topk=topk, invalid=False, sink="finite")
    run_decode(case)
    nothing = torch.full_like(case.indices, -1)
    run_decode(dataclasses.replace(case, indices=nothing))


@pytest.mark.parametrize("valid_at", [0, 63, 64, 127, 128, 1999])
def test_one_valid_entry_among_many_invalid_ones(run_forced, valid_at):
    case = sparse(batch=2, h_q=128, topk=2000, invalid=False)
    indices = torch.full_like(case.indices, 2**31 - 1)
    indices[..., valid_at] = case.indices[..., valid_at]
    for num_splits in (None, 1, 5):
        run_forced(dataclasses.replace(case, indices=indices), num_splits=num_splits)


def test_one_slot_named_many_times_counts_as_often(run_decode):
    case = sparse(batch=2, h_q=32, topk=300, invalid=False)
    run_decode(dataclasses.replace(case, indices=case.indices[..., :1].repeat(1, 1, 300)))


@pytest.mark.parametrize("kind", ["topk 0", "topk_length 0", "cache_seqlens 0", "no table", "no pages", "all invalid"])
def test_rows_without_keys_are_zero_and_minus_infinity(decode, kind):
    listed = sparse(batch=74, h_q=96, s_q=2, topk=70, sink="finite", invalid=False)
    paged = dense(seqlens=[0] * 74, h_q=96, s_q=2, sink="finite")
    case = {
        "topk 0": dataclasses.replace(listed, indices=listed.indices[..., :0]),
        "topk_length 0": dataclasses.replace(listed, topk_length=torch.zeros(74, dtype=torch.int32, device="cuda")),
        "cache_seqlens 0": paged,
        "no table": dataclasses.replace(paged, block_table=paged.block_table[:, :0]),
        "no pages": dataclasses.replace(listed, kv_cache=listed.kv_cache[:0]),
        "all invalid": dataclasses.replace(listed, indices=torch.full_like(listed.indices, -(2**31))),
    }[kind]
    for num_splits in (None, 1, 3):
        out, lse = case.outputs(padded=True)
        decode(case, num_splits=num_splits, out=out.tensor, lse=lse.tensor)
        assert (out.tensor == 0).all()
        assert (lse.tensor == -torch.inf).all()


def test_no_requests():
    case = sparse(batch=1, h_q=16).rows([])
    out, lse = planned(case, return_lse=True)
    assert out.shape == (0, 1, 16, V_DIM)
    assert lse.shape == (0, 1, 16)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_sinks_at_infinity(num_splits):
    case = sparse(batch=3, h_q=32, topk=300, invalid=False)

    def with_sink(sink: float) -> Any:
        s_aux = torch.full((32,), sink, device="cuda")
        return planned(case, s_aux=s_aux, num_splits=num_splits, return_lse=True)

    out, lse = planned(case, num_splits=num_splits, return_lse=True)
    without, without_lse = with_sink(-torch.inf)
    assert torch.equal(out, without)
    assert torch.equal(lse, without_lse)
    nothing, same_lse = with_sink(torch.inf)
    assert (nothing == 0).all()
    assert torch.equal(lse, same_lse), "the log-sum-exp leaves the sink out"


def test_sequences_shorter_than_their_queries(run_decode):
    """Calls are causal: of three queries over a sequence of one key, only the last sees it."""
    case = dense(seqlens=[1, 2, 3, 0], h_q=16, s_q=3)
    run_decode(case)
    out = planned(case)
    assert (out[0, :2] == 0).all()
    assert (out[0, 2] != 0).any()


def test_lengths_beyond_the_block_table(run_forced):
    case = dense(seqlens=[190, 64, 320], h_q=64, s_q=2, page_size=64)
    table = torch.arange(5, device="cuda").int().repeat(3, 1)
    cache = latent_tokens(5 * 64, generator(3, "cuda")).view(5, 64, TOKEN_BYTES)
    lengths = torch.tensor([321, 2**31 - 1, -5], device="cuda").int()
    run_forced(dataclasses.replace(case, kv_cache=cache, block_table=table, cache_seqlens=lengths))


SHARES: dict[str, list[float]] = {  # lengths in units of a tile, fractional if a tile is not full
    "equal": [40] * 66,
    "one more than shares": [20] * 67,
    "one long": [1, 1, 700, 1],
    "two of which one is empty": [0, 90],
    "none": [0] * 70,
    "fewer tiles than CTAs": [1, 0, 2, 0, 0, 1],
    "many short and one long": [0.5] * 200 + [300] + [1.5] * 100,
    "growing": list(range(80)),
    "every boundary": [tiles + rest for tiles in (0, 1, 2, 33) for rest in (0, 1 / 64, 63 / 64)],
}


@pytest.mark.parametrize("h_q", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("lengths", SHARES, ids=str)
def test_shares_of_ragged_lengths(run_decode, lengths, h_q):
    """CTAs find their shares of the tiles. Each call is made twice, because a launch leaves its counters at 0."""
    case = dense(seqlens=[int(64 * tiles) for tiles in SHARES[lengths]], h_q=h_q, sink="finite")
    run_decode(case)
    run_decode(case)


@pytest.mark.parametrize("h_q", [16, 128])
@pytest.mark.parametrize(("batch", "topk"), [(2, 2048), (7, 700), (150, 130), (600, 64)])
def test_shares_of_topk_lengths(run_decode, batch, topk, h_q):
    run_decode(sparse(batch=batch, h_q=h_q, s_q=2 if batch < 100 else 1, topk=topk, lengths="query", sink="finite"))


def test_table_entries_outside_the_cache(run_forced):
    case = dense(seqlens=[640, 640, 640], h_q=64, page_size=64)
    table = case.block_table.clone()
    table[0, 3] = -1
    table[1, 0] = case.kv_cache.shape[0]
    table[2, :10] = 2**31 - 1
    for num_splits in (None, 1, 3):
        run_forced(dataclasses.replace(case, block_table=table), num_splits=num_splits)


@pytest.mark.parametrize("mode", ["sparse", "dense"])
@pytest.mark.parametrize("page_size", [64, 61])
def test_cache_beyond_4_gib(run_forced, mode, page_size):
    """Byte offsets pass 2^32, element offsets 2^31. All pages except the first and the last ones are poison."""
    num_pages = (2**32 + 2**28) // (page_size * TOKEN_BYTES)
    cache = torch.full((num_pages, page_size, TOKEN_BYTES), 0xFF, dtype=torch.uint8, device="cuda")
    used = torch.tensor([0, 1, num_pages - 4, num_pages - 3, num_pages - 2, num_pages - 1], device="cuda")
    tokens = latent_tokens(6 * page_size, generator(page_size, "cuda"))
    cache[used] = tokens.view(6, page_size, TOKEN_BYTES)
    q = torch.randn((2, 2, 128, QK_DIM), generator=generator(5, "cuda"), device="cuda").bfloat16() * 0.5
    if mode == "sparse":
        slots = (used.unsqueeze(1) * page_size + torch.arange(page_size, device="cuda")).flatten().int()
        case = DecodeCase(q, cache, indices=slots.flip(0).repeat(2, 2, 1))
    else:
        table = used.flip(0).int().repeat(2, 1)
        lengths = torch.tensor([6 * page_size, 3 * page_size + 1], device="cuda").int()
        case = DecodeCase(q, cache, block_table=table, cache_seqlens=lengths)
    run_forced(case)


@pytest.mark.parametrize("field", ["code", "scale", "rope"])
def test_a_nan_in_a_visible_key_is_not_hidden(run_forced, field):
    """The NaN must reach every query that sees the key, and no other."""
    case = sparse(batch=4, h_q=64, topk=100, page_size=1, invalid=False, padded=False)
    cache, slot = case.kv_cache.clone(), int(case.indices[1, 0, 70])
    begin, end = {"code": (5, 6), "scale": (SCALE_OFFSET, ROPE_OFFSET), "rope": (ROPE_OFFSET, ROPE_OFFSET + 2)}[field]
    cache[slot, 0, begin:end] = 0xFF
    case = dataclasses.replace(case, kv_cache=cache)
    assert reference_decode(**case.arguments())[0][1].isnan().all()
    for num_splits in (None, 1, 2):
        run_forced(case, num_splits=num_splits)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_nan_or_inf_in_one_query_head_stays_there(run_decode, value):
    case = sparse(batch=2, h_q=128, topk=130, invalid=False, query_size=0.2)
    q = case.q.clone()
    q[1, 0, 37, 11] = value
    out, _ = reference_decode(**dataclasses.replace(case, q=q).arguments())
    assert int(out.isnan().sum()) == V_DIM
    run_decode(dataclasses.replace(case, q=q))


def test_queries_far_from_usual_size(run_decode):
    """Logits are of usual size, but q is large, tiny, or both from head to head."""
    case = sparse(batch=2, h_q=64, topk=200, query_size=0.2, padded=False)
    for exponent in (40, -40):
        scale = 576**-0.5 * 2.0**-exponent
        run_decode(dataclasses.replace(case, q=case.q * 2.0**exponent, softmax_scale=scale))
    small = case.q.clone()
    small[:, :, ::2] *= 2.0**-30
    run_decode(dataclasses.replace(case, q=small))
    run_decode(dataclasses.replace(case, q=torch.zeros_like(case.q)))
    run_decode(dataclasses.replace(case, softmax_scale=0.0))


@pytest.mark.parametrize("query_size", [1.0, 8.0, 40.0])
def test_peaked_softmax(run_decode, query_size):
    """With power-of-two scales the yardstick's bf16 keys are exact, too, so it holds for logits in the hundreds."""
    case = sparse(batch=4, h_q=64, topk=576, scales="power_of_two", query_size=query_size)
    for num_splits in (None, 3):
        run_decode(case, num_splits=num_splits)


def test_the_largest_score_may_come_anywhere(run_decode):
    """The running maximum rises in every tile, falls in every tile, or jumps once."""
    tokens = latent_tokens(640, generator(0, "cuda"), scales="power_of_two").view(10, 64, TOKEN_BYTES)
    query = torch.randn((1, 1, 32, QK_DIM), generator=generator(1, "cuda"), device="cuda").bfloat16()
    case = DecodeCase(query, tokens, indices=torch.arange(640, device="cuda").int().view(1, 1, -1))
    keys = reference_scores(case)
    order = keys.argsort()
    jump = torch.cat([order[:320], order[-1:], order[320:-1]])
    for indices in (order, order.flip(0), jump):
        for num_splits in (1, 4):
            one = dataclasses.replace(case, q=case.q * 4, indices=indices.int().view(1, 1, -1))
            run_decode(one, num_splits=num_splits)


def reference_scores(case: Any) -> torch.Tensor:
    """The log-sum-exp of each key alone in a one-query case, summed over heads, which tells the high-scoring keys."""
    count = case.indices.shape[-1]
    alone = DecodeCase(case.q.expand(count, -1, -1, -1), case.kv_cache, indices=case.indices.view(count, 1, 1))
    return emulate_bf16_decode(**alone.arguments())[1].sum(dim=(1, 2))


@pytest.mark.parametrize("mode", ["sparse", "dense"])
@pytest.mark.parametrize("scales", ["absmax", "mixed"])
def test_forced_splits_agree(mode, scales):
    """Results may differ by twice the 2.7e-3 that one result may be off, and each must pass the rule."""
    if mode == "sparse":
        case = sparse(batch=3, h_q=96, s_q=2, topk=700, scales=scales, lengths="query", sink="finite")
    else:
        case = dense(seqlens=[1, 0, 700, 65, 2048], h_q=96, s_q=2, scales=scales, sink="finite")
    expected, _ = reference_decode(**case.arguments())
    results = []
    for num_splits in (1, 2, 3, 7, 32):
        out, lse = case.outputs()
        planned(case, num_splits=num_splits, out=out.tensor, lse=lse.tensor)
        results.append((out.tensor, lse.tensor))
    for out_tensor, lse_tensor in results[1:]:
        # with mixed scales column groups differ in size by up to 1e60: each must agree by itself
        for group in range(4):
            columns = slice(128 * group, 128 * (group + 1))
            assert relative_error(out_tensor[..., columns], results[0][0][..., columns]) < 5.4e-3
            assert relative_error(out_tensor[..., columns], expected[..., columns]) < 5.4e-3
        torch.testing.assert_close(lse_tensor, results[0][1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scales", ["absmax", "mixed", "rare"])
@pytest.mark.parametrize("num_splits", [1, 2, 3, 7, 32])
def test_forced_splits_hold_the_rule(run_forced, num_splits, scales):
    """Partial results are float16 with units, so scales beyond float16 must not show."""
    run_forced(
        sparse(batch=3, h_q=96, s_q=2, topk=700, scales=scales, lengths="query", sink="inf"), num_splits=num_splits
    )
    run_forced(dense(seqlens=[1, 0, 700, 65], h_q=96, s_q=2, scales=scales, sink="inf"), num_splits=num_splits)


@pytest.mark.parametrize("num_splits", [None, 7, 32])
@pytest.mark.parametrize("h_q", [8, 32, 128])
def test_what_empty_splits_leave_in_scratch_memory_does_not_show(run_decode, h_q, num_splits):
    """Merging CTAs read partial results before they know which of them have keys."""
    case = sparse(batch=3, h_q=h_q, topk=2048, lengths="query", seed=3)
    run_decode(case, num_splits=num_splits)
    for scratch in workspace.kept():
        scratch.values.fill_(float("nan"))
    run_decode(case, num_splits=num_splits)
    few = dense(seqlens=[1, 0, 65, 130], h_q=h_q, sink="finite")
    run_decode(few, num_splits=num_splits)


@pytest.mark.parametrize("mode", ["sparse", "dense"])
def test_the_same_bits_on_20_runs(decode, mode):
    if mode == "sparse":
        case = sparse(batch=4, h_q=128, s_q=2, topk=2048, lengths="batch", sink="finite")
    else:
        case = dense(seqlens=[4000, 1, 513, 64], h_q=128, s_q=2, sink="finite")
    require_same_bits_each_time(case, functools.partial(decode, case))


def test_views_of_the_cache_give_the_same_bits():
    case = sparse(batch=2, h_q=64, topk=300, page_size=61, padded=False)
    expected = planned(case)
    padded = torch.full((case.kv_cache.shape[0], 64, TOKEN_BYTES), 0xFF, dtype=torch.uint8, device="cuda")
    padded[:, :61] = case.kv_cache
    views = {
        "float8": case.kv_cache.view(torch.float8_e4m3fn),
        "with a head dimension": case.kv_cache.unsqueeze(2),
        "pages apart": padded[:, :61],
    }
    for name, view in views.items():
        assert torch.equal(planned(dataclasses.replace(case, kv_cache=view)), expected), name


@pytest.mark.parametrize("num_splits", [None, 1])
def test_accuracy(num_splits):
    """N(0,1) data, no power-of-two scales, topk 2048: 2.7e-3 and 2e-5 (plain bf16: 2.5e-3 and 2e-4)."""
    case = sparse(
        batch=8,
        h_q=128,
        s_q=2,
        topk=2048,
        num_slots=65536,
        invalid=False,
        query_size=1.0,
        scales="absmax",
    )
    out, lse = planned(case, num_splits=num_splits, return_lse=True)
    expected, expected_lse = reference_decode(**case.arguments())
    error, lse_error = relative_error(out, expected), (lse - expected_lse).abs().max().item()
    print(f"relative error {error:.2e}, log-sum-exp {lse_error:.1e}")
    assert error <= 2.7e-3
    assert lse_error <= 2e-5


@pytest.mark.parametrize("mode", ["sparse", "dense"])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_no_bit_depends_on_what_is_exchanged(mode, num_splits):
    if mode == "sparse":
        case = sparse(batch=3, h_q=128, s_q=2, topk=700, lengths="query", sink="finite", scales="mixed")
    else:
        case = dense(seqlens=[1, 0, 700, 65, 2048], h_q=128, s_q=2, sink="finite", scales="mixed")
    results = []
    for exchange in ("codes", "values"):  # without an exchange operands swap, and scales multiply V instead of P
        results.append(
            mla_fp8_decode(
                case.q, case.kv_cache, **case.options(), num_splits=num_splits, exchange=exchange, return_lse=True
            )
        )
    for out, lse in results[1:]:
        assert torch.equal(out.view(torch.int16), results[0][0].view(torch.int16))
        assert torch.equal(lse.view(torch.int32), results[0][1].view(torch.int32))


@pytest.mark.parametrize("exchange", ["shares", *EXCHANGES])
def test_10000_launches_of_one_shape(exchange):
    """500 replays of a graph of 20 calls must not hang or change a bit, with equal splits and with shares of tiles."""
    case = sparse(batch=2, h_q=128, topk=330, lengths="batch", sink="finite")
    forced = {} if exchange == "shares" else {"exchange": exchange, "num_splits": 6}
    out, lse = case.outputs()
    expected, expected_lse = case.outputs()

    def call(out: Any, lse: Any) -> None:
        mla_fp8_decode(case.q, case.kv_cache, **case.options(), **forced, out=out.tensor, lse=lse.tensor)

    call(expected, expected_lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            call(out, lse)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(500):
        out.poison()
        lse.poison()
        graph.replay()
        wrong += (out.tensor.view(torch.int16) != expected.tensor.view(torch.int16)).sum()
        wrong += (lse.tensor.view(torch.int32) != expected_lse.tensor.view(torch.int32)).sum()
    assert int(wrong) == 0
