"""NaN and infinities where no query looks: decoding tolerates them in every slot, `sink_attention` in some.

Several queries of a sequence share tiles of keys. For a query that does not see a key that others see, its weight is 0,
and 0 x NaN is NaN.
"""

import dataclasses
import math
from typing import Any

import pytest
import torch

from cute_kernels import gqa_decode, mla_fp8_decode, sink_attention
from cute_kernels.gqa.launch import decode_spec
from cute_kernels.gqa.layouts import LAYOUTS
from cute_kernels.gqa.request import DECODE
from cute_kernels.gqa.spec import CLUSTERS, GqaDecodeSpec
from fp8_mla import QK_DIM, ROPE_OFFSET, SCALE_OFFSET, TOKEN_BYTES, reference_decode
from tests.kit.gqa_cases import GqaExpectation, gqa_case
from tests.kit.mla_cases import generator, latent_tokens
from tests.kit.sink_cases import SinkCase, sink_case

LENGTHS = (130, 200, 16, 129)
CACHES: dict[str, dict[str, Any]] = {
    "bf16": {"kv_dtype": "bf16"},
    "fp16, 256": {"kv_dtype": "fp16", "q_dtype": torch.float16, "d": 256, "layout": "paged_vllm", "page_size": 32},
    "bf16 pages": {"kv_dtype": "bf16", "d": 64, "h_q": 16, "layout": "paged_NHD", "page_size": 1},
    "fp8 per head": {"kv_dtype": "fp8", "k_scales": "per_head", "v_scales": "per_head"},
    "fp8 per token": {
        "kv_dtype": "fp8", "q_dtype": torch.float16, "scale_dtype": torch.float16, "d": 256, "layout": "paged_vllm",
        "page_size": 16,
    },
    "int8 per token": {"scale_dtype": torch.float16},
    "int8 per group": {"scale_dtype": torch.float16, "k_scales": "per_group_32", "v_scales": "per_group_32"},
}  # fmt: skip


def gqa(name: str, s_q: int = 2, device: str = "cuda", **options: Any) -> Any:
    """A case with one of the kinds of codes above, and one or two KV heads."""
    settings: dict[str, Any] = {"seqlens": LENGTHS, "h_q": 4, "h_kv": 2, "layout": "BNSH", **CACHES[name], **options}
    return gqa_case(**settings, s_q=s_q, device=device)


def kernel_specs() -> list[GqaDecodeSpec]:
    """Kernels of this file. Most ship, except those with clusters or with more columns."""
    specs: dict[GqaDecodeSpec, None] = {}
    for name in CACHES:
        for s_q in (2, 5):
            spec = decode_spec(DECODE.request(**gqa(name, s_q, device="cpu").arguments(), num_splits=1))
            specs |= {spec: None}
            if spec.warps == 8:
                specs |= {dataclasses.replace(spec, cluster=CLUSTERS[0]): None}
    return list(specs)


def place_of(case: Any, sequence: int, position: int) -> tuple[int, int]:
    if case.block_table is None:
        return sequence, position
    layout = LAYOUTS[case.layout]
    size = case.v_cache.shape[layout.value.index(layout.rows)]
    return int(case.block_table[sequence, position // size]), position % size


def token_of(case: Any, name: str, sequence: int, position: int) -> torch.Tensor:
    """A view of all numbers of a token, in a cache or in token scales."""
    tensor = getattr(case, name)
    outer, row = place_of(case, sequence, position)
    layout = LAYOUTS[case.layout]
    axes = {"k_cache": layout.key, "v_cache": layout.value}.get(name) or {
        2: layout.scale_axes("per_token"),
        3: layout.scale_axes("per_token_head"),
        4: layout.scale_axes("per_group"),
    }[tensor.dim()]
    places: dict[str, int] = {layout.outer: outer, layout.rows: row}
    return tensor[tuple(places.get(axis, slice(None)) for axis in axes)]


def poison(case: Any, name: str, positions: list[int], value: float) -> Any:
    """The case with other numbers at some positions of every sequence; negative positions count from its end."""
    tensor = getattr(case, name).clone(memory_format=torch.preserve_format)
    case = dataclasses.replace(case, **{name: tensor})
    for sequence, length in enumerate(case.cache_seqlens.tolist()):
        for position in positions:
            token_index = position + length if position < 0 else position
            token = token_of(case, name, sequence, token_index)
            if token.dtype == torch.float8_e4m3fn:
                token.view(torch.uint8)[..., ::3] = 0x7F if token_index % 2 else 0xFF
            else:
                token[..., ::3] = value
    return case


def hold(case: Any, clean: Any, unharmed: list[int]) -> None:
    """Checks a case against the oracle. Queries that do not look there must have the bits of the clean case.

    This needs the scores of the clean case: a warp moves the maxima of all queries if the maximum of one grows far.
    """
    same_scores = case.k_cache is clean.k_cache and case.k_scale is clean.k_scale
    expectation = GqaExpectation.of(case)
    assert expectation.out.isnan().any(), "nothing of it is seen"
    for splits in (None, 1, 3):
        out, lse = case.outputs(padded=True)
        gqa_decode(**case.arguments(), num_splits=splits, out=out.tensor, lse=lse.tensor)
        expectation.check(out.tensor, lse.tensor, name=f"num_splits {splits}").require()
        assert out.tensor[:, unharmed].isfinite().all()
        if same_scores:
            clean_results: Any = gqa_decode(**clean.arguments(), num_splits=splits, return_lse=True)
            for got, want in zip((out.tensor, lse.tensor), clean_results, strict=True):
                assert torch.equal(got[:, unharmed], want[:, unharmed])


def names_of(case: Any) -> list[str]:
    """Names of tensors that can hold a NaN: caches of floating-point codes, and token scales."""
    names = [] if case.k_cache.dtype == torch.int8 else ["k_cache", "v_cache"]
    return names + [name for name in ("k_scale", "v_scale") if getattr(case, name) is not None and
                    getattr(case, name).dim() > 1]  # fmt: skip


@pytest.mark.parametrize("s_q", [2, 5])
@pytest.mark.parametrize("name", CACHES)
def test_tokens_after_a_query(name, s_q):
    """Only the last query sees the last token; the last two see the token before it."""
    clean = gqa(name, s_q)
    for part in names_of(clean):
        hold(poison(clean, part, [-1], math.nan), clean, list(range(s_q - 1)))
        hold(poison(clean, part, [-1, -2], math.nan), clean, list(range(s_q - 2)))


@pytest.mark.parametrize("s_q", [2, 5])
@pytest.mark.parametrize("name", CACHES)
def test_tokens_before_the_window_of_a_query(name, s_q):
    """Only the first query sees the first token of all windows."""
    window = 9
    clean = gqa(name, s_q, window=window)
    for part in names_of(clean):
        hold(poison(clean, part, [1 - s_q - window], math.nan), clean, list(range(1, s_q)))
        both = poison(poison(clean, part, [1 - s_q - window], math.nan), part, [-1], math.nan)
        hold(both, clean, list(range(1, s_q - 1)))


@pytest.mark.parametrize("name", CACHES)
def test_infinities_after_a_query(name):
    """A query that sees an infinity may return NaN for it; other queries are not affected."""
    s_q = 5
    clean = gqa(name, s_q)
    for part in names_of(clean):
        if getattr(clean, part).dtype == torch.float8_e4m3fn:
            continue
        for value in (math.inf, -math.inf):
            case = poison(clean, part, [-1], value)
            for splits in (None, 1, 3):
                out: Any = gqa_decode(**case.arguments(), num_splits=splits)
                want: Any = gqa_decode(**clean.arguments(), num_splits=splits)
                if part.startswith("v"):
                    assert torch.equal(out[:, :-1], want[:, :-1])
                    assert not out[:, -1].isfinite().all()
                torch.testing.assert_close(out[:, :-1], want[:, :-1], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", CACHES)
def test_a_nan_that_all_queries_see(name):
    """The NaN is in the middle, in the first tile, or in a call that is not causal."""
    for causal, position in ((True, 3), (True, -9), (False, -1)):
        clean = gqa(name, 5, causal=causal)
        for part in names_of(clean):
            hold(poison(clean, part, [position], math.nan), clean, [])


# ---- mla_fp8_decode: every query is a work tile of its own

FIELDS = {"code": (5, 6), "scale": (SCALE_OFFSET, ROPE_OFFSET), "rope": (ROPE_OFFSET, ROPE_OFFSET + 2)}
WAYS: list[dict[str, Any]] = [
    *({"h_q": h_q} for h_q in (8, 16, 32, 128)),
    *({"h_q": 128, "exchange": way} for way in ("codes", "values")),
]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_mla_tokens_after_a_query(options, field):
    forced = dict(options)
    s_q, h_q, page = 3, forced.pop("h_q"), 64
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device="cuda")
    pages = -(-max(LENGTHS) // page)
    clean = latent_tokens(len(LENGTHS) * pages * page, generator(0, "cuda")).view(-1, page, TOKEN_BYTES)
    table = torch.arange(len(clean), device="cuda").int().view(len(LENGTHS), pages)
    q = torch.randn((len(LENGTHS), s_q, h_q, QK_DIM), generator=generator(1, "cuda"), device="cuda").bfloat16()
    cache = clean.clone()
    for sequence, length in enumerate(LENGTHS):
        tokens = cache[table[sequence].long()].view(-1, TOKEN_BYTES)
        tokens[length - 1, slice(*FIELDS[field])] = 0xFF
        tokens[length:] = 0xFF
        cache[table[sequence].long()] = tokens.view(-1, page, TOKEN_BYTES)
    call: dict[str, Any] = {"block_table": table, "cache_seqlens": lengths}
    expected, _ = reference_decode(q, cache, **call)
    for splits in (1, 3) if forced else (None, 1, 3):
        out, lse = mla_fp8_decode(q, cache, **call, **forced, num_splits=splits, return_lse=True)
        want, want_lse = mla_fp8_decode(q, clean, **call, **forced, num_splits=splits, return_lse=True)
        assert torch.equal(out[:, :-1], want[:, :-1]) and torch.equal(lse[:, :-1], want_lse[:, :-1])
        assert torch.equal(out.isnan(), expected.isnan()) and out[:, -1].isnan().any()


# ---- sink_attention: products over whole tiles

REACH, REACH_OF_GRADIENTS = 190, 318
"""Distance of a key that a query sees from a key that may still reach its output, or its gradient: a block of 64
queries and a tile of 128 or 256 keys. docs/users/sink_attention.md says 192 and 320."""


def run(case: SinkCase, deterministic: bool = False) -> tuple[torch.Tensor, ...]:
    """`out`, lse, dq, dk and dv."""
    tensors = [t.detach().requires_grad_() for t in (case.q, case.k, case.v)]
    named = dict(zip("qkv", tensors, strict=True))
    result: Any = sink_attention(**{**case.arguments(), **named}, deterministic=deterministic, return_lse=True)
    return (*(t.detach() for t in result), *torch.autograd.grad(result[0], tensors, case.d_out))


def poisoned(case: SinkCase, rows: slice, value: float) -> SinkCase:
    """The case with other keys and values at some positions."""
    k, v = case.k.clone(), case.v.clone()
    k[:, rows], v[:, rows] = value, value
    return dataclasses.replace(case, k=k, v=v)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("d", [64, 128])
def test_keys_far_after_a_query_reach_nothing(d, value, deterministic):
    clean = sink_case([(1000, 1000)], 4, 2, d, padded=False)
    first = 700
    want, got = run(clean, deterministic), run(poisoned(clean, slice(first, None), value), deterministic)
    assert torch.equal(got[1][:, :first], want[1][:, :first]), "the log-sum-exp has only scores, which are masked"
    assert torch.equal(got[0][:, : first - REACH], want[0][:, : first - REACH])
    dq, want_dq = (t[2][:, : first - REACH_OF_GRADIENTS] for t in (got, want))
    assert dq.isfinite().all() and (not deterministic or torch.equal(dq, want_dq))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("h_q", "h_kv", "d"), [(4, 2, 64), (8, 1, 64), (4, 2, 128)])
def test_keys_far_before_a_window_reach_nothing(h_q, h_kv, d, value):
    """Neither outputs nor gradients may change, not even those of keys without a query nearby."""
    window, rows = 100, slice(1000, 1010)
    clean = sink_case([(2400, 2400)], h_q, h_kv, d, window=window, padded=False)
    want, got = run(clean), run(poisoned(clean, rows, value))
    first_harmed, end_harmed = rows.start - REACH, rows.stop - 1 + window + REACH
    for name, one, other in zip(("out", "lse"), got, want, strict=False):
        assert torch.equal(one[:, :first_harmed], other[:, :first_harmed]), name
        assert torch.equal(one[:, end_harmed:], other[:, end_harmed:]), name
    # delta of a query with a NaN output reaches the keys of its tiles, and these its gradient
    apart = window + REACH_OF_GRADIENTS
    for one, other in zip(got[2:], want[2:], strict=True):
        assert torch.equal(one[:, : first_harmed - apart], other[:, : first_harmed - apart])
        assert torch.equal(one[:, end_harmed + apart :], other[:, end_harmed + apart :])


@pytest.mark.parametrize("s_q", [2, 8])
def test_few_queries_see_their_own_keys_alone(s_q):
    """Few queries without gradients run the kernel of `gqa_decode`, which tolerates a NaN in any slot not seen."""
    clean = sink_case([(s_q, 700)] * 2, 8, 2, 64, padded=False)
    case = dataclasses.replace(poisoned(clean, slice(699, None), math.nan), k=clean.k)
    with torch.no_grad():
        out: Any = sink_attention(**case.arguments())
        want: Any = sink_attention(**clean.arguments())
    assert torch.equal(out[:, :-1], want[:, :-1]) and out[:, -1].isnan().all()
