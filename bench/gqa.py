"""The benchmarks of GQA decoding over INT8, FP8 and 16-bit caches, and of the INT8 append.

cuDNN's attention runs over as many tokens in bfloat16, FlashAttention 3 over pages of bfloat16 and FP8, XQA over pages
of FP8.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch

import cute_kernels
from bench import peers
from bench.run import Case, Work, finite, same_bits
from bench.timing import Call, sets_to_outgrow_l2
from cute_kernels.gqa.codes import KINDS, ROTATED_KINDS
from cute_kernels.gqa.layouts import LAYOUTS, CacheSizes, Which, scale_shapes
from cute_kernels.gqa.reference import quantize, quantize_rotated, reference_append, reference_gqa_decode, spread_scale
from cute_kernels.warm.shapes import GqaShape
from fp8_mla.formats import FP8_MAX
from tests.kit.compare import relative_error
from tests.kit.draws import generator, integers, normal, uniform
from tests.kit.gqa_cases import KV_DTYPES, SCALE_NAMES, GqaCase, check_gqa
from tests.kit.values import FAMILIES, keys, query

FOUR_BITS: Final = "uint8"
UINT4_SIZE: Final = 0.6
"""Standard deviation of random 4-bit codes with random zero points and a scale of 1, d 128, after rotating back."""
CODE_SIZE: Final = 40.0
"""Standard deviation of the INT8 codes: N(0,1) values quantized by the largest of 128 give about 47."""
SCALE_BYTES: Final = 2
ROWS_CHECKED: Final = 8
CUDNN: Final = ("cudnn_bf16",)
OVER_PAGES: Final = ("fa3_bf16", "fa3_fp8", "xqa_fp8")
ELEMENTS_PER_CHUNK: Final = 1 << 27
"""Codes that are drawn at a time: 512 MiB of float32."""
LENGTHS: Final = tuple(512 + 15872 * (13 * row % 32) // 31 for row in range(32))
"""Lengths of the ragged batch: 32 from 512 to 16384, evenly spaced, in mixed order; few are multiples of a tile."""
LONG_LENGTHS: Final = tuple(1024 + 31744 * (7 * row % 24) // 23 for row in range(24))
"""Lengths of another ragged batch: 24 from 1024 to 32768; the longest decide if CTAs take whole sequences."""
APPEND_TOKENS, APPEND_HEADS, APPEND_DIM = 65536, 8, 128


def has_token_scales(scales: str) -> bool:
    """Returns whether each token has scales of its own, which then have the axes of the cache."""
    return scales in SCALE_NAMES and SCALE_NAMES[scales].granularity not in ("per_tensor", "per_head")


def scales_of_token(scales: str, h_kv: int, d: int) -> int:
    """Returns how many scales of its own a token has, in one cache."""
    if not has_token_scales(scales):
        return 0
    kind = SCALE_NAMES[scales]
    return {"per_token": 1, "per_token_head": h_kv, "per_group": h_kv * d // max(1, kind.group_size)}[kind.granularity]


class Pool:
    """Random codes; caches of all cases are views of them. Made at the first request, remade when a case needs more."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = device
        self._codes: dict[tuple[str, str], torch.Tensor] = {}

    def codes(self, which: str, kv_dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns a contiguous cache; `which` is "k" or "v"."""
        wanted = math.prod(shape)
        known = self._codes.pop((which, kv_dtype), None)
        if known is None or known.numel() < wanted:
            del known  # frees it before the larger one is allocated
            known = _random_codes(wanted, kv_dtype, generator(ord(which), self.device))
        self._codes[which, kv_dtype] = known
        return known[:wanted].view(shape)

    def clear(self) -> None:
        """Frees all codes."""
        self._codes.clear()


def types_of(kv_dtype: str) -> dict[Which, str]:
    """Returns the types of K and V of a case: members of `KV_DTYPES`, or "uint8"."""
    k, v = KINDS[kv_dtype] if kv_dtype in ROTATED_KINDS else (kv_dtype, kv_dtype)
    return {"k": k, "v": v}


def _random_codes(count: int, kv_dtype: str, gen: torch.Generator) -> torch.Tensor:
    if kv_dtype == FOUR_BITS:
        return integers(0, 256, (count,), gen, torch.uint8)
    codes = torch.empty(count, dtype=KV_DTYPES[kv_dtype], device=gen.device)
    for start in range(0, count, ELEMENTS_PER_CHUNK):
        part = codes[start : start + ELEMENTS_PER_CHUNK]
        values = normal((len(part),), gen)
        part.copy_(values.mul_(CODE_SIZE).round_().clamp_(-127, 127) if kv_dtype == "int8" else values)
    return codes


@dataclass(frozen=True)
class GqaDecodeCase(Case):
    """A decode benchmark.

    s_k         tokens of every sequence; with `lengths`, the capacity
    scales      a member of `SCALE_NAMES`; "none" for caches without scales
    Returns cycles per token and CTA of each unit, for variants with 128 heads and the published estimate.
    page_size   0 for contiguous layouts
    lengths     tokens of each sequence of a ragged batch, `batch` of them
    """

    batch: int
    s_k: int
    scales: str = "per_tensor"
    layout: str = "BNSH"
    page_size: int = 0
    kv_dtype: str = "int8"
    lengths: tuple[int, ...] = ()
    h_q: int = 32
    h_kv: int = 8
    d: int = 128
    s_q: int = 1
    window: int | None = None
    op: ClassVar[str] = "gqa_decode"

    @property
    def keys(self) -> int | str:
        """Tokens of a sequence, in the record's form: a number, or "shortest..longest"."""
        return f"{min(self.lengths)}..{max(self.lengths)}" if self.lengths else self.s_k

    @property
    def key(self) -> dict[str, Any]:
        """The entries of a record that identify the case."""
        named = ("op", "kv_dtype", "scales", "layout", "batch", "h_q", "h_kv", "d", "s_q")
        key = {name: getattr(self, name) for name in named} | {"s_k": self.keys}
        key |= {"page_size": self.page_size} if self.page_size else {}
        return key if self.window is None else {**key, "window": self.window}

    @property
    def seqlens(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return self.lengths or (self.s_k,) * self.batch

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes of a call: codes, scales, q, out and the block table's entries."""
        reach = self.s_k if self.window is None else self.window + self.s_q - 1
        visible = [min(length, reach) for length in self.seqlens]
        tokens, values = sum(visible), self.h_kv * self.d
        codes = sum(
            tokens * values // 2 if name == FOUR_BITS else tokens * values * KV_DTYPES[name].itemsize
            for name in types_of(self.kv_dtype).values()
        )
        scales = tokens * scales_of_token(self.scales, self.h_kv, self.d) * self.scale_dtype.itemsize
        entries = sum(-(-length // self.page_size) for length in visible) if self.page_size else 0
        rows = self.batch * self.s_q * self.h_q
        return codes + 2 * scales + 4 * rows * self.d + 4 * entries

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of the scales, if there are any."""
        return torch.float32 if self.kv_dtype in ROTATED_KINDS else torch.float16

    @property
    def flops(self) -> int:
        """FLOP of both products, over the pairs that are not masked."""
        ends = [length - self.s_q + 1 + query for length in self.seqlens for query in range(self.s_q)]
        pairs = sum(end if self.window is None else min(end, self.window) for end in ends)
        return 4 * self.d * self.h_q * pairs

    @property
    def sets(self) -> int:
        """Number of rotated input sets: twice what exceeds the L2 cache, which does not evict the oldest line first."""
        return sets_to_outgrow_l2(self.bytes_moved // 2, most=128)

    def sizes(self, sets: int) -> CacheSizes:
        """Sizes of the one cache that all input sets share."""
        sequences = sets * self.batch
        if self.page_size:
            return CacheSizes(sequences * -(-self.s_k // self.page_size), self.page_size, self.h_kv, self.d)
        return CacheSizes(sequences, self.s_k, self.h_kv, self.d)

    def specs(self, num_sms: int) -> list[Any]:
        """Returns the kernel that the planner asks for."""
        names = {"int8": "int8", "fp8": "float8_e4m3fn", "bf16": "bfloat16"}
        shape = GqaShape(
            heads=self.h_q,
            kv_heads=self.h_kv,
            head_dim=self.d,
            kv_dtype=names.get(self.kv_dtype, self.kv_dtype),
            scales=None if self.scales == "none" else self.scales,
            scale_dtype=str(self.scale_dtype).removeprefix("torch."),
            layout=self.layout,
            page_size=self.page_size,
            max_tokens=self.s_k,
            append=False,
        )
        return list(shape.specs([self.batch], [self.s_q], num_sms))

    def work(self, store: Any, family: str = "normal", rows_checked: int = ROWS_CHECKED) -> Work:
        """Makes the case over random codes, or over values of a family, which only contiguous caches support."""
        inputs = self.inputs(store) if family == "normal" else self.inputs_of_family(store, family)
        out, lse = decode_call(inputs[0])()
        rows, sample = self.some_rows(inputs[0], rows_checked)
        check = check_gqa(out[rows], lse[rows], sample, name=self.name)

        def error(got: torch.Tensor, case: GqaCase) -> float:
            picked, some = self.some_rows(case, rows_checked)
            return relative_error(got[picked], reference_gqa_decode(**some.arguments())[0])

        return Work(
            finite(check, out, lse),
            lambda: [decode_call(one) for one in inputs],
            (out, lse),
            peers=lambda: peers.of_case(self, inputs, store, error),
        )

    def inputs(self, pool: Pool) -> list[GqaCase]:
        """Makes the rotated input sets, over one cache."""
        gen = generator(self.batch * 1000 + self.h_q + self.s_q, pool.device)
        sizes = self.sizes(self.sets)
        caches: dict[str, Any] = {}
        for which, dtype in types_of(self.kv_dtype).items():
            name = f"{which}_cache"
            shape = LAYOUTS[self.layout].shape(which, sizes, KV_DTYPES.get(dtype, torch.uint8).itemsize)
            shape = (*shape[:-1], shape[-1] // 2) if dtype == FOUR_BITS else shape
            caches[name] = pool.codes(which, dtype, shape)
            if self.scales != "none":
                shape = scale_shapes(LAYOUTS[self.layout], sizes)[SCALE_NAMES[self.scales]]
                scale = uniform(shape, gen) + 0.5
                scale = scale / {"int8": CODE_SIZE, FOUR_BITS: UINT4_SIZE}.get(dtype, 1)
                caches[f"{which}_scale"] = scale.to(self.scale_dtype)
        own = [name for name in caches if name.endswith("cache") or has_token_scales(self.scales)]
        pages = torch.randperm(sizes.outer, generator=gen, device=gen.device).int().view(self.sets, self.batch, -1)
        cases = []
        for number in range(self.sets):
            q = normal((self.batch, self.s_q, self.h_q, self.d), gen).bfloat16()
            part = slice(number * self.batch, (number + 1) * self.batch)
            given = caches if self.page_size else caches | {name: caches[name][part] for name in own}
            cases.append(self._case(q, given, pages[number] if self.page_size else None))
        return cases

    def _case(self, q: torch.Tensor, caches: Mapping[str, Any], table: torch.Tensor | None) -> GqaCase:
        lengths = torch.tensor(self.seqlens, dtype=torch.int32, device=q.device)
        named: dict[str, Any] = {
            "layout": self.layout,
            "cache_seqlens": lengths,
            "block_table": table,
            "window": self.window,
            "kind": self.kv_dtype if self.kv_dtype in ROTATED_KINDS else None,
        }
        return GqaCase(q=q, **caches, **named)

    def inputs_of_family(self, pool: Pool, family: str) -> list[GqaCase]:
        """Makes input sets over contiguous caches (BNSH), in which each head of a token has values of its own."""
        pool.clear()
        gen = generator(self.batch, pool.device)
        cases = []
        for _ in range(self.sets):
            caches = self._cache_of_family("k", family, gen) | self._cache_of_family("v", family, gen)
            cases.append(self._case(query(family, (self.batch, self.s_q, self.h_q, self.d), gen), caches, None))
        return cases

    def _cache_of_family(self, which: Which, family: str, gen: torch.Generator) -> dict[str, torch.Tensor]:
        name, shape = types_of(self.kv_dtype)[which], (self.batch, self.h_kv, self.s_k, self.d)
        x = heads_of_tokens(family, shape, gen)
        if name == FOUR_BITS:
            codes, scale = quantize_rotated(x)
            return {f"{which}_cache": codes, f"{which}_scale": scale}
        dtype = KV_DTYPES[name]
        if name == "bf16":
            return {f"{which}_cache": x.to(dtype)}
        rows, kind = x.flatten(0, 2).unsqueeze(1), SCALE_NAMES[self.scales]
        codes, scale = quantize(rows, kind, self.scale_dtype)
        if name == "fp8":
            scale = (scale.float() * (127 / FP8_MAX)).half()
            codes = (rows / spread_scale(scale.float(), kind)).clamp(-FP8_MAX, FP8_MAX).to(dtype)
        if FAMILIES[family].unwritten and scale.numel() > 1:
            scale[(codes == 0).all(dim=-1)] = 0
        scale = scale.view(shape[:3]) if scale.numel() > 1 else scale
        return {f"{which}_cache": codes.view(shape), f"{which}_scale": scale}

    def some_rows(self, case: GqaCase, number: int) -> tuple[slice, GqaCase]:
        """Returns evenly spaced batch rows, the last one included, and the call for these rows only."""
        step = -(-self.batch // number)
        rows = slice((self.batch - 1) % step, None, step)
        per_row = ["q", "cache_seqlens", *(["block_table"] if self.page_size else ["k_cache", "v_cache"])]
        scaled = not self.page_size and case.k_scale is not None and case.k_scale.dim() > 1
        per_row += ["k_scale", "v_scale"] if scaled else []
        chosen: dict[str, Any] = {name: getattr(case, name)[rows] for name in per_row}
        return rows, dataclasses.replace(case, **chosen)


def heads_of_tokens(family: str, shape: tuple[int, int, int, int], gen: torch.Generator) -> torch.Tensor:
    """Makes (batch, heads, tokens, d) float32: a family sees each head of a token as a token with four quant tiles."""
    batch, heads, length, d = shape
    rows = batch * heads * length
    groups = torch.arange(rows, dtype=torch.int64, device=gen.device) // length
    return keys(family, (rows, d), d // 4, gen, groups=groups).view(shape)


def decode_call(case: GqaCase) -> Call:
    """Returns a call that allocates out and lse full of poison, writes them, and returns them."""
    out, lse = (buffer.tensor for buffer in case.outputs())
    return functools.partial(cute_kernels.gqa_decode, **case.arguments(), out=out, lse=lse, return_lse=True)


@dataclass(frozen=True)
class GqaAppendCase(Case):
    """A benchmark of `kv_int8_append`: tokens to shuffled pages, or in order to a contiguous cache."""

    scales: str
    layout: str = "paged_NHD"
    page_size: int = 64
    op: ClassVar[str] = "kv_int8_append"
    ceiling: ClassVar[str] = "copy"

    @property
    def key(self) -> dict[str, Any]:
        """The entries of a record that identify the case."""
        key: dict[str, Any] = {"op": self.op, "tokens": APPEND_TOKENS, "h_kv": APPEND_HEADS, "d": APPEND_DIM}
        key |= {"scales": self.scales, "layout": self.layout}
        return {**key, "page_size": self.page_size} if self.page_size else key

    @property
    def bytes_moved(self) -> int:
        """New tokens and slots that are read, codes and scales that are written, in bytes."""
        values, scales = APPEND_HEADS * APPEND_DIM, scales_of_token(self.scales, APPEND_HEADS, APPEND_DIM)
        return APPEND_TOKENS * (2 * (2 * values + values + SCALE_BYTES * scales) + 8)

    @property
    def sizes(self) -> CacheSizes:
        """Sizes of the cache, which the tokens fill; without pages, 8192 tokens a sequence."""
        rows = self.page_size or 8192
        return CacheSizes(APPEND_TOKENS // rows, rows, APPEND_HEADS, APPEND_DIM)

    @property
    def written(self) -> tuple[str, ...]:
        """The arguments that an append overwrites: caches, and scales that it computes."""
        return ("k_cache", "v_cache", *(("k_scale", "v_scale") if has_token_scales(self.scales) else ()))

    def specs(self, num_sms: int) -> list[Any]:
        """Returns the kernel."""
        shape = GqaShape(32, APPEND_HEADS, APPEND_DIM, scales=self.scales, scale_dtype="float16", layout=self.layout)
        *_, spec = shape.specs([1], [1], num_sms)
        return [spec]

    def work(self, store: Any) -> Work:
        """Makes the case over random tokens."""
        gen = generator(2, store.device)
        sets = [self.inputs(gen) for _ in range(sets_to_outgrow_l2(self.bytes_moved))]

        def make() -> list[Call]:
            return [append_call(one, self.written) for one in sets]

        expected = {name: sets[0][name].clone() for name in self.written}
        reference_append(**{**sets[0], **expected})
        first = make()[0]()
        check = same_bits(self.name, dict(zip(self.written, first, strict=True)), expected)
        return Work(check, make, first, self.written)

    def inputs(self, gen: torch.Generator) -> dict[str, Any]:
        """Makes the arguments of one append that fills its cache, by name."""
        sizes, device = self.sizes, gen.device
        shape = (APPEND_TOKENS, APPEND_HEADS, APPEND_DIM)
        call: dict[str, Any] = {name: normal(shape, gen).bfloat16() for name in "kv"}
        scale_shape = scale_shapes(LAYOUTS[self.layout], sizes)[SCALE_NAMES[self.scales]]
        # given scales: the largest code is 4 standard deviations, so that some values are clamped
        first = 0.0 if has_token_scales(self.scales) else 4 / 127
        for which in types_of("int8"):
            cache_shape = LAYOUTS[self.layout].shape(which, sizes, 1)
            call[f"{which}_cache"] = torch.zeros(cache_shape, dtype=torch.int8, device=device)
            call[f"{which}_scale"] = torch.full(scale_shape, first, dtype=torch.float16, device=device)
        # without pages, sequences in order, as a prefill writes them; else shuffled pages
        starts = torch.arange(sizes.outer, device=device)
        if self.page_size:
            starts = torch.randperm(sizes.outer, generator=gen, device=device)
        slots = starts.unsqueeze(1) * sizes.rows + torch.arange(sizes.rows, device=device)
        return {**call, "slot_mapping": slots.flatten(), "layout": self.layout}


def append_call(call: Mapping[str, Any], names: tuple[str, ...]) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Returns an append to copies of the named arguments, which it returns."""
    own = {name: call[name].clone() for name in names}

    def run() -> tuple[torch.Tensor, ...]:
        cute_kernels.kv_int8_append(**{**call, **own})
        return tuple(own.values())

    return run


def _cases() -> Iterator[GqaDecodeCase]:
    """Yields all decode cases; `must` is the project's goal."""
    paged: dict[str, Any] = {"layout": "paged_NHD", "page_size": 64}
    for layout, scales in itertools.product(({}, paged), ("per_tensor", "per_token_head")):
        token_head, contiguous = scales == "per_token_head", not layout
        shown = contiguous != token_head  # two of the four variants: those that serving engines use most
        over_pages = OVER_PAGES if token_head and not contiguous else ()
        case: Callable[..., GqaDecodeCase] = functools.partial(GqaDecodeCase, scales=scales, **layout, peers=over_pages)
        beside = functools.partial(case, peers=CUDNN if contiguous else over_pages)
        most = {"read_fraction": 0.92, "ratio": 1.7} if contiguous else {"read_fraction": 0.96}
        yield beside(128, 8192, must={"read_fraction": 0.92})
        yield beside(64, 8192, must=most, sustained=contiguous and token_head, quick=shown, host=shown)
        yield beside(16, 4096, must={"read_fraction": 0.78})
        yield beside(1, 131072, must={"read_fraction": 0.80})
        yield beside(1, 32768, must={"us": 26.0}, quick=shown, host=shown)
        yield beside(1, 1024, must={"us": 6.0}, host=shown)
        yield case(32, max(LENGTHS), lengths=LENGTHS, must={"read_fraction": 0.85})
        yield case(64, 8192, h_q=64, must={"read_fraction": 0.90})
        yield case(64, 8192, s_q=4, must={"read_fraction": 0.85})
    for scales in ("per_tensor", "per_token_head"):
        for name, page_size in (("BSNH", 0), ("paged_NHD", 16), ("paged_NHD", 128), ("paged_HND", 64)):
            yield GqaDecodeCase(64, 8192, scales, name, page_size, must={"read_fraction": 0.90})
        yield GqaDecodeCase(64, 8192, scales, "paged_vllm", 16)
    for name, page_size in (("BNSH", 0), ("paged_NHD", 64)):
        both: dict[str, Any] = {"must": {"read_fraction": 0.95}, "peers": OVER_PAGES if page_size else ()}
        yield GqaDecodeCase(64, 8192, "none", name, page_size, "bf16", **both, quick=not page_size)
        yield GqaDecodeCase(64, 8192, "per_tensor", name, page_size, "fp8", **both)
    served: Callable[..., GqaDecodeCase] = functools.partial(
        GqaDecodeCase, scales="per_token_head", **paged, peers=OVER_PAGES
    )
    yield served(24, max(LONG_LENGTHS), lengths=LONG_LENGTHS, must={"read_fraction": 0.88})
    yield served(256, 512, must={"read_fraction": 0.90})
    yield served(8, 4096, h_q=28, h_kv=4, must={"read_fraction": 0.62})
    yield served(64, 8192, h_q=64, d=64, must={"read_fraction": 0.94})
    yield served(64, 8192, h_q=16, h_kv=2, d=256, must={"read_fraction": 0.94})
    for scales, kv_dtype in (("per_token_head", "int8"), ("per_tensor", "fp8"), ("none", "bf16")):
        yield GqaDecodeCase(
            32, 8192, scales, "paged_NHD", 64, kv_dtype, h_kv=4, d=512, must={"read_fraction": 0.92}
        )  # fmt: skip
    yield GqaDecodeCase(64, 8192, "per_group_32")
    yield GqaDecodeCase(64, 8192, "per_token")
    yield served(32, 8192, window=128)
    for window in (None, 128):
        yield GqaDecodeCase(
            32, 8192, "none", "paged_NHD", 64, "bf16", h_q=64, d=64, window=window, peers=OVER_PAGES
        )  # fmt: skip


DECODE_CASES: Final = tuple(_cases())
APPEND_CASES: Final = (
    GqaAppendCase("per_token_head", must={"copy_fraction": 0.80}, quick=True, host=True),
    GqaAppendCase("per_token_head", "BNSH", 0, host=True),
    *(GqaAppendCase(scales, host=True) for scales in ("per_token", "per_group_32", "per_tensor")),
)
CASES: Final = (*DECODE_CASES, *APPEND_CASES)
