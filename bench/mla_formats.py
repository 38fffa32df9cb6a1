"""The benchmarks of MLA decoding over the other latent formats, with one cache or two; run by `gpu_check.py`.

A window of 128 tokens and a compressed cache in one softmax, with sinks, as DeepSeek-V4 has them. Every case is checked
against the oracle on a few batch rows before it is timed. FlashMLA's V4 kernel runs on the same bytes, with q padded to
the heads that it takes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

import cute_kernels
from bench import records
from bench.in_layer import prepare, time_together
from bench.peers import OURS, PEER_LIMIT, Peer, entries, ready, ways
from bench.timing import Expected, sets_to_outgrow_l2
from fp8_mla import FORMATS, TokenFormat, pack, read_pages, reference_decode, unpack, write_pages
from tests.kit.compare import Comparison, compare, relative_error, rounding_noise
from tests.kit.mla_cases import PoisonedOutput, generator
from tests.kit.values import FAMILIES, fill_pages, query, sort_indices

WINDOW: Final = 128
WINDOW_TOKENS: Final = 1 << 17
"""Of the windows of all requests: 76 MB, more than the L2 cache."""
CONTEXT: Final = 8192
"""Entries of a compressed cache that a request picks from."""
CONTEXTS: Final = 128
PAGE_PADDING: Final = {"v4": 576}
"""Pages are padded to a multiple of so many bytes, as engines do; others to 512."""
TOKENS_PER_CHUNK: Final = 1 << 18
ROWS_CHECKED: Final = 6
PEER_FORMAT, PEER_HEADS = "v4", (64, 128)
"""What FlashMLA has a Hopper kernel of."""
RESULTS: Final = ("out", "lse")


@dataclass(frozen=True)
class FormatBench:
    """One benchmark.

    formats     of the first cache and of the second, if there are two
    topk        keys of the first
    extra_topk  of the second
    page_size   of the second cache, or of the only one
    ragged      requests have 64 to `extra_topk` keys of the second, the first ones of its context
    must        figures that the record has to reach
    """

    formats: tuple[str, ...]
    batch: int
    h_q: int
    s_q: int = 1
    topk: int = WINDOW
    extra_topk: int = 0
    page_size: int = 64
    ragged: bool = False
    must: Mapping[str, float] = field(default_factory=dict)
    quick: bool = False

    @property
    def name(self) -> str:
        """As `--only` matches it and the table prints it."""
        keys = f"topk {self.topk}" + (f" + {self.extra_topk}" if self.extra_topk else "") + " ragged" * self.ragged
        return f"mla_fp8_decode {' + '.join(self.formats)} {self.batch}x{self.h_q}x{self.s_q} {keys}"

    @property
    def key(self) -> dict[str, Any]:
        """What names the case in a results file."""
        key: dict[str, Any] = {"op": "mla_fp8_decode", "mode": "sparse", "cache_format": self.formats[0]}
        key |= {"batch": self.batch, "h_q": self.h_q, "s_q": self.s_q, "topk": self.topk}
        if self.extra_topk:
            key |= {"extra_cache_format": self.formats[1], "extra_topk": self.extra_topk}
        return {**key, "ragged": True} if self.ragged else key

    @property
    def extra_lengths(self) -> list[int]:
        """Keys of each request in the second cache."""
        if not self.ragged:
            return [self.extra_topk] * self.batch
        return random.Random(self.batch).choices(range(64, self.extra_topk + 1), k=self.batch)

    @property
    def keys_read(self) -> tuple[int, int]:
        """Of all queries, in each cache."""
        return self.s_q * self.batch * self.topk, self.s_q * sum(self.extra_lengths)

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes a call can move: keys, indices, q, out, lse."""
        sizes = [FORMATS[name].token_bytes for name in self.formats]
        tokens = sum(number * size for number, size in zip(self.keys_read, sizes, strict=False))
        first = FORMATS[self.formats[0]]
        rows = self.batch * self.s_q * self.h_q
        return tokens + 4 * sum(self.keys_read) + rows * (2 * first.d_qk + 2 * first.d_v + 4)

    @property
    def flops(self) -> int:
        """Both products."""
        first = FORMATS[self.formats[0]]
        return 2 * (first.d_qk + first.d_v) * self.h_q * sum(self.keys_read)

    @property
    def sets(self) -> int:
        """Input sets to rotate."""
        return sets_to_outgrow_l2(self.bytes_moved)


def _cases() -> tuple[FormatBench, ...]:
    """All cases; `must` is the project's goal, in times of FlashMLA's V4 kernel."""
    v4 = functools.partial(FormatBench, ("v4", "v4"))
    fp4 = functools.partial(FormatBench, ("v4.1", "v4.1_fp4"))
    return (
        v4(128, 128, 2, extra_topk=1024, must={"ratio": 1.35}, quick=True),
        v4(128, 128, 2, extra_topk=512, must={"ratio": 1.3}),
        v4(128, 64, extra_topk=1024, must={"ratio": 1.4}),
        v4(64, 128, extra_topk=1024, must={"ratio": 1.3}),
        v4(1, 128, extra_topk=1024, must={"ratio": 1.3}),
        v4(8, 128, extra_topk=1024, must={"ratio": 1.3}),
        v4(16, 64, extra_topk=1024, must={"ratio": 1.3}),
        v4(64, 64, extra_topk=CONTEXT, page_size=2, ragged=True, must={"ratio": 1.3}),
        v4(64, 16, extra_topk=CONTEXT, page_size=2, ragged=True, must={"ratio": 1.8}),
        v4(128, 16, extra_topk=1024, must={"ratio": 2.2}),
        FormatBench(("v4",), 128, 128, 2, topk=2048, must={"ratio": 1.4}),
        fp4(128, 128, 2, extra_topk=1024, quick=True),
        fp4(128, 64, extra_topk=1024),
        fp4(128, 16, extra_topk=1024),
        FormatBench(("v3.2_nope",), 128, 128, 2, topk=2176),
    )


CASES: Final = _cases()


class FormatCaches:
    """Paged caches of a family of values, made when first asked for; pages end where engines let them end."""

    def __init__(self, device: str = "cuda", family: str = "normal") -> None:
        self.device, self.family = device, family
        self._made: dict[tuple[str, int, int], torch.Tensor] = {}

    def get(self, name: str, tokens: int, page_size: int, run: int = 0) -> torch.Tensor:
        """(pages, page_size, bytes) uint8, planar where the format may be; a family may sort each `run` tokens."""
        key = (name, tokens, page_size)
        if key not in self._made:
            self._made[key] = self._fill(FORMATS[name], tokens, page_size, run)
        return self._made[key]

    def _fill(self, token_format: TokenFormat, tokens: int, page_size: int, run: int) -> torch.Tensor:
        cache = empty_cache(token_format, tokens, page_size, self.device)
        if self.family != "normal":
            return fill_pages(cache, self.family, token_format, run=run, seed=4)
        gen = generator(4, self.device)
        for start in range(0, tokens, TOKENS_PER_CHUNK):
            slots = torch.arange(start, min(start + TOKENS_PER_CHUNK, tokens), device=self.device)
            latents = torch.randn((len(slots), token_format.d_qk), generator=gen, device=self.device)
            write_pages(cache, slots, pack(latents, token_format=token_format), token_format=token_format)
        return cache


def empty_cache(token_format: TokenFormat, tokens: int, page_size: int, device: str) -> torch.Tensor:
    """(pages, page_size, bytes) uint8 of zeros, pages padded at their end."""
    unit, size = PAGE_PADDING.get(token_format.name, 512), token_format.token_bytes
    pages, stride = -(-tokens // page_size), -(-page_size * size // unit) * unit
    if len(token_format.row_bytes) == 1:
        stride = page_size * size
    memory = torch.zeros(pages * stride, dtype=torch.uint8, device=device)
    return memory.as_strided((pages, page_size, size), (stride, size, 1))


def inputs(bench: FormatBench, caches: FormatCaches, family: str = "normal") -> list[dict[str, Any]]:
    """The arguments of each call of the rotated input sets, over caches of the same family of values."""
    device, gen = caches.device, generator(bench.batch * 1000 + bench.h_q + bench.s_q, caches.device)
    compressed = caches.get(bench.formats[-1], CONTEXT * CONTEXTS, bench.page_size, CONTEXT)
    window = caches.get(bench.formats[0], WINDOW_TOKENS, 64, WINDOW) if bench.extra_topk else compressed
    sinks = torch.randn((bench.h_q,), generator=gen, dtype=torch.float32, device=device)
    lengths = torch.tensor(bench.extra_lengths, dtype=torch.int32, device=device)
    d_qk = FORMATS[bench.formats[0]].d_qk
    made = []
    for number in range(bench.sets):
        shape = (bench.batch, bench.s_q, bench.h_q, d_qk)
        q = query(family, shape, gen)
        requests = torch.arange(bench.batch, device=device) + number * bench.batch
        call: dict[str, Any] = {"q": q, "kv_cache": window, "cache_format": bench.formats[0], "s_aux": sinks}
        if not bench.extra_topk:
            call["indices"] = _picked(bench, requests, bench.topk, gen, family)
            made.append(call)
            continue
        first = requests * WINDOW % WINDOW_TOKENS
        call["indices"] = _consecutive(bench, first, WINDOW)
        call |= {"extra_kv_cache": compressed, "extra_cache_format": bench.formats[1]}
        if bench.ragged:
            call["extra_indices"] = _consecutive(bench, requests % CONTEXTS * CONTEXT, bench.extra_topk)
            call["extra_topk_length"] = lengths
        else:
            call["extra_indices"] = _picked(bench, requests, bench.extra_topk, gen, family)
        made.append(call)
    return made


def _consecutive(bench: FormatBench, first: torch.Tensor, keys: int) -> torch.Tensor:
    slots = first.view(-1, 1, 1) + torch.arange(keys, device=first.device)
    return slots.expand(-1, bench.s_q, -1).int().contiguous()


def _picked(bench: FormatBench, requests: torch.Tensor, keys: int, gen: torch.Generator, family: str) -> torch.Tensor:
    """Different entries of each request's context, in any order, as an indexer picks them; sorted as a family asks."""
    order = torch.rand((bench.batch * bench.s_q, CONTEXT), generator=gen, dtype=torch.float32, device=gen.device)
    picked = order.topk(keys, sorted=False).indices.view(bench.batch, bench.s_q, keys)
    indices = (picked + (requests % CONTEXTS * CONTEXT).view(-1, 1, 1)).int()
    if FAMILIES[family].sorted:
        sort_indices(indices)
    return indices


def run(
    bench: FormatBench, caches: FormatCaches, peer: types.ModuleType | str, ceilings: Mapping[str, float]
) -> dict[str, Any]:
    """Check, time and record one case."""
    calls_of = inputs(bench, caches)
    out, lse = decode_call(calls_of[0])()
    rows = torch.linspace(0, bench.batch - 1, min(ROWS_CHECKED, bench.batch)).long().tolist()
    sample = some_rows(calls_of[0], rows)
    check = check_rows(out[rows], lse[rows], sample, bench.name)
    if not (out.isfinite().all() and lse.isfinite().all()):
        check = dataclasses.replace(check, problems=(*check.problems, "not every element of the output is finite"))

    def measure() -> dict[str, Any]:
        calls = [decode_call(call) for call in calls_of]
        bits = Expected.of(RESULTS, [decode_call(call) for call in calls_of[1:]], checked=(out, lse))
        peers = _peers(bench, calls_of, peer, rows)
        timings = time_together(ways(prepare(calls, expected=bits), peers), sustained=False)
        timing = timings[OURS]
        gb_per_s = bench.bytes_moved / timing.us / 1e3
        return {
            **timing.as_record(),
            "TFLOPs": round(bench.flops / timing.us / 1e6, 1),
            "GBps": round(gb_per_s, 1),
            "read_fraction": round(gb_per_s / ceilings["read_GBps"], 3),
            "peers": entries(peers, timings),
        }

    return records.with_must(records.record_case(bench.key, check, measure), bench.must)


def decode_call(call: Mapping[str, Any]) -> Callable[[], Any]:
    """A call that writes to poisoned memory of its own, and returns out and lse."""
    q = call["q"]
    shape = tuple(q.shape[:3])
    out = PoisonedOutput((*shape, 512), torch.bfloat16, q.device, padded=False).tensor
    lse = PoisonedOutput(shape, torch.float32, q.device, padded=False).tensor
    return functools.partial(cute_kernels.mla_fp8_decode, **call, out=out, lse=lse, return_lse=True)


def some_rows(call: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """The same call for some batch rows."""
    per_row = ("q", "indices", "topk_length", "extra_indices", "extra_topk_length")
    pick = torch.tensor(list(rows), dtype=torch.long, device=call["q"].device)
    return {name: value[pick] if name in per_row and value is not None else value for name, value in call.items()}


def check_rows(out: torch.Tensor, lse: torch.Tensor, call: Mapping[str, Any], name: str) -> Comparison:
    """The tolerance rule, with the same computation in bfloat16 as its yardstick."""
    expected, expected_lse = reference_decode(**call)
    emulated, noise = emulate(call)
    return compare(out, expected, emulated, noise=noise, lse=lse, expected_lse=expected_lse, name=name)


def emulate(call: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output with keys and P in bfloat16, float32 sums; and the standard deviation of rounding P at each element."""
    parts = [_keys_of(call, "kv_cache", "cache_format", "indices", "topk_length")]
    if call.get("extra_kv_cache") is not None:
        parts.append(_keys_of(call, "extra_kv_cache", "extra_cache_format", "extra_indices", "extra_topk_length"))
    keys, seen = (torch.cat(both, dim=2) for both in zip(*parts, strict=True))
    q = call["q"].float()
    scores = torch.einsum("bshd,bskd->bshk", q, keys) * q.shape[-1] ** -0.5
    scores = torch.where(seen.unsqueeze(2), scores, -torch.inf)
    weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    total = weights.sum(dim=-1)
    lse = scores.amax(dim=-1) + total.log()
    share = torch.sigmoid(lse - call["s_aux"]) / total if call.get("s_aux") is not None else 1 / total
    values = keys[..., :512]
    out = torch.einsum("bshk,bskd->bshd", weights.bfloat16().float(), values) * share.unsqueeze(-1)
    p = weights.double() * share.unsqueeze(-1)
    squares = torch.einsum("bshk,bskd->bshd", p.square(), values.double().square())
    return out.bfloat16(), rounding_noise(torch.bfloat16) * squares.sqrt()


def _keys_of(
    call: Mapping[str, Any], cache: str, token_format: str, indices: str, length: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (batch, s_q, topk, d_qk) float32 of bfloat16 numbers, and which of them count."""
    slots, name = call[indices], call[token_format]
    keys = unpack(read_pages(call[cache], slots, token_format=name), torch.bfloat16, token_format=name).float()
    places = torch.arange(slots.shape[2], device=slots.device)
    most = slots.shape[2] if call.get(length) is None else call[length].view(-1, 1, 1)
    return keys, (places < most).expand(slots.shape)


def _peers(
    bench: FormatBench,
    calls_of: Sequence[Mapping[str, Any]],
    peer: types.ModuleType | str,
    rows: list[int],
    limit: float = PEER_LIMIT,
) -> dict[str, Peer]:
    """FlashMLA's V4 kernel; `limit` of its relative error."""
    if isinstance(peer, str) or set(bench.formats) != {PEER_FORMAT}:
        return {}

    def make() -> Peer:
        heads = next(heads for heads in PEER_HEADS if heads >= bench.h_q)
        calls = [_peer_call(call, heads, peer) for call in calls_of]
        out = calls[0]()[0][:, :, : bench.h_q]
        expected, _ = reference_decode(**some_rows(calls_of[0], rows))
        note = "" if heads == bench.h_q else f"q padded to {heads} heads"
        return Peer(prepare(calls), relative_error(out[rows], expected), note, limit=limit)

    return {"flash_mla": ready(make)}


def _peer_call(call: Mapping[str, Any], heads: int, peer: types.ModuleType) -> Callable[[], Any]:
    """FlashMLA over the same arguments; what it plans in its first call is kept."""
    more = heads - call["q"].shape[2]
    pad = torch.nn.functional.pad
    extra = call.get("extra_kv_cache")
    meta, _ = peer.get_mla_metadata()
    return functools.partial(
        peer.flash_mla_with_kvcache,
        q=pad(call["q"], (0, 0, 0, more)),
        k_cache=_as_flash_mla(call["kv_cache"]),
        block_table=None,
        cache_seqlens=None,
        head_dim_v=512,
        tile_scheduler_metadata=meta,
        softmax_scale=call["q"].shape[-1] ** -0.5,
        is_fp8_kvcache=True,
        indices=call["indices"],
        attn_sink=pad(call["s_aux"], (0, more), value=-math.inf),
        extra_k_cache=None if extra is None else _as_flash_mla(extra),
        extra_indices_in_kvcache=call.get("extra_indices"),
        extra_topk_length=call.get("extra_topk_length"),
    )


def _as_flash_mla(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.float8_e4m3fn).unsqueeze(2)
