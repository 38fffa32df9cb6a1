"""The benchmarks of GQA decoding over INT8, FP8 and 16-bit caches, and of the INT8 append; run by `gpu_check.py`.

The oracle checks a few batch rows of every case before it is timed, over input sets that together exceed the L2 cache.
The timed graph must write the bits of eager calls, in every set. In the same process cuDNN's attention (in torch) runs
over the same tokens in bfloat16, FlashAttention 3 over pages of bfloat16 and FP8, and XQA over those of FP8, where they
are installed. A figure that a case must reach is in the record with the figure that it reached.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import cute_kernels
from bench import flash_attention, records, xqa
from bench.in_layer import prepare, time_calls, time_together
from bench.peers import FP8_LIMIT, OURS, PEER_LIMIT, Peer, entries, ready, ways
from bench.timing import Expected, host_times, sets_to_outgrow_l2
from cute_kernels.budget import model
from cute_kernels.budget.rates import H200, Rates
from cute_kernels.gqa import op
from cute_kernels.gqa.layouts import LAYOUTS, CacheSizes, scale_shapes
from cute_kernels.gqa.reference import dequantize, reference_append, reference_gqa_decode
from cute_kernels.gqa.spec import GqaDecodeSpec
from tests.kit.compare import Comparison, relative_error
from tests.kit.gqa_cases import KV_DTYPES, SCALE_NAMES, GqaCase, check_gqa
from tests.kit.mla_cases import generator

CODE_SIZE = 40.0
"""Standard deviation of the INT8 codes: N(0,1) values quantized by the largest of 128 give 47 or so."""
SCALE_BYTES = 2
ROWS_CHECKED = 8
PEER = "cudnn_bf16"
FLASH_DTYPES = {"int8": ("bf16", "fp8"), "bf16": ("bf16",), "fp8": ("fp8",)}
"""Of the caches that FlashAttention 3 is compared over, by that of the case's own; it has none of INT8."""
ELEMENTS_PER_CHUNK = 1 << 27
"""Numbers drawn or dequantized at a time: 512 MiB of float32."""
LENGTHS = tuple(512 + 15872 * (13 * row % 32) // 31 for row in range(32))
"""Lengths of the ragged batch: 32 from 512 to 16384, evenly spaced, in mixed order; few are multiples of a tile."""
LONG_LENGTHS = tuple(1024 + 31744 * (7 * row % 24) // 23 for row in range(24))
"""Of another ragged batch: 24 from 1024 to 32768, of which the longest ones decide where CTAs take whole sequences."""
APPEND_TOKENS = 65536
APPEND_HEADS, APPEND_DIM = 8, 128


def has_token_scales(scales: str) -> bool:
    """Whether each token has scales of its own, which then have the axes of the cache."""
    return scales in SCALE_NAMES and SCALE_NAMES[scales].granularity not in ("per_tensor", "per_head")


def scales_of_token(scales: str, h_kv: int, d: int) -> int:
    """How many scales of its own a token has, in one cache."""
    if not has_token_scales(scales):
        return 0
    kind = SCALE_NAMES[scales]
    return {"per_token": 1, "per_token_head": h_kv, "per_group": h_kv * d // max(1, kind.group_size)}[kind.granularity]


def cache_shapes(layout: str, sizes: CacheSizes, itemsize: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of k_cache and v_cache."""
    named = LAYOUTS[layout]
    return named.shape("k", sizes, itemsize), named.shape("v", sizes, itemsize)


@dataclass(frozen=True)
class GqaBench:
    """One decode benchmark.

    s_k         tokens of every sequence; with `lengths`, the capacity
    lengths     tokens of each sequence of a ragged batch, `batch` of them
    scales      one of `SCALE_NAMES`; "none" for caches without scales
    page_size   0 for contiguous layouts
    must        figures of the record that the case must reach
    peer        whether cuDNN runs too
    paged_peers  whether FlashAttention 3 and XQA run too: of cases in pages (paged_NHD)
    sustained   whether the times under load are taken too
    host        whether to time the eager call too
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
    must: Mapping[str, float] = field(default_factory=dict)
    peer: bool = False
    paged_peers: bool = False
    sustained: bool = False
    quick: bool = False
    host: bool = False

    @property
    def keys(self) -> int | str:
        """Tokens of a sequence, as in the record: a number, or "shortest..longest"."""
        return f"{min(self.lengths)}..{max(self.lengths)}" if self.lengths else self.s_k

    @property
    def name(self) -> str:
        """The name that `--only` matches and the table prints."""
        layout = f"{self.layout}_{self.page_size}" if self.page_size else self.layout
        window = "" if self.window is None else f" window {self.window}"
        sizes = f"{self.batch}x{self.h_q}x{self.s_q} s_k {self.keys} d {self.d}"
        return f"gqa_decode {self.kv_dtype} {self.scales} {layout} {sizes}{window}"

    @property
    def key(self) -> dict[str, Any]:
        """The fields that name the case in a results file."""
        key: dict[str, Any] = {"op": "gqa_decode", "kv_dtype": self.kv_dtype}
        key |= {"scales": self.scales, "layout": self.layout}
        if self.page_size:
            key["page_size"] = self.page_size
        key |= {"batch": self.batch, "h_q": self.h_q, "h_kv": self.h_kv, "d": self.d, "s_q": self.s_q, "s_k": self.keys}
        if self.window is not None:
            key["window"] = self.window
        return key

    @property
    def seqlens(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return self.lengths or (self.s_k,) * self.batch

    @property
    def visible(self) -> list[int]:
        """Tokens of each sequence that any of its queries sees."""
        reach = self.s_k if self.window is None else self.window + self.s_q - 1
        return [min(length, reach) for length in self.seqlens]

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes a call can move: codes, scales, q, out and the block table's entries."""
        tokens, itemsize = sum(self.visible), KV_DTYPES[self.kv_dtype].itemsize
        scales = tokens * scales_of_token(self.scales, self.h_kv, self.d) * SCALE_BYTES
        entries = sum(-(-length // self.page_size) for length in self.visible) if self.page_size else 0
        rows = self.batch * self.s_q * self.h_q
        return 2 * (tokens * self.h_kv * self.d * itemsize + scales) + 4 * rows * self.d + 4 * entries

    @property
    def flops(self) -> int:
        """Both products, over the pairs that are not masked."""
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

    @property
    def spec(self) -> GqaDecodeSpec:
        """The kernel, planned from shapes alone."""
        sizes, dtype = self.sizes(1), KV_DTYPES[self.kv_dtype]
        shapes = dict(zip(("k_cache", "v_cache"), cache_shapes(self.layout, sizes, dtype.itemsize), strict=True))
        given: dict[str, Any] = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
        if self.scales != "none":
            shape = scale_shapes(LAYOUTS[self.layout], sizes)[SCALE_NAMES[self.scales]]
            given |= dict.fromkeys(("k_scale", "v_scale"), torch.empty(shape, dtype=torch.float16, device="meta"))
        q = torch.empty((self.batch, self.s_q, self.h_q, self.d), dtype=torch.bfloat16, device="meta")
        table = torch.empty((self.batch, sizes.outer // self.batch), device="meta") if self.page_size else None
        case = GqaCase(q=q, **given, layout=self.layout, block_table=table, window=self.window)
        return op.decode_spec(op._Request(**case.arguments(), num_splits=None))


def predict(bench: GqaBench, rates: Rates = H200) -> model.Prediction:
    """The time that the cycle budget predicts for a case; see docs/maintainers/budget.md."""
    spec = bench.spec
    token_scales = spec.scale_groups(spec.v_scales) > 0
    return model.predict_gqa(bench.bytes_moved, spec.cluster > 1, rates, token_scales=token_scales)


def _cases() -> Iterator[GqaBench]:
    """All decode cases; `must` is the project's goal."""
    paged = {"layout": "paged_NHD", "page_size": 64}
    variants: list[dict[str, Any]] = [
        {"scales": scales, **layout} for layout in ({}, paged) for scales in ("per_tensor", "per_token_head")
    ]
    for variant in variants:
        token_head, contiguous = variant["scales"] == "per_token_head", "layout" not in variant
        # two of the four variants: those that serving engines use most
        shown = contiguous != token_head
        most = {"read_fraction": 0.92, "ratio": 1.7} if contiguous else {"read_fraction": 0.96}
        case: Callable[..., GqaBench] = functools.partial(
            GqaBench, **variant, paged_peers=token_head and not contiguous
        )
        yield case(128, 8192, must={"read_fraction": 0.92}, peer=contiguous)
        headline = contiguous and token_head
        yield case(64, 8192, must=most, peer=contiguous, sustained=headline, quick=shown, host=shown)
        yield case(16, 4096, must={"read_fraction": 0.78}, peer=contiguous)
        yield case(1, 131072, must={"read_fraction": 0.80}, peer=contiguous)
        yield case(1, 32768, must={"us": 26.0}, peer=contiguous, quick=shown, host=shown)
        yield case(1, 1024, must={"us": 6.0}, peer=contiguous, host=shown)
        yield case(32, max(LENGTHS), lengths=LENGTHS, must={"read_fraction": 0.85})
        yield case(64, 8192, h_q=64, must={"read_fraction": 0.90})
        yield case(64, 8192, s_q=4, must={"read_fraction": 0.85})
    for scales in ("per_tensor", "per_token_head"):
        for layout, page_size in (("BSNH", 0), ("paged_NHD", 16), ("paged_NHD", 128), ("paged_HND", 64)):
            yield GqaBench(64, 8192, scales, layout, page_size, must={"read_fraction": 0.90})
        yield GqaBench(64, 8192, scales, "paged_vllm", 16)
    for layout, page_size in (("BNSH", 0), ("paged_NHD", 64)):
        both: dict[str, Any] = {"must": {"read_fraction": 0.95}, "paged_peers": page_size > 0}
        yield GqaBench(64, 8192, "none", layout, page_size, "bf16", **both, quick=not page_size)
        yield GqaBench(64, 8192, "per_tensor", layout, page_size, "fp8", **both)
    in_pages: dict[str, Any] = {"scales": "per_token_head", **paged, "paged_peers": True}
    served: Callable[..., GqaBench] = functools.partial(GqaBench, **in_pages)
    yield served(24, max(LONG_LENGTHS), lengths=LONG_LENGTHS, must={"read_fraction": 0.88})
    yield served(256, 512, must={"read_fraction": 0.90})
    yield served(8, 4096, h_q=28, h_kv=4, must={"read_fraction": 0.62})
    yield served(64, 8192, h_q=64, d=64, must={"read_fraction": 0.94})
    yield served(64, 8192, h_q=16, h_kv=2, d=256, must={"read_fraction": 0.94})
    yield GqaBench(64, 8192, "per_group_32")
    yield GqaBench(64, 8192, "per_token")
    yield served(32, 8192, window=128)
    for window in (None, 128):
        yield GqaBench(32, 8192, "none", "paged_NHD", 64, "bf16", h_q=64, d=64, window=window, paged_peers=True)


DECODE_CASES = tuple(_cases())


@dataclass(frozen=True)
class AppendBench:
    """One benchmark of `kv_int8_append`: tokens to shuffled pages, or in order to a contiguous cache."""

    scales: str
    layout: str = "paged_NHD"
    page_size: int = 64
    must: Mapping[str, float] = field(default_factory=dict)
    quick: bool = False

    @property
    def name(self) -> str:
        """The name that `--only` matches and the table prints."""
        layout = f"{self.layout}_{self.page_size}" if self.page_size else self.layout
        return f"kv_int8_append {self.scales} {layout} tokens {APPEND_TOKENS}"

    @property
    def key(self) -> dict[str, Any]:
        """The fields that name the case in a results file."""
        key: dict[str, Any] = {"op": "kv_int8_append", "tokens": APPEND_TOKENS}
        key |= {"h_kv": APPEND_HEADS, "d": APPEND_DIM, "scales": self.scales, "layout": self.layout}
        return {**key, "page_size": self.page_size} if self.page_size else key

    @property
    def bytes_moved(self) -> int:
        """Bytes of an append: reads new tokens and slots, writes codes and the scales that it computes."""
        values = APPEND_HEADS * APPEND_DIM
        scales = scales_of_token(self.scales, APPEND_HEADS, APPEND_DIM)
        return APPEND_TOKENS * (2 * (2 * values + values + SCALE_BYTES * scales) + 8)

    @property
    def sizes(self) -> CacheSizes:
        """Sizes of the cache, which the tokens fill; without pages, 8192 tokens a sequence."""
        rows = self.page_size or 8192
        return CacheSizes(APPEND_TOKENS // rows, rows, APPEND_HEADS, APPEND_DIM)


APPEND_CASES = (
    AppendBench("per_token_head", must={"copy_fraction": 0.80}, quick=True),
    AppendBench("per_token_head", "BNSH", 0),
    AppendBench("per_token"),
    AppendBench("per_group_32"),
    AppendBench("per_tensor"),
)


class Pool:
    """Random codes; caches of all cases are views of them. Made at the first request, remade when a case needs more."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = device
        self._codes: dict[tuple[str, str], torch.Tensor] = {}

    def codes(self, which: str, kv_dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A contiguous cache; `which` is "k" or "v"."""
        wanted = math.prod(shape)
        known = self._codes.pop((which, kv_dtype), None)
        if known is None or known.numel() < wanted:
            del known  # frees it before the larger one is allocated
            known = _random_codes(wanted, kv_dtype, generator(ord(which), self.device))
        self._codes[which, kv_dtype] = known
        return known[:wanted].view(shape)


def _random_codes(count: int, kv_dtype: str, gen: torch.Generator) -> torch.Tensor:
    codes = torch.empty(count, dtype=KV_DTYPES[kv_dtype], device=gen.device)
    for start in range(0, count, ELEMENTS_PER_CHUNK):
        part = codes[start : start + ELEMENTS_PER_CHUNK]
        values = torch.randn(len(part), generator=gen, device=gen.device)
        part.copy_(values.mul_(CODE_SIZE).round_().clamp_(-127, 127) if kv_dtype == "int8" else values)
    return codes


def decode_inputs(bench: GqaBench, pool: Pool) -> list[GqaCase]:
    """The rotated input sets of one case, over one cache."""
    gen = generator(bench.batch * 1000 + bench.h_q + bench.s_q, pool.device)
    dtype, sizes = KV_DTYPES[bench.kv_dtype], bench.sizes(bench.sets)
    caches: dict[str, Any] = {}
    for which, shape in zip("kv", cache_shapes(bench.layout, sizes, dtype.itemsize), strict=True):
        caches[f"{which}_cache"] = pool.codes(which, bench.kv_dtype, shape)
        if bench.scales == "none":
            continue
        scale = torch.rand(
            scale_shapes(LAYOUTS[bench.layout], sizes)[SCALE_NAMES[bench.scales]], generator=gen, device=gen.device
        )
        caches[f"{which}_scale"] = ((scale + 0.5) / (CODE_SIZE if bench.kv_dtype == "int8" else 1)).half()
    own = [name for name in caches if name.endswith("cache") or has_token_scales(bench.scales)]
    pages = torch.randperm(sizes.outer, generator=gen, device=gen.device).int().view(bench.sets, bench.batch, -1)
    cases = []
    for number in range(bench.sets):
        q = torch.randn((bench.batch, bench.s_q, bench.h_q, bench.d), generator=gen, device=gen.device).bfloat16()
        part = slice(number * bench.batch, (number + 1) * bench.batch)
        cases.append(
            GqaCase(
                q=q,
                **(caches if bench.page_size else caches | {name: caches[name][part] for name in own}),
                layout=bench.layout,
                cache_seqlens=torch.tensor(bench.seqlens, dtype=torch.int32, device=gen.device),
                block_table=pages[number] if bench.page_size else None,
                window=bench.window,
            )
        )
    return cases


def some_rows(case: GqaCase, scales: str) -> tuple[slice, GqaCase]:
    """Evenly spaced batch rows, the last one included, and the call for these rows alone."""
    batch = len(case.q)
    step = -(-batch // ROWS_CHECKED)
    rows = slice((batch - 1) % step, None, step)
    per_row = ["q", "cache_seqlens"]
    if case.block_table is not None:
        per_row.append("block_table")
    else:
        per_row += ["k_cache", "v_cache", *(["k_scale", "v_scale"] if has_token_scales(scales) else [])]
    return rows, dataclasses.replace(case, **{name: getattr(case, name)[rows] for name in per_row})


def run_decode(bench: GqaBench, pool: Pool, ceilings: Mapping[str, float]) -> dict[str, Any]:
    """Check, time and record one decode case."""
    inputs = decode_inputs(bench, pool)
    out, lse = decode_call(inputs[0])()
    rows, sample = some_rows(inputs[0], bench.scales)
    check = check_gqa(out[rows], lse[rows], sample, name=bench.name)
    if not (out.isfinite().all() and lse.isfinite().all()):
        check = dataclasses.replace(check, problems=(*check.problems, "not every element of the output is finite"))

    def measure() -> dict[str, Any]:
        calls = [decode_call(case) for case in inputs]
        expected = Expected.of(("out", "lse"), [decode_call(case) for case in inputs[1:]], checked=(out, lse))
        peers = run_peer(bench, inputs) if bench.peer else {}
        if bench.paged_peers:
            peers |= run_flash(bench, inputs, pool) | run_xqa(bench, inputs, pool)
        timings = time_together(ways(prepare(calls, expected=expected), peers), sustained=bench.sustained)
        timing = timings[OURS]
        gb_per_s = bench.bytes_moved / timing.us / 1e3
        return {
            **timing.as_record(),
            "TFLOPs": round(bench.flops / timing.us / 1e6, 1),
            "GBps": round(gb_per_s, 1),
            "read_fraction": round(gb_per_s / ceilings["read_GBps"], 3),
            **(host_times(calls[0]) if bench.host else {}),
            "peers": entries(peers, timings),
        }

    return records.with_must(records.record_case(bench.key, check, measure), bench.must)


def decode_call(case: GqaCase) -> Callable[[], Any]:
    """A call that allocates out and lse full of poison, writes them, and returns them."""
    out, lse = (buffer.tensor for buffer in case.outputs())
    return functools.partial(cute_kernels.gqa_decode, **case.arguments(), out=out, lse=lse, return_lse=True)


def run_append(bench: AppendBench, device: str, ceilings: Mapping[str, float]) -> dict[str, Any]:
    """Check, time and record one append."""
    gen = generator(2, device)
    calls = [append_inputs(bench, gen) for _ in range(sets_to_outgrow_l2(bench.bytes_moved))]
    check = check_append(bench, calls[0])

    def measure() -> dict[str, Any]:
        names = written(bench)
        first = tuple(calls[0][name] for name in names)
        expected = Expected.of(names, [append_call(call, names) for call in calls[1:]], checked=first)
        timing = time_calls([append_call(call, names) for call in calls], expected=expected, sustained=False)
        gb_per_s = bench.bytes_moved / timing.us / 1e3
        speeds = {"GBps": round(gb_per_s, 1), "copy_fraction": round(gb_per_s / ceilings["copy_GBps"], 3)}
        host = host_times(functools.partial(cute_kernels.kv_int8_append, **calls[0]))
        return {**timing.as_record(), **speeds, **host}

    return records.with_must(records.record_case(bench.key, check, measure), bench.must)


def written(bench: AppendBench) -> tuple[str, ...]:
    """The arguments that an append overwrites: caches, and scales that it computes."""
    return ("k_cache", "v_cache", *(("k_scale", "v_scale") if has_token_scales(bench.scales) else ()))


def append_call(call: Mapping[str, Any], names: Sequence[str]) -> Callable[[], tuple[torch.Tensor, ...]]:
    """An append to copies of the named arguments; it returns the copies."""
    own = {name: call[name].clone() for name in names}

    def run() -> tuple[torch.Tensor, ...]:
        cute_kernels.kv_int8_append(**{**call, **own})
        return tuple(own.values())

    return run


def append_inputs(bench: AppendBench, gen: torch.Generator) -> dict[str, Any]:
    """Arguments of one append that fills its cache, by name."""
    sizes, device = bench.sizes, gen.device
    new = (torch.randn((APPEND_TOKENS, APPEND_HEADS, APPEND_DIM), generator=gen, device=device) for _ in "kv")
    call = dict(zip("kv", (values.bfloat16() for values in new), strict=True))
    shape = scale_shapes(LAYOUTS[bench.layout], sizes)[SCALE_NAMES[bench.scales]]
    # given scales: the largest code is 4 standard deviations, so that some values are clamped
    first = 0.0 if has_token_scales(bench.scales) else 4 / 127
    for name, cache_shape in zip("kv", cache_shapes(bench.layout, sizes, 1), strict=True):
        call[f"{name}_cache"] = torch.zeros(cache_shape, dtype=torch.int8, device=device)
        call[f"{name}_scale"] = torch.full(shape, first, dtype=torch.float16, device=device)
    # without pages, sequences in order, as a prefill writes them; with pages, shuffled pages
    starts = torch.arange(sizes.outer, device=device)
    if bench.page_size:
        starts = torch.randperm(sizes.outer, generator=gen, device=device)
    slots = starts.unsqueeze(1) * sizes.rows + torch.arange(sizes.rows, device=device)
    return {**call, "slot_mapping": slots.flatten(), "layout": bench.layout}


def check_append(bench: AppendBench, call: Mapping[str, Any]) -> Comparison:
    """Appends, then compares caches and scales with those of the reference, bit for bit."""
    written = ("k_cache", "v_cache", "k_scale", "v_scale")
    expected = {**call, **{name: call[name].clone() for name in written}}
    cute_kernels.kv_int8_append(**call)
    reference_append(**expected)
    parts = {name: (call[name] != expected[name]).float().mean().item() for name in written}
    problems = tuple(f"{name}: {part:.2%} differs from the reference" for name, part in parts.items() if part)
    return Comparison(bench.name, problems, rel_err=max(parts.values()), rel_err_baseline=0.0, worst=0.0, lse_err=0.0)


def run_peer(bench: GqaBench, inputs: Sequence[GqaCase]) -> dict[str, Peer]:
    """CuDNN's attention in torch over the same tokens in bfloat16."""

    def make() -> Peer:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            calls = [_peer_call(case) for case in inputs]
            rows, sample = some_rows(inputs[0], bench.scales)
            rel_err = relative_error(calls[0]().transpose(1, 2)[rows], reference_gqa_decode(**sample.arguments())[0])
            return Peer(prepare(calls), rel_err)

    return {PEER: ready(make)}


def _peer_call(case: GqaCase) -> Callable[[], torch.Tensor]:
    """Torch's attention over a contiguous BNSH cache of bfloat16; every sequence fills the cache."""
    k, v = unpacked(case.k_cache, case.k_scale), unpacked(case.v_cache, case.v_scale)
    attention = torch.nn.functional.scaled_dot_product_attention
    return functools.partial(attention, case.q.transpose(1, 2), k, v, enable_gqa=True)


def unpacked(cache: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """A BNSH cache, per tensor or per token and head, as bfloat16."""
    values = torch.empty(cache.shape, dtype=torch.bfloat16, device=cache.device)
    step = max(1, ELEMENTS_PER_CHUNK // math.prod(cache.shape[1:]))
    for start in range(0, len(cache), step):
        rows = slice(start, start + step)
        own = scale[rows] if scale is not None and scale.ndim > 1 else scale
        values[rows] = dequantize(cache[rows], own, "BNSH", "k", torch.bfloat16).transpose(1, 2)
    return values


def run_flash(bench: GqaBench, inputs: Sequence[GqaCase], pool: Pool) -> dict[str, Peer]:
    """FlashAttention 3 where it is installed: over the case's own cache, or as many tokens of each of its dtypes."""
    operators = flash_attention.fa3()
    if isinstance(operators, str):
        return {}
    return {
        f"fa3_{dtype}": ready(functools.partial(_flash_peer, bench, inputs, pool, operators, dtype))
        for dtype in FLASH_DTYPES[bench.kv_dtype]
    }


def _flash_peer(bench: GqaBench, inputs: Sequence[GqaCase], pool: Pool, operators: Any, dtype: str) -> Peer:
    cases = [_flash_case(bench, case, pool, dtype) for case in inputs]
    calls = [_flash_call(bench, case, operators) for case in cases]
    rows, sample = some_rows(cases[0], "none")
    expected, _ = reference_gqa_decode(**dataclasses.replace(sample, q=sample.q.bfloat16()).arguments())
    rel_err = relative_error(calls[0]().view_as(cases[0].q)[rows], expected)
    notes = [] if dtype == bench.kv_dtype else [f"a {dtype} cache of as many tokens"]
    notes += ["q rounded to fp8 before"] if dtype == "fp8" else []
    return Peer(prepare(calls), rel_err, ", ".join(notes), limit=FP8_LIMIT if dtype == "fp8" else PEER_LIMIT)


def _flash_case(bench: GqaBench, case: GqaCase, pool: Pool, dtype: str) -> GqaCase:
    """The case with q and caches as FA3 takes them: both in FP8, or both in 16 bits."""
    q = case.q.to(KV_DTYPES[dtype])
    if dtype == bench.kv_dtype:
        return dataclasses.replace(case, q=q)
    caches: dict[str, Any] = {f"{which}_cache": pool.codes(which, dtype, tuple(case.k_cache.shape)) for which in "kv"}
    return dataclasses.replace(case, q=q, **caches, k_scale=None, v_scale=None)


def _flash_call(bench: GqaBench, case: GqaCase, operators: Any) -> Callable[[], torch.Tensor]:
    """FA3 over pages, scheduled before, as vLLM does once for all layers."""
    device, q = case.q.device, case.q.flatten(0, 1)
    common: dict[str, Any] = {
        "cu_seqlens_q": torch.arange(bench.batch + 1, dtype=torch.int32, device=device) * bench.s_q,
        "seqused_k": case.cache_seqlens,
        "max_seqlen_q": bench.s_q,
        "max_seqlen_k": bench.s_k,
        **flash_attention.window_sizes(bench.window),
    }
    heads = {"num_heads": bench.h_q, "num_heads_k": bench.h_kv, "headdim": bench.d, "headdim_v": bench.d}
    pages = {"batch_size": bench.batch, "page_size": bench.page_size, "qkv_dtype": q.dtype}
    scales = {}
    if q.dtype.itemsize == 1:
        one = torch.ones((), dtype=torch.float32, device=device)
        for which, scale in (("q", None), ("k", case.k_scale), ("v", case.v_scale)):
            scales[f"{which}_descale"] = (one if scale is None else scale.float()).expand(bench.batch, bench.h_kv)
    return functools.partial(
        flash_attention.fa3_forward,
        operators,
        q=q,
        k=case.k_cache,
        v=case.v_cache,
        page_table=case.block_table,
        softmax_scale=bench.d**-0.5,
        scheduler_metadata=flash_attention.fa3_schedule(operators, **common, **heads, **pages),
        **common,
        **scales,
    )


def run_xqa(bench: GqaBench, inputs: Sequence[GqaCase], pool: Pool) -> dict[str, Peer]:
    """FlashInfer's XQA over an FP8 cache, of one query a sequence, where a form of it is compiled or can be."""
    form = xqa.Form(bench.d, bench.h_q // bench.h_kv, bench.page_size)
    if bench.kv_dtype == "bf16" or bench.s_q > 1 or bench.window is not None or form not in xqa.FORMS:
        return {}
    wrapper = xqa.wrapper(form)
    if isinstance(wrapper, str):
        # sources that cannot be compiled are no version, so the case says it
        return {} if xqa.version().startswith("missing") else {"xqa_fp8": Peer(failed=wrapper[:200])}
    return {"xqa_fp8": ready(functools.partial(_xqa_peer, bench, inputs, pool, wrapper))}


def _xqa_peer(bench: GqaBench, inputs: Sequence[GqaCase], pool: Pool, wrapper: Callable[..., None]) -> Peer:
    cases = [_flash_case(bench, case, pool, "fp8") for case in inputs]
    # both caches have one scale, and the kernel rounds q to FP8 again
    cases = [dataclasses.replace(case, q=case.q.bfloat16(), v_scale=case.k_scale) for case in cases]
    calls = [xqa.call(wrapper, case) for case in cases]
    rows, sample = some_rows(cases[0], "none")
    rel_err = relative_error(calls[0]()[rows], reference_gqa_decode(**sample.arguments())[0])
    notes = [] if bench.kv_dtype == "fp8" else ["a fp8 cache of as many tokens"]
    notes += ["q in FP8"] if cases[0].k_scale is None else ["q in FP8, one scale for keys and values"]
    return Peer(prepare(calls), rel_err, ", ".join(notes), limit=FP8_LIMIT)
