"""The benchmarks of FP8 MLA decoding over all latent formats, of its append and of the merge.

V3.2 picks its keys from contexts of 32,768 tokens. The other formats are those of DeepSeek-V4: a window of 128 tokens
and a compressed cache in one softmax, with sinks. FlashMLA runs on the same bytes.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch

import cute_kernels
from bench import peers
from bench.in_layer import Timing
from bench.run import Case, Work, finite, same_bits, spread_rows
from bench.timing import Call, sets_to_outgrow_l2
from cute_kernels.budget import model
from cute_kernels.merge.spec import MergeSpec
from cute_kernels.mla.append_spec import MlaAppendSpec
from cute_kernels.mla.plan import EXCHANGES, plan_decode
from fp8_mla import FORMATS, V_DIM, pack, read_pages, reference_decode, unpack
from fp8_mla.formats import V3_2, TokenFormat
from tests.kit.compare import check_decode, compare, relative_error
from tests.kit.draws import generator, normal, uniform
from tests.kit.mla_cases import DecodeCase
from tests.kit.values import FAMILIES, fill_pages, query, sort_indices

PAGE_SIZE: Final = 64
CONTEXTS: Final = {"v3.2": (32768, 64)}
"""Tokens of a context that a request picks its keys from, and the least number of contexts in the cache."""
COMPRESSED: Final = (8192, 128)
"""Tokens of a context and number of contexts of the other formats."""
WINDOW, WINDOW_TOKENS = 128, 1 << 17
"""Tokens of a window, and of the windows of all requests: 76 MB, more than the L2 cache."""
MOST_BYTES: Final = 32 << 30
"""Most bytes of caches that are kept: the families of V3.2 are 25 GB."""
PAGE_PADDING: Final = {"v4": 576}
"""Pages of planar formats are padded to a multiple of this many bytes, as in engines; others to 512."""
ROWS_CHECKED: Final = 6
LONGEST_TOPK: Final = 16384
HEADS_OF_CTA: Final = 64
APPEND_TOKENS: Final = 65536
Store = dict[Any, torch.Tensor]


class Caches:
    """Paged caches of all cases and families of values, made when first requested; the oldest are dropped."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = device
        self._made: Store = {}
        self._bf16: tuple[torch.Tensor, torch.Tensor] | None = None

    def get(self, name: str, tokens: int, page_size: int, family: str = "normal", run: int = 0) -> torch.Tensor:
        """Returns (pages, page_size, bytes) uint8 of at least `tokens` tokens; a family may sort each `run` of them."""
        family = "normal" if FAMILIES[family].of_query else family
        run = run if FAMILIES[family].sorted else 0
        key = (name, page_size, family, run)
        known = self._made.get(key)
        if known is None or known.shape[0] * page_size < tokens:
            self._bf16 = None
            self._made.pop(key, None)
            while sum(cache.untyped_storage().nbytes() for cache in self._made.values()) > MOST_BYTES:
                self._made.pop(next(iter(self._made)))
            cache = empty_cache(FORMATS[name], tokens, page_size, self.device)
            known = self._made[key] = fill_pages(cache, family, name, run=run, seed=4)
        return known

    def clear(self) -> None:
        """Frees all caches."""
        self._made.clear()
        self._bf16 = None

    def in_bf16(self, cache: torch.Tensor) -> torch.Tensor:
        """Returns (pages, 64, 1, 576) bfloat16: the same tokens for peers without an FP8 cache."""
        if self._bf16 is None or self._bf16[0] is not cache:
            shape = (*cache.shape[:2], 1, V3_2.d_qk)
            self._bf16 = cache, torch.empty(shape, dtype=torch.bfloat16, device=cache.device)
            for start in range(0, len(cache), 4096):
                self._bf16[1][start : start + 4096, :, 0] = unpack(cache[start : start + 4096])
        return self._bf16[1]


def empty_cache(token_format: TokenFormat, tokens: int, page_size: int, device: str) -> torch.Tensor:
    """Makes (pages, page_size, bytes) uint8 of zeros, planar pages padded at their end."""
    unit, size = PAGE_PADDING.get(token_format.name, 512), token_format.token_bytes
    pages, stride = -(-tokens // page_size), -(-page_size * size // unit) * unit
    if len(token_format.row_bytes) == 1:
        stride = page_size * size
    memory = torch.zeros(pages * stride, dtype=torch.uint8, device=device)
    return memory.as_strided((pages, page_size, size), (stride, size, 1))


@dataclass(frozen=True)
class MlaCase(Case):
    """A decode benchmark.

    keys        topk of the first cache, or the sequence length
    formats     formats of the first cache and of the second, if there are two
    extra_keys  topk of the second cache
    page_size   page size of the second cache, or of the only one
    ragged      requests have 1 to `keys` keys, all numbers equally likely; with two caches 64 to `extra_keys` keys of
                the second, the first ones of its context
    """

    mode: str
    batch: int
    h_q: int
    s_q: int = 1
    keys: int = 2048
    formats: tuple[str, ...] = (V3_2.name,)
    extra_keys: int = 0
    page_size: int = PAGE_SIZE
    ragged: bool = False
    op: ClassVar[str] = "mla_fp8_decode"

    @property
    def is_v32(self) -> bool:
        """Whether the case is over a cache of V3.2."""
        return self.formats == (V3_2.name,)

    @property
    def key(self) -> dict[str, Any]:
        """The entries of a record that identify the case."""
        key: dict[str, Any] = {"op": self.op, "mode": self.mode, "batch": self.batch, "h_q": self.h_q, "s_q": self.s_q}
        key["s_k" if self.mode == "dense" else "topk"] = self.keys
        if not self.is_v32:
            key["cache_format"] = self.formats[0]
        if self.extra_keys:
            key |= {"extra_cache_format": self.formats[1], "extra_topk": self.extra_keys}
        return {**key, "ragged": True} if self.ragged else key

    @property
    def lengths(self) -> list[int]:
        """Number of keys of each request: in the second cache, if there are two."""
        most, least = (self.extra_keys, 64) if self.extra_keys else (self.keys, 1)
        if not self.ragged:
            return [most] * self.batch
        return random.Random(self.batch).choices(range(least, most + 1), k=self.batch)

    @property
    def keys_of_queries(self) -> tuple[int, ...]:
        """Number of keys of all queries, in each cache."""
        last = self.s_q * sum(self.lengths)
        return (self.s_q * self.batch * self.keys, last) if self.extra_keys else (last,)

    @property
    def tokens_spread(self) -> int:
        """Number of keys of all queries, once for each group of 64 heads."""
        return sum(self.keys_of_queries) * -(-self.h_q // HEADS_OF_CTA)

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes: keys, which the queries of a sequence share in a dense cache, q, out, lse, and indices."""
        first, rows = FORMATS[self.formats[0]], self.batch * self.s_q * self.h_q
        sparse = self.mode == "sparse"
        tokens = self.keys_of_queries if sparse else (sum(self.lengths),)
        read = sum(n * FORMATS[name].token_bytes for n, name in zip(tokens, self.formats, strict=True))
        indices = sum(tokens) if sparse else sum(tokens) // PAGE_SIZE
        return read + 4 * indices + rows * (2 * first.d_qk + 2 * first.d_v + 4)

    @property
    def flops(self) -> int:
        """FLOP of both products."""
        first = FORMATS[self.formats[0]]
        return 2 * (first.d_qk + first.d_v) * self.h_q * sum(self.keys_of_queries)

    @property
    def sets(self) -> int:
        """Number of input sets to rotate."""
        return sets_to_outgrow_l2(self.bytes_moved)

    def specs(self, num_sms: int) -> list[Any]:
        """Returns the kernels that the planner asks for, with each exchange that exists."""
        sparse = self.mode == "sparse"
        plan = functools.partial(
            plan_decode,
            sparse=sparse,
            batch=self.batch,
            s_q=self.s_q,
            h_q=self.h_q,
            max_keys=self.keys,
            num_sms=num_sms,
            ragged=self.ragged or not sparse,
            cache_format=self.formats[0],
            extra_format=self.formats[1] if self.extra_keys else "",
            extra_keys=self.extra_keys,
        )
        exchanges = EXCHANGES if self.crosses else ()
        return list(dict.fromkeys([plan().spec, *(plan(exchange=exchange).spec for exchange in exchanges)]))

    @property
    def crosses(self) -> bool:
        """Whether pairs of CTAs can exchange keys."""
        return self.is_v32 and self.h_q > HEADS_OF_CTA

    def rates(self, timing: Timing, ceilings: Mapping[str, float]) -> dict[str, Any]:
        """Adds SM cycles per token and group of 64 heads, as if the work were spread evenly over all SMs."""
        found = super().rates(timing, ceilings)
        if timing.sm_mhz_rested is None:
            return found
        sms = torch.cuda.get_device_properties("cuda").multi_processor_count
        cycles = model.spread_cycles(timing.us, timing.sm_mhz_rested, self.tokens_spread, sms)
        return {**found, "cycles_per_token": round(cycles, 1)}

    def work(self, store: Any, family: str = "normal", rows_checked: int = ROWS_CHECKED) -> Work:
        """Makes the case over caches and queries of a family of values."""
        inputs = self.inputs(store, family)
        out, lse = decode_call(inputs[0])()
        rows = spread_rows(self.batch, rows_checked)
        check = check_decode(out[rows], lse[rows], name=self.name, **inputs[0].rows(rows).arguments())
        # keys in bfloat16 lose accuracy of scores of hundreds, which is no reason not to time a peer
        limit = 1.0 if family == "normal" else float("inf")
        exchanges = {choice: functools.partial(_calls, inputs, exchange=choice) for choice in EXCHANGES}
        return Work(
            finite(check, out, lse),
            functools.partial(_calls, inputs),
            (out, lse),
            peers=lambda: peers.of_case(self, inputs, store, functools.partial(_error, rows), limit),
            variants={"exchange_us": exchanges} if self.crosses and family == "normal" else {},
        )

    def inputs(self, store: Caches, family: str = "normal") -> list[DecodeCase]:
        """Makes the rotated input sets. If the family sorts, so are lists of keys, and pages follow each other."""
        make = self._dense if self.mode == "dense" else self._sparse
        return list(make(store, family, generator(self.batch * 1000 + self.h_q + self.s_q, store.device)))

    def _query(self, family: str, gen: torch.Generator) -> torch.Tensor:
        return query(family, (self.batch, self.s_q, self.h_q, FORMATS[self.formats[0]].d_qk), gen)

    def _dense(self, store: Caches, family: str, gen: torch.Generator) -> Iterator[DecodeCase]:
        needed = self.batch * self.keys // PAGE_SIZE
        cache = store.get(self.formats[0], self.sets * self.batch * self.keys, PAGE_SIZE, family, self.keys)
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=gen.device)
        for number in range(self.sets):
            q = self._query(family, gen)
            pages = torch.randperm(len(cache), generator=gen, device=gen.device)[:needed]
            if FAMILIES[family].sorted:
                pages = torch.arange(number * needed, (number + 1) * needed, device=gen.device)
            yield DecodeCase(q, cache, block_table=pages.view(self.batch, -1).int(), cache_seqlens=lengths)

    def _sparse(self, store: Caches, family: str, gen: torch.Generator) -> Iterator[DecodeCase]:
        context, contexts = CONTEXTS.get(self.formats[0], COMPRESSED)
        contexts = max(self.batch, contexts)
        cache = store.get(self.formats[-1], context * contexts, self.page_size, family, context)
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=gen.device) if self.ragged else None
        sinks = normal((self.h_q,), gen)
        common: dict[str, Any] = {} if self.is_v32 else {"cache_format": self.formats[0], "s_aux": sinks}
        for number in range(self.sets):
            requests = torch.arange(self.batch, device=gen.device) + number * self.batch
            first = requests % contexts * context
            q = self._query(family, gen)
            if not self.extra_keys:
                indices = self._picked(first, context, self.keys, family, gen)
                yield DecodeCase(q, cache, indices=indices, topk_length=lengths, **common)
                continue
            in_order = self._consecutive(first, self.extra_keys)
            yield DecodeCase(
                q,
                store.get(self.formats[0], WINDOW_TOKENS, PAGE_SIZE, family, WINDOW),
                indices=self._consecutive(requests * WINDOW % WINDOW_TOKENS, self.keys),
                extra_kv_cache=cache,
                extra_indices=in_order if self.ragged else self._picked(first, context, self.extra_keys, family, gen),
                extra_topk_length=lengths,
                extra_cache_format=self.formats[1],
                **common,
            )

    def _consecutive(self, first: torch.Tensor, keys: int) -> torch.Tensor:
        slots = first.view(-1, 1, 1) + torch.arange(keys, device=first.device)
        return slots.expand(-1, self.s_q, -1).int().contiguous()

    def _picked(self, first: torch.Tensor, context: int, keys: int, family: str, gen: torch.Generator) -> torch.Tensor:
        """Picks different tokens of each request's context in any order, as an indexer does."""
        order = uniform((self.batch * self.s_q, context), gen)
        picked = order.topk(keys, sorted=False).indices.view(self.batch, self.s_q, keys)
        indices = (picked + first.view(-1, 1, 1)).int()
        if FAMILIES[family].sorted:
            sort_indices(indices)
        return indices


def decode_call(case: DecodeCase, **forced: Any) -> Call:
    """Returns a call that writes to poisoned memory of its own, and returns out and lse."""
    out, lse = (buffer.tensor for buffer in case.outputs())
    options: dict[str, Any] = {**case.arguments(), **forced, "out": out, "lse": lse, "return_lse": True}
    return functools.partial(cute_kernels.mla_fp8_decode, **options)


def _calls(inputs: Sequence[DecodeCase], **forced: Any) -> list[Call]:
    return [decode_call(one, **forced) for one in inputs]


def _error(rows: Sequence[int], out: torch.Tensor, case: DecodeCase) -> float:
    """Returns the relative error of a peer on some rows."""
    return relative_error(out[list(rows)], reference_decode(**case.rows(rows).arguments())[0])


# ---- append and merge


@dataclass(frozen=True)
class MlaAppendCase(Case):
    """The append of 65,536 tokens to shuffled pages, planar ones if the format has them."""

    cache_format: str
    op: ClassVar[str] = "mla_fp8_append"
    ceiling: ClassVar[str] = "copy"

    @property
    def key(self) -> dict[str, Any]:
        """The entries of a record that identify the case."""
        return {"op": self.op, "tokens": APPEND_TOKENS, **self.options}

    @property
    def options(self) -> dict[str, Any]:
        """Returns the arguments besides the tensors."""
        return {} if self.cache_format == V3_2.name else {"cache_format": self.cache_format}

    @property
    def bytes_moved(self) -> int:
        """Bytes of new tokens, slots and written rows."""
        made = FORMATS[self.cache_format]
        return APPEND_TOKENS * (2 * made.d_qk + made.token_bytes + 8)

    def specs(self, num_sms: int) -> list[Any]:
        """Returns the kernel."""
        return [MlaAppendSpec.for_launch(APPEND_TOKENS, self.cache_format)]

    def work(self, store: Any) -> Work:
        """Makes the case over random tokens and empty caches."""
        gen, made = generator(2, store.device), FORMATS[self.cache_format]
        shape = (APPEND_TOKENS // PAGE_SIZE, PAGE_SIZE, made.token_bytes)
        sets = []
        for _ in range(sets_to_outgrow_l2(self.bytes_moved)):
            kv = normal((APPEND_TOKENS, made.d_qk), gen).bfloat16()
            pages = torch.randperm(shape[0], generator=gen, device=gen.device)
            slots = (pages.unsqueeze(1) * PAGE_SIZE + torch.arange(PAGE_SIZE, device=gen.device)).flatten()
            sets.append((kv, slots))

        def make() -> list[Call]:
            return [append_call(*one, shape, self.options) for one in sets]

        cache, (kv, slots) = make()[0](), sets[0]
        written, packed = read_pages(cache, slots, token_format=made), pack(kv, token_format=made)
        check = same_bits(self.name, {"kv_cache": written}, {"kv_cache": packed})
        return Work(check, make, (cache,), ("kv_cache",))


def append_call(
    kv: torch.Tensor, slots: torch.Tensor, shape: tuple[int, ...], options: Mapping[str, Any]
) -> Callable[[], torch.Tensor]:
    """Returns an append to a cache of zeros, which it returns."""
    cache = torch.zeros(shape, dtype=torch.uint8, device=kv.device)

    def call() -> torch.Tensor:
        cute_kernels.mla_fp8_append(kv, cache, slots, **options)
        return cache

    return call


@dataclass(frozen=True)
class MergeCase(Case):
    """The merge of float32 partial results into a bfloat16 one."""

    splits: int = 8
    batch: int = 128
    h_q: int = 128
    op: ClassVar[str] = "merge_states"

    @property
    def key(self) -> dict[str, Any]:
        """The entries of a record that identify the case."""
        return {"op": self.op, "splits": self.splits, "batch": self.batch, "h_q": self.h_q, "s_q": 1, "d": V_DIM}

    @property
    def bytes_moved(self) -> int:
        """Bytes of partial results and of the merged one."""
        rows = self.batch * self.h_q
        return self.splits * rows * 4 * (V_DIM + 1) + rows * (2 * V_DIM + 4)

    def specs(self, num_sms: int) -> list[Any]:
        """Returns the kernel."""
        rows = self.batch * self.h_q
        dtypes: dict[str, Any] = {"in_dtype": "float32", "out_dtype": "bfloat16"}
        return [MergeSpec.for_launch(rows=rows, num_states=self.splits, d=V_DIM, **dtypes, has_sink=False)]

    def work(self, store: Any) -> Work:
        """Makes the case over random partial results."""
        gen, shape = generator(3, store.device), (self.splits, self.batch, 1, self.h_q)
        sets = [
            tuple(normal(size, gen) for size in ((*shape, V_DIM), shape))
            for _ in range(sets_to_outgrow_l2(self.bytes_moved))
        ]
        out, lse = merge_call(*sets[0])()
        outs, lses = (t.double() for t in sets[0])
        expected = torch.einsum("nbsh,nbshd->bshd", torch.softmax(lses, dim=0), outs)
        totals = {"lse": lse, "expected_lse": torch.logsumexp(lses, dim=0)}
        check = compare(out, expected, expected.bfloat16(), **totals, name=self.name)
        return Work(check, lambda: [merge_call(*one) for one in sets], (out, lse))


def merge_call(outs: torch.Tensor, lses: torch.Tensor) -> Call:
    """Returns a merge into poisoned bfloat16 memory of its own, which returns out and lse."""
    out = torch.full(outs.shape[1:], float("nan"), dtype=torch.bfloat16, device=outs.device)
    return functools.partial(cute_kernels.merge_states, outs, lses, out=out)


# ---- the cases; `must` is the project's goal

_sparse = functools.partial(MlaCase, "sparse", peers=("flash_mla",))
_dense = functools.partial(MlaCase, "dense", peers=("flash_mla_bf16",))
_v4 = functools.partial(MlaCase, "sparse", keys=WINDOW, formats=("v4", "v4"), peers=("flash_mla",))
_fp4 = functools.partial(MlaCase, "sparse", keys=WINDOW, formats=("v4.1", "v4.1_fp4"), extra_keys=1024)

V32_CASES: Final = (
    _sparse(1, 128, quick=True, host=True, must={"ratio": 1.4}),
    *(_sparse(batch, 128, must={"ratio": 1.4}) for batch in (2, 4, 8, 16)),
    _sparse(64, 128, must={"ratio": 1.25}),
    _sparse(128, 128, 2, quick=True, sustained=True, must={"ratio": 1.3}),
    _sparse(128, 64, must={"ratio": 1.25}),
    _sparse(148, 128, 2, LONGEST_TOPK, quick=True, sustained=True, power=True, must={"ratio": 1.35}),
    _sparse(128, 128, 4, 512, must={"ratio": 1.25}),
    _sparse(128, 128),
    _sparse(2, 128, 2),
    _sparse(74, 128, 3, 1152),
    _sparse(128, 128, 2, ragged=True),
    *(_sparse(128, heads, must={"us": 55.0}) for heads in (32, 24)),
    *(_sparse(128, heads, must={"read_fraction": 0.82}) for heads in (16, 8)),
    *(_sparse(8, heads, must={"us": 13.0}) for heads in (16, 8)),
    _dense(64, 128, 1, 8192, quick=True, host=True, sustained=True, must={"ratio": 1.0}),
    _dense(1, 128, 1, 131072, must={"ratio": 1.0}),
    _dense(128, 128, 2, 8192),
    _dense(128, 64, 1, 8192),
    _dense(128, 16, 1, 8192, must={"read_fraction": 0.8}),
    _dense(128, 32, 1, 8192),
    _dense(16, 128, 1, 8192),
    _dense(32, 128, 1, 4096),
    _dense(32, 16, 1, 8192, must={"read_fraction": 0.85}),
    _dense(8, 16, 1, 32768, must={"read_fraction": 0.85}),
    _dense(1, 16, 1, 131072, must={"read_fraction": 0.62}),
    _dense(64, 128, 1, 8192, ragged=True),
    _dense(128, 16, 1, 8192, ragged=True),
)
FORMAT_CASES: Final = (
    _v4(128, 128, 2, extra_keys=1024, must={"ratio": 1.35}, quick=True),
    _v4(128, 128, 2, extra_keys=512, must={"ratio": 1.3}),
    _v4(128, 64, extra_keys=1024, must={"ratio": 1.4}),
    *(_v4(batch, 128, extra_keys=1024, must={"ratio": 1.3}) for batch in (64, 1, 8)),
    _v4(16, 64, extra_keys=1024, must={"ratio": 1.3}),
    _v4(64, 64, extra_keys=8192, page_size=2, ragged=True, must={"ratio": 1.3}),
    _v4(64, 16, extra_keys=8192, page_size=2, ragged=True, must={"ratio": 1.8}),
    _v4(128, 16, extra_keys=1024, must={"ratio": 2.2}),
    _sparse(128, 128, 2, formats=("v4",), must={"ratio": 1.4}),
    _fp4(128, 128, 2, quick=True),
    _fp4(128, 64),
    _fp4(128, 16),
    MlaCase("sparse", 128, 128, 2, 2176, ("v3.2_nope",)),
)
DECODE_CASES: Final = (*V32_CASES, *FORMAT_CASES)
CASES: Final = (
    *DECODE_CASES,
    *(MlaAppendCase(name, must={"copy_fraction": 0.8}, host=True, quick=name == V3_2.name) for name in FORMATS),
    MergeCase(host=True, quick=True),
)
