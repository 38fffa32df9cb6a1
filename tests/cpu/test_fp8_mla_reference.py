"""The oracle agrees with a loop over queries, heads and keys that shares no code with it."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fp8_mla
from fp8_mla import reference
from fp8_mla.reference import reference_decode

INT32_EXTREMES = [-(2**31), 2**31 - 1]
POISON = 0xFF  # every field of a token of these bytes is a NaN


def numpy_token(token: torch.Tensor) -> np.ndarray:
    """One token's 576 float64 elements, decoded by numpy and a formula."""
    raw = token.numpy()
    codes: np.ndarray = raw[:512].astype(np.int64)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    magnitude[codes & 127 == 127] = np.nan
    nope = np.where(codes & 128, -magnitude, magnitude) * np.repeat(raw[512:528].view("<f4").astype(np.float64), 128)
    rope = (raw[528:].view("<u2").astype(np.uint32) << 16).view(np.float32)
    return np.concatenate([nope, rope])


def slots_seen(b, j, s_q, num_slots, page_size, indices, topk_length, block_table, cache_seqlens, causal):
    """The keys of one query, by the words of the contract."""
    if indices is not None:
        row = indices[b, j].tolist()
        if topk_length is not None:
            length = int(topk_length[b] if topk_length.ndim == 1 else topk_length[b, j])
            row = row[: max(length, 0)]
        return [slot for slot in row if 0 <= slot < num_slots]
    seen = []
    length = min(max(int(cache_seqlens[b]), 0), block_table.shape[1] * page_size)
    limit = length - (s_q - 1 - j if causal else 0)
    for place, page in enumerate(block_table[b].tolist()):
        for offset in range(page_size):
            if place * page_size + offset < limit and 0 <= page < num_slots // page_size:
                seen.append(page * page_size + offset)
    return seen


def naive_decode(
    q,
    kv_cache,
    *,
    indices=None,
    topk_length=None,
    block_table=None,
    cache_seqlens=None,
    causal=True,
    softmax_scale=None,
    s_aux=None,
):
    """Returns (out, lse) in float64, one head at a time; the sink is one more key with a value of zeros."""
    batch, s_q, h_q, _ = q.shape
    page_size = kv_cache.shape[1]
    tokens = kv_cache.reshape(-1, 656).view(torch.uint8)
    scale = 1 / math.sqrt(576) if softmax_scale is None else softmax_scale
    out = torch.zeros(batch, s_q, h_q, 512, dtype=torch.float64)
    lse = torch.full((batch, s_q, h_q), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for j in range(s_q):
            seen = slots_seen(
                b, j, s_q, len(tokens), page_size, indices, topk_length, block_table, cache_seqlens, causal
            )
            if not seen:
                continue
            keys = torch.from_numpy(np.stack([numpy_token(tokens[slot]) for slot in seen]))
            for h in range(h_q):
                scores = torch.stack([(q[b, j, h].double() * key).sum() * scale for key in keys])
                lse[b, j, h] = torch.logsumexp(scores, dim=0)
                sink = -math.inf if s_aux is None else float(s_aux[h])
                if sink == math.inf:
                    continue
                weights = torch.softmax(torch.cat([scores, torch.tensor([sink], dtype=torch.float64)]), dim=0)
                for weight, key in zip(weights[:-1], keys, strict=True):
                    out[b, j, h] += weight * key[:512]
    return out, lse


def random_case(seed, batch, s_q, h_q, num_pages, page_size):
    """Queries, and a cache with scales of very different sizes and an outlier channel."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, s_q, h_q, 576, generator=generator).bfloat16()
    kv = torch.randn(num_pages, page_size, 576, generator=generator)
    kv[..., 17] *= 20
    kv[..., 128:256] *= torch.logspace(-3, 0.5, num_pages * page_size).view(num_pages, page_size, 1)
    return q, fp8_mla.pack(kv)


def assert_close(got, expected, tolerance=1e-12):
    (out, lse), (expected_out, expected_lse) = got, expected
    torch.testing.assert_close(out, expected_out, rtol=tolerance, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(lse, expected_lse, rtol=tolerance, atol=tolerance, equal_nan=True)


@st.composite
def sparse_cases(draw):
    batch, s_q, h_q = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    num_pages, page_size, topk = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 5])), draw(st.integers(0, 9))
    slots = num_pages * page_size
    index = st.one_of(st.integers(0, slots - 1), st.integers(-3, slots + 3), st.sampled_from(INT32_EXTREMES))
    count = batch * s_q * topk
    indices = torch.tensor(draw(st.lists(index, min_size=count, max_size=count)), dtype=torch.int32)
    length = st.one_of(st.integers(-2, topk + 2), st.sampled_from(INT32_EXTREMES))
    shape = draw(st.sampled_from([None, (batch,), (batch, s_q)]))
    arguments = {"indices": indices.view(batch, s_q, topk)}
    if shape is not None:
        lengths = draw(st.lists(length, min_size=math.prod(shape), max_size=math.prod(shape)))
        arguments["topk_length"] = torch.tensor(lengths, dtype=torch.int32).view(shape)
    return (batch, s_q, h_q, num_pages, page_size), arguments


@st.composite
def dense_cases(draw):
    batch, s_q, h_q = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 2))
    num_pages, page_size = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 3]))
    max_pages = draw(st.integers(0, 4))
    entry = st.one_of(st.integers(0, num_pages - 1), st.integers(-2, num_pages + 2), st.sampled_from(INT32_EXTREMES))
    length = st.one_of(st.integers(-2, max_pages * page_size + 3), st.sampled_from(INT32_EXTREMES))
    table = draw(st.lists(entry, min_size=batch * max_pages, max_size=batch * max_pages))
    lengths = draw(st.lists(length, min_size=batch, max_size=batch))
    return (batch, s_q, h_q, num_pages, page_size), {
        "block_table": torch.tensor(table, dtype=torch.int32).view(batch, max_pages),
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32),
        "causal": draw(st.booleans()),
    }


SINKS = st.one_of(st.none(), st.lists(st.sampled_from([-math.inf, math.inf, 0.0, -3.5, 6.0, 500.0]), min_size=4))


@settings(max_examples=70, deadline=None)
@given(
    case=st.one_of(sparse_cases(), dense_cases()),
    sinks=SINKS,
    softmax_scale=st.sampled_from([None, 0.3, 1.0]),
    chunk=st.sampled_from([1, 3, 8192]),
    seed=st.integers(0, 99),
)
def test_against_the_loop(case, sinks, softmax_scale, chunk, seed):
    shape, arguments = case
    q, cache = random_case(seed, *shape)
    s_aux = None if sinks is None else torch.tensor(sinks[: shape[2]])
    arguments = {**arguments, "s_aux": s_aux, "softmax_scale": softmax_scale}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "KEYS_PER_CHUNK", chunk)
        got = reference_decode(q, cache, **arguments)
    assert_close(got, naive_decode(q, cache, **arguments), 1e-11)


@settings(max_examples=40, deadline=None)
@given(case=st.one_of(sparse_cases(), dense_cases()), seed=st.integers(0, 99))
def test_bytes_of_other_slots_never_matter(case, seed):
    (batch, s_q, h_q, num_pages, page_size), arguments = case
    q, cache = random_case(seed, batch, s_q, h_q, num_pages, page_size)
    selection = {"indices": None, "topk_length": None, "block_table": None, "cache_seqlens": None, "causal": True}
    for b in range(batch):
        for j in range(s_q):
            # each query alone: a key that its neighbour may see must not reach it
            seen = slots_seen(b, j, s_q, num_pages * page_size, page_size, **{**selection, **arguments})
            poisoned = torch.full_like(cache, POISON).view(-1, 656)
            poisoned[seen] = cache.view(-1, 656)[seen]
            clean = reference_decode(q, cache, **arguments)
            dirty = reference_decode(q, poisoned.view_as(cache), **arguments)
            assert torch.equal(clean[0][b, j], dirty[0][b, j])
            assert torch.equal(clean[1][b, j], dirty[1][b, j])
            assert clean[0][b, j].isfinite().all()


def test_queries_without_keys():
    q, cache = random_case(3, 4, 3, 2, 2, 4)
    s_aux = torch.tensor([1.0, math.inf])
    table = torch.tensor([[0, 1], [1, 0], [-1, 9], [0, 1]], dtype=torch.int32)
    out, lse = reference_decode(
        q, cache, block_table=table, cache_seqlens=torch.tensor([0, 2, 8, -5], dtype=torch.int32), s_aux=s_aux
    )
    empty = torch.ones(4, 3, dtype=torch.bool)
    empty[1, 1:] = False  # of 3 queries over 2 keys, the last two see 1 and 2
    assert torch.equal(lse == -math.inf, empty.unsqueeze(-1).expand(4, 3, 2))
    assert (out[empty] == 0).all() and not out[empty].signbit().any()
    assert (out[~empty][:, 0] != 0).all() and (out[~empty][:, 1] == 0).all()
    for indices in (torch.full((4, 3, 5), -1), torch.full((4, 3, 5), 8), torch.zeros(4, 3, 0)):
        out, lse = reference_decode(q, cache, indices=indices.int(), s_aux=s_aux)
        assert (out == 0).all() and (lse == -math.inf).all()
    out, lse = reference_decode(q, cache[:0], indices=torch.zeros(4, 3, 5, dtype=torch.int32))
    assert (out == 0).all() and (lse == -math.inf).all()
    out, lse = reference_decode(q[:0], cache, indices=torch.zeros(0, 3, 5, dtype=torch.int32))
    assert out.shape == (0, 3, 2, 512) and lse.shape == (0, 3, 2)


@pytest.mark.parametrize("chunk", [1, 2, 8192])
def test_a_score_of_minus_infinity_has_no_weight(monkeypatch, chunk):
    monkeypatch.setattr(reference, "KEYS_PER_CHUNK", chunk)
    q, cache = random_case(14, 1, 1, 2, 1, 4)
    q[..., 575] = -1.0
    cache[0, :2, 654:656] = torch.tensor([math.inf], dtype=torch.bfloat16).view(torch.uint8)
    without = reference_decode(q, cache, indices=torch.tensor([[[2, 3]]], dtype=torch.int32))
    for order in ([0, 1, 2, 3], [2, 0, 3, 1], [2, 3, 1, 0]):
        assert_close(reference_decode(q, cache, indices=torch.tensor([[order]], dtype=torch.int32)), without)
    out, lse = reference_decode(q, cache, indices=torch.tensor([[[1, 0]]], dtype=torch.int32))
    assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("field", [5, 133, 515, 600])
def test_nan_in_a_key_reaches_exactly_the_queries_that_see_it(field):
    q, cache = random_case(5, 2, 3, 2, 2, 4)
    cache[1, 2, field : field + 2 if field > 520 else field + 1] = 0x7F  # a code, a byte of a scale, a bfloat16
    cache[1, 2, 512:516] = torch.tensor([math.nan if field == 515 else 1.0]).view(torch.uint8)
    if field == 600:
        cache[1, 2, 600:602] = torch.tensor([math.nan], dtype=torch.bfloat16).view(torch.uint8)
    table = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
    seqlens = torch.tensor([7, 4], dtype=torch.int32)
    out, lse = reference_decode(q, cache, block_table=table, cache_seqlens=seqlens)
    sees = torch.tensor([[False, False, True], [False, True, True]])
    assert torch.equal(lse.isnan(), sees.unsqueeze(-1).expand(2, 3, 2))
    assert torch.equal(out.isnan(), sees.view(2, 3, 1, 1).expand(2, 3, 2, 512))


def test_scores_far_beyond_the_range_of_exp():
    q, cache = random_case(7, 1, 1, 2, 2, 4)
    indices = torch.arange(8, dtype=torch.int32).view(1, 1, 8)
    q *= 1e4
    got = reference_decode(q, cache, indices=indices)
    assert got[0].isfinite().all() and got[1].abs().max() > 1e4
    assert_close(got, naive_decode(q, cache, indices=indices))
    s_aux = torch.tensor([-1e6, 1e6])
    out, _ = reference_decode(q, cache, indices=indices, s_aux=s_aux)
    assert torch.equal(out[:, :, 0], got[0][:, :, 0]) and (out[:, :, 1] == 0).all()


def test_float32_is_the_same_within_its_precision():
    q, cache = random_case(9, 2, 2, 8, 4, 61)
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    arguments: dict[str, Any] = {"block_table": table, "cache_seqlens": torch.tensor([122, 75], dtype=torch.int32)}
    single, wide = (reference_decode(q, cache, dtype=d, **arguments) for d in (torch.float32, torch.float64))
    assert single[0].dtype == single[1].dtype == torch.float32
    assert wide[0].dtype == wide[1].dtype == torch.float64
    assert_close((single[0].double(), single[1].double()), wide, 2e-5)


def test_takes_strided_arguments_and_both_forms_of_cache():
    q, cache = random_case(10, 2, 2, 3, 4, 6)
    indices = torch.randint(0, 24, (2, 2, 7), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    lengths = torch.tensor([[7, 5], [0, 6]], dtype=torch.int32)
    expected = reference_decode(q, cache, indices=indices, topk_length=lengths)
    wide = torch.full((4, 9, 1, 704), POISON, dtype=torch.uint8)
    wide[:, 2:8, :, 16:672] = cache.unsqueeze(2)
    got = reference_decode(
        q.transpose(0, 2).contiguous().transpose(0, 2),
        wide[:, 2:8, :, 16:672].view(torch.float8_e4m3fn),
        indices=indices.transpose(0, 2).contiguous().transpose(0, 2),
        topk_length=lengths.long().T.contiguous().T,
    )
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_only_the_named_tokens_are_gathered(monkeypatch):
    unpacked = []

    def counting_unpack(tokens, dtype, **options):
        unpacked.append(len(tokens))
        return fp8_mla.unpack(tokens, dtype, **options)

    monkeypatch.setattr(reference, "unpack", counting_unpack)
    monkeypatch.setattr(reference, "KEYS_PER_CHUNK", 16)
    q, cache = random_case(11, 2, 3, 1, 8, 8)
    table = torch.arange(8, dtype=torch.int32).expand(2, 8)
    reference_decode(q, cache, block_table=table, cache_seqlens=torch.tensor([35, 0], dtype=torch.int32))
    assert unpacked == [16, 16, 3]  # once for all queries of a sequence
    unpacked.clear()
    indices = torch.tensor([[[-1, 5, 99], [64, 63, 0], [-1, -1, -1]]] * 2, dtype=torch.int32)
    reference_decode(q, cache, indices=indices)
    assert unpacked == [1, 2] * 2


def test_outputs_carry_no_gradient():
    q, cache = random_case(12, 1, 1, 1, 1, 2)
    out, lse = reference_decode(q.float().requires_grad_(), cache, indices=torch.zeros(1, 1, 1, dtype=torch.int32))
    assert not out.requires_grad and not lse.requires_grad


GOOD_Q, GOOD_CACHE = torch.zeros(2, 1, 3, 576, dtype=torch.bfloat16), torch.zeros(2, 4, 656, dtype=torch.uint8)
INDICES = torch.zeros(2, 1, 5, dtype=torch.int32)
TABLE, SEQLENS = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({}, ValueError, "got none of them; needs indices"),
        ({"block_table": TABLE}, ValueError, "got block_table; needs"),
        ({"cache_seqlens": SEQLENS}, ValueError, "got cache_seqlens; needs"),
        ({"topk_length": SEQLENS}, ValueError, "got topk_length; needs"),
        (
            {"indices": INDICES, "block_table": TABLE, "cache_seqlens": SEQLENS},
            ValueError,
            "got indices and block_table and cache_seqlens; needs",
        ),
        ({"indices": INDICES, "cache_seqlens": SEQLENS}, ValueError, "got indices and cache_seqlens; needs"),
        (
            {"topk_length": SEQLENS, "block_table": TABLE, "cache_seqlens": SEQLENS},
            ValueError,
            "got topk_length and block_table and cache_seqlens; needs",
        ),
        ({"indices": INDICES[0]}, ValueError, r"indices: got \(1, 5\) int32 on cpu; needs shape \(2, 1, any\)"),
        ({"indices": INDICES.float()}, TypeError, "indices: got .*float32"),
        ({"indices": [0]}, TypeError, r"indices: got \[0\]"),
        ({"indices": INDICES, "topk_length": SEQLENS[:1]}, ValueError, r"topk_length: got \(1,\).*\(2,\)"),
        ({"indices": INDICES, "topk_length": TABLE}, ValueError, r"topk_length: got \(2, 3\).*\(2, 1\)"),
        ({"indices": INDICES, "topk_length": SEQLENS.bool()}, TypeError, "topk_length: got .*bool"),
        ({"block_table": TABLE[:1], "cache_seqlens": SEQLENS}, ValueError, r"block_table: got \(1, 3\)"),
        ({"block_table": TABLE.double(), "cache_seqlens": SEQLENS}, TypeError, "block_table: got .*float64"),
        ({"block_table": TABLE, "cache_seqlens": TABLE}, ValueError, r"cache_seqlens: got \(2, 3\)"),
        ({"indices": INDICES, "s_aux": torch.zeros(2)}, ValueError, r"s_aux: got \(2,\).*\(3,\)"),
        ({"indices": INDICES, "s_aux": SEQLENS}, TypeError, "s_aux: got .*int32"),
        ({"indices": INDICES, "dtype": torch.bfloat16}, TypeError, "dtype: got torch.bfloat16; needs"),
        ({"indices": INDICES, "q": GOOD_Q[0]}, ValueError, r"q: got \(1, 3, 576\)"),
        ({"indices": INDICES, "q": GOOD_Q[..., :544]}, ValueError, r"q: got \(2, 1, 3, 544\)"),
        ({"indices": INDICES, "q": GOOD_Q[:, :, :0]}, ValueError, r"q: got \(2, 1, 0, 576\)"),
        ({"indices": INDICES, "q": GOOD_Q.int()}, TypeError, "q: got .*int32"),
        ({"indices": INDICES, "kv_cache": GOOD_CACHE[0]}, ValueError, r"kv_cache: got \(4, 656\)"),
        ({"indices": INDICES, "kv_cache": GOOD_CACHE.to("meta")}, ValueError, "kv_cache: got .*meta; needs .*cpu"),
        ({"indices": INDICES.to("meta")}, ValueError, "indices: got .*meta; needs .*cpu"),
        ({"indices": INDICES, "s_aux": torch.zeros(3, device="meta")}, ValueError, "s_aux: got .*meta; needs .*cpu"),
    ],
)
def test_refusals(change, error, message):
    arguments = {"q": GOOD_Q, "kv_cache": GOOD_CACHE, **change}
    with pytest.raises(error, match=message):
        reference_decode(**arguments)
