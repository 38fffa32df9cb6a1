"""FlashAttention's interface agrees with torch's attention and with our operators, and names what it refuses."""

import inspect
from typing import Any

import pytest
import torch

from cute_kernels import gqa_decode, sink_attention
from cute_kernels.compat import flash_attn
from cute_kernels.compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from tests.kit.kernel_place import printed

B, H_Q, H_KV, D, S_K = 3, 8, 2, 64, 40
LENGTHS = (40, 17, 5)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    left: int = -1,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 attention of one sequence, (s, h, d) each, with the mask of FlashAttention's documentation."""
    ratio = q.shape[1] // k.shape[1]
    q, k, v = (t.double().transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(ratio, 0) for t in (k, v))
    s_q, s_k = q.shape[1], k.shape[1]
    i, j = torch.arange(s_q).unsqueeze(1) + s_k - s_q, torch.arange(s_k)
    seen = torch.ones(s_q, s_k, dtype=torch.bool)
    if causal:
        seen &= j <= i
    if left >= 0:
        seen &= j >= i - left
    scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.double().unsqueeze(1))
    weights = torch.where(seen.any(-1)[:, None], (scores - lse.unsqueeze(-1)).exp(), 0.0)
    return (weights @ v).transpose(0, 1), lse  # (s_q, h, d), (h, s_q)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=2**-8)


def exact(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=2e-5)


# ---- flash_attn_func


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("s_q", [1, 5, 20])
def test_a_batch_is_what_torch_computes(s_q: int, causal: bool) -> None:
    q, k, v = draw(B, s_q, H_Q, D), draw(B, S_K, H_KV, D), draw(B, S_K, H_KV, D)
    out, lse = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    mask = torch.ones(s_q, S_K, dtype=torch.bool).tril(S_K - s_q) if causal else None
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2).double() for t in (q, k, v)), attn_mask=mask, enable_gqa=True
    )
    close(out, expected.transpose(1, 2))
    assert out.dtype is torch.bfloat16 and lse.shape == (B, H_Q, s_q) and lse.dtype is torch.float32
    assert torch.equal(flash_attn_func(q, k, v, causal=causal), out)
    for i in range(B):
        exact(lse[i], oracle(q[i], k[i], v[i], causal=causal)[1])


@pytest.mark.parametrize("window_size, causal, left", [((7, 0), False, 7), ((7, -1), True, 7), ((3, 9), True, 3)])
@pytest.mark.parametrize("s_q", [4, 20])
def test_windows_count_from_the_token_before(window_size: tuple[int, int], causal: bool, left: int, s_q: int) -> None:
    q, k, v, sinks = draw(B, s_q, H_Q, D), draw(B, S_K, H_KV, D), draw(B, S_K, H_KV, D), draw(H_Q)
    out = flash_attn_func(q, k, v, None, causal, window_size=window_size, s_aux=sinks)
    for i in range(B):
        close(out[i], oracle(q[i], k[i], v[i], causal=True, left=left, sinks=sinks.float())[0])


def test_a_left_limit_alone_shows_later_tokens() -> None:
    q, k, v = draw(1, 20, H_Q, D), draw(1, S_K, H_KV, D), draw(1, S_K, H_KV, D)
    close(flash_attn_func(q, k, v, window_size=(4, -1))[0], oracle(q[0], k[0], v[0], left=4)[0])


@pytest.mark.parametrize("d", [64, 256])
def test_softcap_and_wide_heads_with_few_queries(d: int) -> None:
    q, k, v = 3 * draw(B, 4, H_Q, d), draw(B, S_K, H_KV, d), draw(B, S_K, H_KV, d)
    sinks = draw(H_Q)
    out, lse = flash_attn_func(q, k, v, causal=True, softcap=2.0, return_softmax_lse=True, learnable_sink=sinks)
    for i in range(B):
        expected, expected_lse = oracle(q[i], k[i], v[i], causal=True, softcap=2.0, sinks=sinks.float())
        close(out[i], expected)
        exact(lse[i], expected_lse)


def test_gradients_are_those_of_sink_attention() -> None:
    tensors = [draw(2, 12, H_Q, D), draw(2, 12, H_KV, D), draw(2, 12, H_KV, D), torch.randn(H_Q)]
    gradients = []
    out: Any
    for through_flash in (True, False):
        q, k, v, sinks = (t.clone().requires_grad_() for t in tensors)
        if through_flash:
            out = flash_attn_func(q, k, v, causal=True, window_size=(4, 0), s_aux=sinks)
        else:
            out = sink_attention(q, k, v, sinks, window=5)
        out.float().square().sum().backward()
        gradients.append([q.grad, k.grad, v.grad, sinks.grad])
    for found, expected in zip(*gradients, strict=True):
        assert torch.equal(found, expected) and expected.abs().sum() > 0


# ---- flash_attn_varlen_func


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("left", [-1, 6])
def test_packed_sequences(left: int, with_sinks: bool) -> None:
    q_lengths = (12, 1, 5)
    q, k, v = draw(sum(q_lengths), H_Q, D), draw(sum(LENGTHS), H_KV, D), draw(sum(LENGTHS), H_KV, D)
    cu_q, cu_k = (torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32) for n in (q_lengths, LENGTHS))
    out, sinks = torch.empty_like(q), draw(H_Q) if with_sinks else None
    result, lse = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, max(q_lengths), max(LENGTHS), causal=True, window_size=[left, -1], out=out,
        return_softmax_lse=True, s_aux=sinks,
    )  # fmt: skip
    assert result is out and lse.shape == (H_Q, q.shape[0])
    for i in range(B):
        rows, keys = slice(*cu_q[i : i + 2]), slice(*cu_k[i : i + 2])
        expected, expected_lse = oracle(q[rows], k[keys], v[keys], causal=True, left=left, sinks=sinks)
        close(out[rows], expected)
        exact(lse[:, rows], expected_lse)


def test_padded_rows_of_packed_queries() -> None:
    """For its graphs, transformers pads steps with empty sequences, then with rows that belong to no sequence."""
    q, k, v = draw(6, H_Q, D), draw(9, H_KV, D), draw(9, H_KV, D)
    cu = torch.tensor([0, 3, 6, 6, 6], dtype=torch.int32)
    longer = [torch.cat([t, torch.full((2, *t.shape[1:]), torch.nan).to(t.dtype)]) for t in (q, k, v)]
    found: Any = flash_attn_varlen_func(*longer, cu, cu, 3, 3, causal=True)
    expected: Any = flash_attn_varlen_func(q, k[:6], v[:6], cu, cu, causal=True)
    assert torch.equal(found[:6], expected) and (found[6:] == 0).all()
    leaves = [t.requires_grad_() for t in longer]
    out: Any = flash_attn_varlen_func(*leaves, cu, cu, 3, 3, causal=True)
    for grad in torch.autograd.grad(out[:6].float().square().sum(), leaves):
        assert grad[:6].isfinite().all() and (grad[:6] != 0).any() and (grad[6:] == 0).all()


@pytest.mark.parametrize("longest", [torch.tensor(3), torch.tensor(3).numpy(), None])
def test_a_longest_length_of_any_kind(longest: Any) -> None:
    """If only positions mark where sequences begin, transformers computes it from `cu_seqlens` as a tensor."""
    q, k, v = draw(6, H_Q, D), draw(6, H_KV, D), draw(6, H_KV, D)
    cu = torch.tensor([0, 3, 6], dtype=torch.int32)
    expected = flash_attn_varlen_func(q, k, v, cu, cu, 3, 3, causal=True)
    assert torch.equal(flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=True), expected)


def test_parts_merge_by_their_log_sum_exps() -> None:
    """In cascade attention one part takes the sink, and its log-sum-exp carries the sink into the merge."""
    q, k, v, sinks = draw(1, 4, H_Q, D), draw(1, S_K, H_KV, D), draw(1, S_K, H_KV, D), draw(H_Q)
    parts = [
        flash_attn_func(q, k[:, :9], v[:, :9], return_softmax_lse=True, s_aux=sinks),
        flash_attn_func(q, k[:, 9:], v[:, 9:], return_softmax_lse=True),
    ]
    weights = torch.stack([lse.transpose(1, 2) for _, lse in parts]).softmax(0).unsqueeze(-1)
    merged = sum(weight * out for weight, (out, _) in zip(weights, parts, strict=True))
    assert isinstance(merged, torch.Tensor)
    torch.testing.assert_close(merged[0].double(), oracle(q[0], k[0], v[0], sinks=sinks)[0], rtol=2**-7, atol=2**-7)
    empty = flash_attn_func(q, k[:, :0], v[:, :0], return_softmax_lse=True, s_aux=sinks)
    assert not empty[0].any() and torch.equal(empty[1][0], sinks.float().unsqueeze(1).expand(-1, 4))


def paged(k: torch.Tensor, v: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Caches (batch, s, h, d) as pages in random order, and their block table."""
    per_sequence = -(-k.shape[1] // page_size)
    table = torch.randperm(k.shape[0] * per_sequence).view(k.shape[0], per_sequence).int()
    pages = []
    for cache in (k, v):
        padded = torch.nn.functional.pad(cache, (0, 0, 0, 0, 0, per_sequence * page_size - cache.shape[1]))
        page = torch.empty(table.numel(), page_size, *cache.shape[2:], dtype=cache.dtype)
        page[table.long()] = padded.unflatten(1, (per_sequence, page_size))
        pages.append(page)
    return pages[0], pages[1], table


@pytest.mark.parametrize("name", ["block_table", "page_table"])
@pytest.mark.parametrize("s_q", [1, 4])
def test_packed_decoding_over_pages(s_q: int, name: str) -> None:
    q, k, v, sinks = draw(B * s_q, H_Q, D), draw(B, S_K, H_KV, D), draw(B, S_K, H_KV, D), draw(H_Q)
    k_pages, v_pages, table = paged(k, v, 16)
    cu_q = torch.arange(0, B * s_q + 1, s_q, dtype=torch.int32)
    tables: dict[str, Any] = {name: table}
    out, lse = flash_attn_varlen_func(
        q, k_pages, v_pages, cu_q, max_seqlen_q=s_q, max_seqlen_k=S_K, seqused_k=torch.tensor(LENGTHS).int(),
        causal=True, window_size=(9, -1), s_aux=sinks, softcap=5.0, return_softmax_lse=True, **tables,
    )  # fmt: skip
    assert out.shape == q.shape and lse.shape == (H_Q, B * s_q)
    for i, length in enumerate(LENGTHS):
        rows = slice(i * s_q, i * s_q + s_q)
        expected, expected_lse = oracle(
            q[rows], k[i, :length], v[i, :length], causal=True, left=9, sinks=sinks.float(), softcap=5.0
        )
        close(out[rows], expected)
        exact(lse[:, rows], expected_lse)


# ---- flash_attn_with_kvcache


@pytest.mark.parametrize("pages", [None, 8])
@pytest.mark.parametrize("s_q", [1, 3])
def test_decoding_over_a_cache(s_q: int, pages: int | None) -> None:
    q, k, v = draw(B, s_q, H_Q, D), draw(B, S_K, H_KV, D), draw(B, S_K, H_KV, D)
    caches: tuple[Any, ...] = (k, v, None) if pages is None else paged(k, v, pages)
    for splits in (0, 2):
        out, lse = flash_attn_with_kvcache(
            q, *caches[:2], cache_seqlens=torch.tensor(LENGTHS).int(), page_table=caches[2], causal=True,
            num_splits=splits, return_softmax_lse=True,
        )  # fmt: skip
        assert lse.shape == (B, H_Q, s_q)
        for i, length in enumerate(LENGTHS):
            expected, expected_lse = oracle(q[i], k[i, :length], v[i, :length], causal=True)
            close(out[i], expected)
            exact(lse[i], expected_lse)


def test_lengths_may_be_a_number_or_all_of_the_cache() -> None:
    q, k, v = draw(B, 1, H_Q, D), draw(B, S_K, H_KV, D), draw(B, S_K, H_KV, D)
    short = flash_attn_with_kvcache(q, k[:, :9], v[:, :9])
    assert torch.equal(flash_attn_with_kvcache(q, k, v, cache_seqlens=9), short)
    close(short[0], oracle(q[0], k[0, :9], v[0, :9])[0])
    out = torch.empty_like(q)
    assert flash_attn_with_kvcache(q, k, v, cache_seqlens=9, out=out) is out and torch.equal(out, short)


def test_alibi_falls_with_the_distance() -> None:
    q, k, v, slopes = draw(B, 2, H_Q, D), draw(B, S_K, H_KV, D), draw(B, S_K, H_KV, D), torch.rand(H_Q)
    out = flash_attn_with_kvcache(q, k, v, causal=True, alibi_slopes=slopes)
    position = torch.arange(S_K - 2, S_K).unsqueeze(1)
    bias = -slopes.double()[:, None, None] * (position - torch.arange(S_K)).abs()
    bias = bias.masked_fill(torch.arange(S_K) > position, -torch.inf)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2).double() for t in (q, k, v)), attn_mask=bias.expand(B, -1, -1, -1), enable_gqa=True
    )
    close(out, expected.transpose(1, 2))


@pytest.mark.parametrize("pages", [None, 16])
def test_new_tokens_are_stored_and_seen(pages: int | None) -> None:
    q, k, v = draw(B, 2, H_Q, D), draw(B, S_K, H_KV, D), draw(B, S_K, H_KV, D)
    new_k, new_v = draw(B, 2, H_KV, D), draw(B, 2, H_KV, D)
    lengths = torch.tensor([38, 15, 0]).int()
    k_cache, v_cache, table = (k.clone(), v.clone(), None) if pages is None else paged(k, v, pages)
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, new_k, new_v, cache_seqlens=lengths, block_table=table, causal=True
    )
    assert lengths.tolist() == [38, 15, 0]
    for i, length in enumerate(lengths.tolist()):
        keys, values = torch.cat([k[i, :length], new_k[i]]), torch.cat([v[i, :length], new_v[i]])
        close(out[i], oracle(q[i], keys, values, causal=True)[0])
        stored = k_cache[i] if table is None else k_cache[table[i].long()].flatten(0, 1)
        assert torch.equal(stored[: length + 2], keys)
        assert torch.equal(stored[length + 2 : S_K], k[i, length + 2 :]), "another slot was written"


@pytest.mark.parametrize("pages", [None, 4])
@pytest.mark.parametrize("length, same", [(-5, 0), (-(2**31), 0), (9, 8), (2**31 - 2, 8), (2**31 - 1, 8)])
def test_any_length_counts_as_one_of_the_cache(length: int, same: int, pages: int | None) -> None:
    """Tokens are stored after 0 tokens or dropped, and queries see the clamped length."""
    q, k, v, new = draw(B, 2, H_Q, D), draw(B, 8, H_KV, D), draw(B, 8, H_KV, D), draw(B, 2, H_KV, D)
    found = []
    for n in (length, same):
        for lengths in (torch.full((B,), n, dtype=torch.int32), n):
            k_cache, v_cache, table = (k.clone(), v.clone(), None) if pages is None else paged(k, v, pages)
            out = flash_attn_with_kvcache(
                q, k_cache, v_cache, new, new, cache_seqlens=lengths, block_table=table, causal=True
            )
            stored = k_cache if table is None else k_cache[table.long()].flatten(1, 2)
            found.append((out, stored[:, :8]))
    keys = torch.cat([new, k[:, 2:]], 1) if same == 0 else k
    for out, stored in found:
        assert torch.equal(out, found[-1][0]) and torch.equal(stored, keys)


def test_a_number_beyond_int32_is_no_length() -> None:
    q, k = draw(B, 2, H_Q, D), draw(B, 8, H_KV, D)
    for length in (2**40, -(2**40)):
        with pytest.raises(ValueError, match=f"cache_seqlens: got {length}; needs -2147483648 to 2147483647"):
            flash_attn_with_kvcache(q, k, k, cache_seqlens=length)
    assert torch.equal(*(flash_attn_with_kvcache(q, k, k, cache_seqlens=n) for n in (2**31 - 1, 8)))


def test_a_token_without_room_is_dropped() -> None:
    """Sequences are full, full up to one token, have a length below 0, or a page that does not exist."""
    k, v = draw(4, 8, H_KV, D), draw(4, 8, H_KV, D)
    new = draw(4, 2, H_KV, D)
    k_cache, v_cache = k.clone(), v.clone()
    flash_attn_with_kvcache(
        draw(4, 1, H_Q, D), k_cache, v_cache, new, new, cache_seqlens=torch.tensor([7, 8, -3, 2]).int()
    )
    expected = k.clone()
    expected[0, 7], expected[2, :2], expected[3, 2:4] = new[0, 0], new[2], new[3]
    assert torch.equal(k_cache, expected)
    pages, values = k.clone(), v.clone()
    table = torch.tensor([[-1], [3], [9], [0]], dtype=torch.int32)
    lengths = torch.tensor([0, 7, 0, 1]).int()
    flash_attn_with_kvcache(draw(4, 1, H_Q, D), pages, values, new, new, cache_seqlens=lengths, block_table=table)
    expected = k.clone()
    expected[3, 7], expected[0, 1:3] = new[1, 0], new[3]
    assert torch.equal(pages, expected)
    pages = k.clone()
    full = torch.full((4,), 8, dtype=torch.int32)
    flash_attn_with_kvcache(draw(4, 1, H_Q, D), pages, v.clone(), new, new, cache_seqlens=full)
    assert torch.equal(pages, k)


def test_a_sequence_without_keys_has_output_0() -> None:
    q, k = draw(1, 1, H_Q, D), draw(1, 8, H_KV, D)
    out, lse = flash_attn_with_kvcache(q, k, k, cache_seqlens=0, return_softmax_lse=True)
    assert not out.any() and (lse == -torch.inf).all()


# ---- refusals


T = torch.ones(1)
CACHE: dict[str, Any] = {
    "qv": T, "rotary_cos": T, "rotary_sin": T, "rotary_seqlens": T, "cache_batch_idx": T, "cache_leftpad": T,
    "cu_seqlens_k_new": T, "q_descale": T, "k_descale": T, "v_descale": T, "attention_chunk": 4, "sm_margin": 2,
    "window_size": (-1, 3), "alibi_slopes": torch.ones(H_Q),
}  # fmt: skip
BATCH: dict[str, Any] = {
    "qv": T, "q_descale": T, "k_descale": T, "v_descale": T, "attention_chunk": 4, "sm_margin": 2, "dropout_p": 0.1,
    "window_size": (4, 3), "softcap": 30.0, "alibi_slopes": torch.ones(H_Q),
}  # fmt: skip
PACKED = BATCH | {"seqused_q": T, "seqused_k": T, "q_v": T}
NOT_READ = {"scheduler_metadata", "pack_gqa", "fa_version", "rotary_interleaved", "max_seqlen_k"}
HONOURED = {
    "q", "k", "v", "k_cache", "v_cache", "cache_seqlens", "page_table", "block_table", "cu_seqlens_q", "cu_seqlens_k",
    "max_seqlen_q", "softmax_scale", "causal", "num_splits", "return_softmax_lse", "return_attn_probs", "s_aux",
    "learnable_sink", "out", "deterministic", "softcap",
}  # fmt: skip


KV, CU = torch.zeros(B, S_K, H_KV, D).bfloat16(), torch.tensor([0, 9], dtype=torch.int32)
KINDS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "cache": (flash_attn_with_kvcache, (torch.zeros(B, 2, H_Q, D).bfloat16(), KV, KV), CACHE),
    "batch": (flash_attn_func, (torch.zeros(B, 9, H_Q, D).bfloat16(), KV, KV), BATCH),
    "packed": (
        flash_attn_varlen_func, (torch.zeros(9, H_Q, D).bfloat16(), KV[0, :9], KV[0, :9], CU, CU, 9, 9), PACKED
    ),
}  # fmt: skip
"""Functions, a valid call of each, and arguments that they refuse."""


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, (*_, refused) in KINDS.items() for name in refused])
def test_what_is_not_computed_is_refused_by_name(kind: str, name: str) -> None:
    function, arguments, refused = KINDS[kind]
    with pytest.raises(NotImplementedError, match=f"^{name}: got .*; needs "):
        function(*arguments, **{name: refused[name]})


@pytest.mark.parametrize("kind", KINDS)
def test_every_argument_is_honoured_or_refused(kind: str) -> None:
    function, arguments, refused = KINDS[kind]
    function(*arguments)
    assert set(inspect.signature(function).parameters) <= {*refused} | HONOURED | NOT_READ


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"max_seqlen_q": 9}, "cu_seqlens_q: got 3 sequences of up to 9 with 6 query tokens"),
        ({"cu_seqlens_k": torch.zeros(4).int()}, "cu_seqlens_k: got a tensor with a block_table"),
        ({"max_seqlen_q": 9, "q": draw(27, H_Q, D)}, "max_seqlen_q: got 9"),
    ],
)
def test_pages_are_decoded_alone(changes: dict[str, Any], words: str) -> None:
    k, v, table = paged(draw(B, S_K, H_KV, D), draw(B, S_K, H_KV, D), 16)
    call = {"q": draw(6, H_Q, D), "max_seqlen_q": 2, "seqused_k": torch.tensor(LENGTHS).int()} | changes
    with pytest.raises(NotImplementedError, match=words):
        flash_attn_varlen_func(k=k, v=v, cu_seqlens_q=torch.arange(4).int(), block_table=table, **call)


def test_what_is_wrong_is_a_value_error() -> None:
    q, k, cu = draw(B, 1, H_Q, D), draw(B, S_K, H_KV, D), torch.tensor([0, B]).int()
    with pytest.raises(ValueError, match="softmax_scale: got 0"):
        flash_attn_func(q, k, k, 0.0)
    with pytest.raises(ValueError, match="s_aux, learnable_sink: got both"):
        flash_attn_func(q, k, k, s_aux=draw(H_Q), learnable_sink=draw(H_Q))
    with pytest.raises(ValueError, match="^v: got None"):
        flash_attn_with_kvcache(q, k, k, draw(B, 1, H_KV, D), cache_seqlens=3)
    with pytest.raises(ValueError, match="cache_seqlens: got None with k and v"):
        flash_attn_with_kvcache(q, k, k, draw(B, 1, H_KV, D), draw(B, 1, H_KV, D))
    with pytest.raises(ValueError, match="s_q = 9"):
        flash_attn_with_kvcache(draw(B, 9, H_Q, D), k, k)
    with pytest.raises(ValueError, match="page size 40"):
        flash_attn_with_kvcache(q, k, k, cache_seqlens=3, block_table=torch.zeros(B, 1).int())
    with pytest.raises(ValueError, match="cu_seqlens_k: got None; needs a tensor"):
        flash_attn_varlen_func(q[:, 0], k[:, 0], k[:, 0], cu)
    with pytest.raises(ValueError, match="seqused_k: got None with a block_table"):
        flash_attn_varlen_func(q[:, 0], k, k, cu, max_seqlen_q=1, block_table=torch.zeros(B, 1).int())


def test_what_is_not_looked_at_changes_nothing() -> None:
    q, k, v = draw(B, 1, H_Q, D), draw(B, S_K, H_KV, D), draw(B, S_K, H_KV, D)
    planned: Any = flash_attn.get_scheduler_metadata
    metadata = planned(B, 1, S_K, H_Q, H_KV, D, cache_seqlens=torch.zeros(B))
    found = flash_attn_with_kvcache(q, k, v, scheduler_metadata=metadata, pack_gqa=True, fa_version=3)
    assert torch.equal(found, gqa_decode(q, k, v, layout="BSNH"))


def test_importing_it_loads_no_kernel() -> None:
    code = "import sys, cute_kernels.compat.flash_attn; print([m for m in sys.modules if m.endswith('.op')])"
    assert printed(code).strip() == "[]"


NEW: dict[str, tuple[str, dict[str, Any]]] = {
    "k of one head": ("k", {"k": torch.ones(2, 2, 1, 64).bfloat16()}),
    "k of another width": ("k", {"k": torch.ones(2, 2, 2, 1).bfloat16()}),
    "k of one sequence": ("k", {"k": torch.ones(1, 2, 2, 64).bfloat16()}),
    "k of float32": ("k", {"k": torch.ones(2, 2, 2, 64)}),
    "v of fewer tokens": ("v", {"v": torch.ones(2, 1, 2, 64).bfloat16()}),
    "k that requires gradients": ("k", {"k": torch.ones(2, 2, 2, 64).bfloat16().requires_grad_()}),
    "a shorter v_cache": ("v_cache", {"v_cache": torch.zeros(2, 47, 2, 64).bfloat16()}),
    "caches of fewer sequences": (
        "k_cache",
        {name: torch.zeros(1, 48, 2, 64).bfloat16() for name in ("k_cache", "v_cache")},
    ),
    "nine queries": ("q", {"q": torch.ones(2, 9, 8, 64).bfloat16()}),
    "lengths of int64": ("cache_seqlens", {"cache_seqlens": torch.tensor([3, 3])}),
    "one tensor as both caches": (
        "k_cache",
        dict.fromkeys(("k_cache", "v_cache"), torch.zeros(2, 48, 2, 64).bfloat16()),
    ),
    "an expanded v_cache": ("v_cache", {"v_cache": torch.zeros(1, 48, 2, 64).bfloat16().expand(2, -1, -1, -1)}),
    "causal no flag": ("causal", {"causal": "no"}),
    "a huge length": ("cache_seqlens", {"cache_seqlens": 2**40}),
    "a window of strings": ("window_size", {"window_size": ("3", "0")}),
    "a negative softcap": ("softcap", {"softcap": -1.0}),
    "a window of one number": ("window_size", {"window_size": 3}),
    "alibi that is not causal": ("alibi_slopes", {"alibi_slopes": torch.ones(8), "causal": False}),
}


@pytest.mark.parametrize("name", NEW)
def test_nothing_is_stored_by_a_call_that_is_refused(name: str) -> None:
    argument, changes = NEW[name]
    caches = [torch.zeros(2, 48, 2, 64).bfloat16() for _ in range(2)]
    new = [torch.ones(2, 2, 2, 64).bfloat16() for _ in range(2)]
    call = {"q": torch.ones(2, 2, 8, 64).bfloat16(), "k_cache": caches[0], "v_cache": caches[1], "k": new[0],
            "v": new[1], "cache_seqlens": torch.tensor([3, 3], dtype=torch.int32), "causal": True}  # fmt: skip
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=f"^{argument}: got "):
        flash_attn_with_kvcache(**{**call, **changes})
    assert not any(cache.any() or cache.requires_grad for cache in caches)
    flash_attn_with_kvcache(**call)
    assert all(cache[:, 3:5].all() for cache in caches)


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (torch.empty(4, 3, 8, 64).bfloat16(), ""),
        (torch.empty(2, 3, 8, 64), ""),
        (torch.empty(1, 3, 8, 64).bfloat16().expand(2, -1, -1, -1), "strides .* elements share memory; needs"),
    ],
    ids=["shape", "dtype", "overlap"],
)
def test_an_out_that_does_not_fit_is_refused(out: torch.Tensor, words: str) -> None:
    q, k = torch.ones(2, 3, 8, 64).bfloat16(), torch.ones(2, 3, 2, 64).bfloat16()
    with pytest.raises((TypeError, ValueError), match=f"^out: got {words}"):
        flash_attn_func(q, k, k, out=out)
