"""The benchmarks of FP8 MLA decoding, of its append and of the merge; run by `gpu_check.py`.

Every case is checked against the oracle on a few batch rows before it is timed, over input sets that together outgrow
the L2 cache. What the timed graph writes has the bits of eager calls, in every set. Where FlashMLA can be imported it
runs on the same tensors in the same process.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import cute_kernels
from bench import records
from bench.in_layer import prepare, time_calls, time_together
from bench.peers import OURS, PEER_LIMIT, Peer, entries, load, ready, ways
from bench.timing import Expected, host_times, sets_to_outgrow_l2
from cute_kernels.budget import model
from cute_kernels.budget.rates import H200, Rates
from cute_kernels.budget.variants import MLA_BUILT, MLA_HALF, MLA_NARROW, TURNS, MlaVariant
from cute_kernels.mla.crossover.spec import MlaCrossoverSpec
from cute_kernels.mla.plan import EXCHANGES, DecodePlan, plan_decode
from cute_kernels.mla.spec import FEW, WIDE
from fp8_mla import QK_DIM, TOKEN_BYTES, V_DIM, pack, read_pages, reference_decode, unpack
from fp8_mla.formats import V3_2, TokenFormat
from tests.kit.compare import Comparison, check_decode, compare, relative_error
from tests.kit.mla_cases import DecodeCase, generator, latent_tokens
from tests.kit.values import FAMILIES, fill_pages, query, sort_indices

PAGE_SIZE = 64
CONTEXT = 32768
"""Tokens of the sequence that a sparse request picks its keys from."""
SPARSE_CONTEXTS = 64
"""At least so many contexts lie in the cache (1.4 GB), and the rotated input sets walk over them."""
ROWS_CHECKED = 6
LONGEST_TOPK = 16384
PEER_SPARSE_HEADS = (64, 128)
"""What FlashMLA's FP8 kernel takes; its users pad."""
RESULTS = ("out", "lse")
APPEND_TOKENS = 65536
APPEND_MUST = {"copy_fraction": 0.8}
FLOPS_PER_PAIR = 2 * (QK_DIM + V_DIM)


@dataclass(frozen=True)
class DecodeBench:
    """One decode benchmark.

    keys    topk, or the sequence length
    ragged  requests have 1 to `keys` of them, all numbers equally likely
    scores  forced; None: as planned
    sustained  whether the times under load are taken too
    power   whether the power under load is measured with them
    host    whether to time the eager call too
    must    figures that the record has to reach
    """

    mode: str
    batch: int
    h_q: int
    s_q: int
    keys: int = 2048
    quick: bool = False
    host: bool = False
    ragged: bool = False
    scores: str | None = None
    sustained: bool = False
    power: bool = False
    must: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As `--only` matches it and the table prints it."""
        keys = "topk" if self.mode == "sparse" else "s_k"
        name = f"mla_fp8_decode {self.mode} {self.batch}x{self.h_q}x{self.s_q} {keys} {self.keys}"
        return name + " ragged" * self.ragged + (f" scores {self.scores}" if self.scores else "")

    @property
    def sizes(self) -> dict[str, int]:
        """As the planner and the cycle budget take them."""
        return {"batch": self.batch, "h_q": self.h_q, "s_q": self.s_q}

    @property
    def key(self) -> dict[str, Any]:
        """What names the case in a results file."""
        keys = "topk" if self.mode == "sparse" else "s_k"
        ragged = {"ragged": True} if self.ragged else {}
        return {"op": "mla_fp8_decode", "mode": self.mode, **self.sizes, keys: self.keys, **ragged, **self.forced}

    @property
    def forced(self) -> dict[str, str]:
        """Arguments that are not left to the planner."""
        return {"scores": self.scores} if self.scores else {}

    @property
    def exchanges(self) -> bool:
        """Whether each exchange is timed too: of the heads that have one."""
        return self.h_q > WIDE

    @property
    def lengths(self) -> list[int]:
        """Keys of each request."""
        if not self.ragged:
            return [self.keys] * self.batch
        return random.Random(self.batch).choices(range(1, self.keys + 1), k=self.batch)

    @property
    def tokens_read(self) -> int:
        """Cache tokens that a call has to read: the queries of a sequence share a dense cache, not a sparse list."""
        return sum(self.lengths) * (self.s_q if self.mode == "sparse" else 1)

    @property
    def pairs(self) -> int:
        """Keys of all queries."""
        return sum(self.lengths) * self.s_q

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes a call can move: keys, q, out, lse, and the index list or block table."""
        rows = self.batch * self.s_q * self.h_q
        index_entries = self.tokens_read if self.mode == "sparse" else self.tokens_read // PAGE_SIZE
        return self.tokens_read * TOKEN_BYTES + rows * (2 * QK_DIM + 2 * V_DIM + 4) + 4 * index_entries

    @property
    def flops(self) -> int:
        """Both products."""
        return self.pairs * self.h_q * FLOPS_PER_PAIR

    @property
    def sets(self) -> int:
        """Input sets to rotate."""
        return sets_to_outgrow_l2(self.bytes_moved)

    @property
    def cache_tokens(self) -> int:
        """Tokens that the cache must hold for this case."""
        if self.mode == "sparse":
            return CONTEXT * max(self.batch, SPARSE_CONTEXTS)
        return self.sets * self.batch * self.keys


def _headlines() -> Iterator[DecodeBench]:
    """The cases that records have with scores named. `must` is the project's goal.

    Under load are those of the headlines; the power is that of the longest.
    """
    cases: list[tuple[tuple[str, int, int, int, int], float]] = [
        (("sparse", 8, 128, 1, 2048), 1.4),
        (("sparse", 16, 128, 1, 2048), 1.4),
        (("sparse", 64, 128, 1, 2048), 1.25),
        (("sparse", 128, 128, 2, 2048), 1.3),
        (("sparse", 128, 64, 1, 2048), 1.25),
        (("sparse", 148, 128, 2, LONGEST_TOPK), 1.35),
        (("sparse", 128, 128, 4, 512), 1.25),
        (("dense", 64, 128, 1, 8192), 1.0),
    ]
    for sizes, ratio in cases:
        mode, batch, heads, s_q, keys = sizes
        yield DecodeBench(
            *sizes,
            scores="exact",
            quick=heads == 128 and batch in (64, 128) and keys > 512,
            host=mode == "dense",
            sustained=s_q == 2 or mode == "dense",
            power=keys == LONGEST_TOPK,
            must={"ratio": ratio},
        )


DECODE_CASES = (
    DecodeBench("sparse", 1, 128, 1, quick=True, host=True, must={"ratio": 1.4}),
    *(DecodeBench("sparse", batch, 128, 1, must={"ratio": 1.4}) for batch in (2, 4)),
    *_headlines(),
    DecodeBench("sparse", 128, 128, 1),
    DecodeBench("sparse", 2, 128, 2),
    DecodeBench("sparse", 74, 128, 3, 1152),
    DecodeBench("sparse", 128, 128, 2, ragged=True),
    *(DecodeBench("sparse", 128, heads, 1, must={"us": 55.0}) for heads in (32, 24)),
    *(DecodeBench("sparse", 128, heads, 1, must={"read_fraction": 0.82}) for heads in (16, 8)),
    *(DecodeBench("sparse", 8, heads, 1, must={"us": 13.0}) for heads in (16, 8)),
    DecodeBench("dense", 1, 128, 1, 131072, must={"ratio": 1.0}),
    DecodeBench("dense", 128, 128, 2, 8192),
    DecodeBench("dense", 128, 64, 1, 8192),
    DecodeBench("dense", 128, 16, 1, 8192, must={"read_fraction": 0.8}),
    DecodeBench("dense", 128, 32, 1, 8192),
    DecodeBench("dense", 16, 128, 1, 8192),
    DecodeBench("dense", 32, 128, 1, 4096),
    DecodeBench("dense", 32, 16, 1, 8192, must={"read_fraction": 0.85}),
    DecodeBench("dense", 8, 16, 1, 32768, must={"read_fraction": 0.85}),
    DecodeBench("dense", 1, 16, 1, 131072, must={"read_fraction": 0.62}),
    DecodeBench("dense", 64, 128, 1, 8192, ragged=True),
    DecodeBench("dense", 128, 16, 1, 8192, ragged=True),
)
PREDICTED_CASES = tuple(bench for bench in DECODE_CASES if not bench.ragged)
"""What the cycle budget has a prediction of: it knows no lengths."""


def plan(bench: DecodeBench, sms: int) -> DecodePlan:
    """How the planner cuts a case on a card with so many SMs."""
    sparse = bench.mode == "sparse"
    ragged = bench.ragged or not sparse
    return plan_decode(sparse=sparse, max_keys=bench.keys, num_sms=sms, ragged=ragged, **bench.sizes)


def launch(bench: DecodeBench, sms: int) -> model.MlaLaunch:
    """The same as the cycle budget takes it, which knows no lengths.

    Raises:
        ValueError: they are ragged.
    """
    if bench.ragged:
        raise ValueError(f"bench: got {bench.name}, needs requests of one length")
    made = plan(bench, sms)
    cut = {"num_splits": made.num_splits, "ctas": made.ctas, "tiles_per_split": made.tiles_per_split}
    return model.mla_launch(mode=bench.mode, **bench.sizes, **cut, shared=made.spec.balanced)


def built(bench: DecodeBench, sms: int) -> MlaVariant:
    """The variant of the kernel that the planner asks for."""
    spec = plan(bench, sms).spec
    if isinstance(spec, MlaCrossoverSpec):
        return TURNS
    return MLA_BUILT if spec.heads == WIDE else MLA_NARROW if spec.heads <= FEW else MLA_HALF


def predict(bench: DecodeBench, variant: MlaVariant | None = None, rates: Rates = H200) -> model.Prediction:
    """What the cycle budget says of a case; see docs/maintainers/budget.md."""
    variant = variant or built(bench, rates.sms)
    return model.predict_mla(launch(bench, rates.sms), variant, rates)


def predicted_cycles(bench: DecodeBench, rates: Rates = H200) -> float:
    """The prediction in the unit of "cycles_per_token"."""
    return round(model.spread_cycles(predict(bench, rates=rates).us, rates.sm_mhz, tokens_spread(bench), rates.sms), 1)


def tokens_spread(bench: DecodeBench) -> int:
    """Keys of all queries, once for each group of 64 heads."""
    return bench.pairs * -(-bench.h_q // WIDE)


class Caches:
    """The caches that all cases share, made when first asked for.

    family  of values, see `tests.kit.values`
    run     tokens of a context, within which a family may sort them
    """

    def __init__(self, tokens: int, device: str = "cuda", family: str = "normal", run: int = 0) -> None:
        self._pages, self._device = -(-tokens // PAGE_SIZE), device
        self._family, self._run = family, run
        self._fp8: torch.Tensor | None = None
        self._bf16: torch.Tensor | None = None

    @property
    def fp8(self) -> torch.Tensor:
        """(pages, 64, 656) uint8."""
        if self._fp8 is None and self._family != "normal":
            made = torch.empty((self._pages, PAGE_SIZE, TOKEN_BYTES), dtype=torch.uint8, device=self._device)
            self._fp8 = fill_pages(made, self._family, V3_2, run=self._run, seed=1)
        elif self._fp8 is None:
            tokens = latent_tokens(self._pages * PAGE_SIZE, generator(1, self._device))
            self._fp8 = tokens.view(self._pages, PAGE_SIZE, TOKEN_BYTES)
        return self._fp8

    @property
    def bf16(self) -> torch.Tensor:
        """(pages, 64, 1, 576) bfloat16: the same tokens unpacked, for peers without an FP8 cache."""
        if self._bf16 is None:
            shape = (self._pages, PAGE_SIZE, 1, QK_DIM)
            self._bf16 = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
            for start in range(0, self._pages, 4096):
                self._bf16[start : start + 4096, :, 0] = unpack(self.fp8[start : start + 4096])
        return self._bf16

    def drop_bf16(self) -> None:
        """Frees the tokens that were unpacked."""
        self._bf16 = None


def import_peer() -> types.ModuleType | str:
    """FlashMLA's module, or why there is none."""
    return load("flash_mla")


def decode_inputs(bench: DecodeBench, cache: torch.Tensor, family: str = "normal") -> list[DecodeCase]:
    """The rotated input sets of one case, over one cache of the same family of values.

    Where the family sorts, so are lists of keys, and the pages of a sequence follow each other in the cache.
    """
    device = str(cache.device)
    gen = generator(bench.batch * 1000 + bench.h_q + bench.s_q, device)
    num_pages = cache.shape[0]
    lengths = torch.tensor(bench.lengths, dtype=torch.int32, device=device)
    cases = []
    for number in range(bench.sets):
        q = query(family, (bench.batch, bench.s_q, bench.h_q, QK_DIM), gen)
        if bench.mode == "sparse":
            contexts = num_pages * PAGE_SIZE // CONTEXT
            first = (torch.arange(bench.batch, device=device) + number * bench.batch) % contexts * CONTEXT
            # the leading places of a random order are keys without repetition, as an indexer picks them
            order = torch.rand((bench.batch * bench.s_q, CONTEXT), generator=gen, device=device)
            picked = order.topk(bench.keys, sorted=False).indices.view(bench.batch, bench.s_q, bench.keys)
            indices = (picked + first.view(-1, 1, 1)).int()
            if FAMILIES[family].sorted:
                sort_indices(indices)
            cases.append(DecodeCase(q, cache, indices=indices, topk_length=lengths if bench.ragged else None))
            continue
        needed = bench.batch * bench.keys // PAGE_SIZE
        pages = torch.randperm(num_pages, generator=gen, device=device)[:needed]
        if FAMILIES[family].sorted:
            pages = torch.arange(number * needed, (number + 1) * needed, device=device)
        cases.append(DecodeCase(q, cache, block_table=pages.view(bench.batch, -1).int(), cache_seqlens=lengths))
    return cases


def run_decode(
    bench: DecodeBench, caches: Caches, peer: types.ModuleType | str, ceilings: Mapping[str, float]
) -> dict[str, Any]:
    """Check, time and record one decode case."""
    inputs = decode_inputs(bench, caches.fp8)
    first = inputs[0]
    out, lse = decode_call(first, **bench.forced)()
    rows = torch.linspace(0, bench.batch - 1, min(ROWS_CHECKED, bench.batch)).long().tolist()
    sample = first.rows(rows)
    check = check_decode(out[rows], lse[rows], name=bench.name, **sample.arguments())
    if not (out.isfinite().all() and lse.isfinite().all()):
        check = dataclasses.replace(check, problems=(*check.problems, "not every element of the output is finite"))

    def measure() -> dict[str, Any]:
        calls = [decode_call(case, **bench.forced) for case in inputs]
        bits = Expected.of(RESULTS, [decode_call(case, **bench.forced) for case in inputs[1:]], checked=(out, lse))
        peers = _peers(bench, inputs, caches, peer, rows)
        together = ways(prepare(calls, expected=bits), peers)
        timings = time_together(together, sustained=bench.sustained, power=bench.power)
        timing = timings[OURS]
        gb_per_s = bench.bytes_moved / timing.us / 1e3
        return {
            **timing.as_record(),
            "TFLOPs": round(bench.flops / timing.us / 1e6, 1),
            "GBps": round(gb_per_s, 1),
            "read_fraction": round(gb_per_s / ceilings["read_GBps"], 3),
            "cycles_per_token": _cycles_per_token(bench, timing.us, timing.sm_mhz_rested),
            **({} if bench.ragged else {"predicted_cycles_per_token": predicted_cycles(bench)}),
            **(host_times(calls[0]) if bench.host else {}),
            **({"exchange_us": forced_times(inputs, "exchange", EXCHANGES)} if bench.exchanges else {}),
            "peers": entries(peers, timings),
        }

    return records.with_must(records.record_case(bench.key, check, measure), bench.must)


def decode_call(case: DecodeCase, **forced: str) -> Callable[[], Any]:
    """A call that writes to poisoned memory of its own, and returns out and lse."""
    out, lse = case.outputs()
    options: dict[str, Any] = {**case.options(), **forced, "out": out.tensor, "lse": lse.tensor}
    return functools.partial(cute_kernels.mla_fp8_decode, case.q, case.kv_cache, **options, return_lse=True)


def forced_times(inputs: list[DecodeCase], argument: str, choices: Sequence[str]) -> dict[str, float]:
    """Microseconds of a call in-layer with each choice of an argument forced, in turns."""
    graphs = {}
    for choice in choices:
        forced = {argument: choice}
        expected = Expected.of(RESULTS, [decode_call(case, **forced) for case in inputs])
        graphs[choice] = prepare([decode_call(case, **forced) for case in inputs], expected=expected)
    return {choice: round(timing.us, 3) for choice, timing in time_together(graphs, sustained=False).items()}


def run_append(ceilings: Mapping[str, float], device: str = "cuda", token_format: TokenFormat = V3_2) -> dict[str, Any]:
    """Check, time and record the append of 65,536 tokens to shuffled pages, planar ones where a format has them."""
    width, token_bytes = token_format.d_qk, token_format.token_bytes
    bytes_moved = APPEND_TOKENS * (2 * width + token_bytes + 8)
    gen = generator(2, device)
    sets = []
    for _ in range(sets_to_outgrow_l2(bytes_moved)):
        kv = torch.randn((APPEND_TOKENS, width), generator=gen, device=device).bfloat16()
        cache = torch.zeros((APPEND_TOKENS // PAGE_SIZE, PAGE_SIZE, token_bytes), dtype=torch.uint8, device=device)
        pages = torch.randperm(len(cache), generator=gen, device=device)
        slots = (pages.unsqueeze(1) * PAGE_SIZE + torch.arange(PAGE_SIZE, device=device)).flatten()
        sets.append((kv, cache, slots))
    kv, _, slots = sets[0]
    options: dict[str, Any] = {} if token_format == V3_2 else {"cache_format": token_format.name}
    cache = append_call(*sets[0], **options)()
    packed = pack(kv, token_format=token_format)
    wrong = (read_pages(cache, slots, token_format=token_format) != packed).any(dim=1).float().mean().item()
    problems = (f"{wrong:.2%} of the tokens differ from fp8_mla.pack",) if wrong else ()
    check = Comparison("mla_fp8_append", problems, rel_err=wrong, rel_err_baseline=0.0, worst=0.0, lse_err=0.0)

    def measure() -> dict[str, Any]:
        expected = Expected.of(["kv_cache"], [append_call(*one, **options) for one in sets[1:]], checked=(cache,))
        timing = time_calls([append_call(*one, **options) for one in sets], expected=expected, sustained=False)
        gb_per_s = bytes_moved / timing.us / 1e3
        speeds = {"GBps": round(gb_per_s, 1), "copy_fraction": round(gb_per_s / ceilings["copy_GBps"], 3)}
        host = host_times(functools.partial(cute_kernels.mla_fp8_append, *sets[0], **options))
        return {**timing.as_record(), **speeds, **host}

    key = {"op": "mla_fp8_append", "tokens": APPEND_TOKENS, **options}
    return records.with_must(records.record_case(key, check, measure), APPEND_MUST)


def append_call(
    kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, **options: Any
) -> Callable[[], torch.Tensor]:
    """An append to a copy of the cache, which it returns."""
    own = cache.clone()

    def call() -> torch.Tensor:
        cute_kernels.mla_fp8_append(kv, own, slots, **options)
        return own

    return call


def run_merge(ceilings: Mapping[str, float], device: str = "cuda") -> dict[str, Any]:
    """Check, time and record the merge of 8 float32 partial results of 128 x 128 heads into a bfloat16 one."""
    splits, batch, s_q, h_q = 8, 128, 1, 128
    rows = batch * s_q * h_q
    bytes_moved = splits * rows * 4 * (V_DIM + 1) + rows * (2 * V_DIM + 4)
    gen = generator(3, device)
    sets = [
        (
            torch.randn((splits, batch, s_q, h_q, V_DIM), generator=gen, device=device),
            torch.randn((splits, batch, s_q, h_q), generator=gen, device=device),
        )
        for _ in range(sets_to_outgrow_l2(bytes_moved))
    ]
    outs, lses = sets[0]
    out, lse = merge_call(outs, lses)()
    weights = torch.softmax(lses.double(), dim=0)
    expected = torch.einsum("nbsh,nbshd->bshd", weights, outs.double())
    baseline = expected.bfloat16()
    check = compare(
        out, expected, baseline, lse=lse, expected_lse=torch.logsumexp(lses.double(), dim=0), name="merge_states"
    )

    def measure() -> dict[str, Any]:
        calls = [merge_call(*one) for one in sets]
        expected = Expected.of(RESULTS, [merge_call(*one) for one in sets[1:]], checked=(out, lse))
        timing = time_calls(calls, expected=expected, sustained=False)
        gb_per_s = bytes_moved / timing.us / 1e3
        speeds = {"GBps": round(gb_per_s, 1), "read_fraction": round(gb_per_s / ceilings["read_GBps"], 3)}
        return {**timing.as_record(), **speeds, **host_times(calls[0])}

    key = {"op": "merge_states", "splits": splits, "batch": batch, "h_q": h_q, "s_q": s_q, "d": V_DIM}
    return records.record_case(key, check, measure)


def merge_call(outs: torch.Tensor, lses: torch.Tensor) -> Callable[[], Any]:
    """A merge into poisoned bfloat16 memory of its own, which returns out and lse."""
    out = torch.full(outs.shape[1:], float("nan"), dtype=torch.bfloat16, device=outs.device)
    return functools.partial(cute_kernels.merge_states, outs, lses, out=out)


def _cycles_per_token(bench: DecodeBench, us: float, sm_mhz: float | None) -> float | None:
    """SM cycles a token and group of 64 heads, had the work been spread evenly over all SMs.

    Comparable with the budget (34 for the products alone) where there is work for every SM; far above it where not.
    """
    if sm_mhz is None:
        return None
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    return round(model.spread_cycles(us, sm_mhz, tokens_spread(bench), sms), 1)


def _peers(
    bench: DecodeBench,
    inputs: list[DecodeCase],
    caches: Caches,
    peer: types.ModuleType | str,
    rows: list[int],
    limit: float = PEER_LIMIT,
) -> dict[str, Peer]:
    """FlashMLA's FP8 kernel for sparse cases, its bf16 kernel for dense ones; `limit` of its relative error."""
    if isinstance(peer, str):
        return {}

    def make() -> Peer:
        calls, note = _peer_calls(bench, inputs, caches, peer)
        out = calls[0]()[0][:, :, : bench.h_q]
        expected, _ = reference_decode(**inputs[0].rows(rows).arguments())
        return Peer(prepare(calls), relative_error(out[rows], expected), note, limit=limit)

    return {"flash_mla" if bench.mode == "sparse" else "flash_mla_bf16": ready(make)}


def _peer_calls(
    bench: DecodeBench, inputs: list[DecodeCase], caches: Caches, peer: types.ModuleType
) -> tuple[list[Callable[[], Any]], str]:
    """FlashMLA over the same inputs, its scheduling made once before, and what was done to make the case fit it."""
    sparse = bench.mode == "sparse"
    heads = next(heads for heads in PEER_SPARSE_HEADS if heads >= bench.h_q) if sparse else bench.h_q
    note = "" if heads == bench.h_q else f"q padded to {heads} heads"
    calls: list[Callable[[], Any]] = []
    for case in inputs:
        q = torch.nn.functional.pad(case.q, (0, 0, 0, heads - bench.h_q))
        meta, _ = peer.get_mla_metadata()
        cache = caches.fp8.view(torch.float8_e4m3fn).unsqueeze(2) if sparse else caches.bf16
        fixed = {
            "q": q,
            "k_cache": cache,
            "block_table": case.block_table,
            "cache_seqlens": case.cache_seqlens,
            "head_dim_v": V_DIM,
            "tile_scheduler_metadata": meta,
            "num_splits": None,
            "softmax_scale": QK_DIM**-0.5,
            "causal": not sparse and bench.s_q > 1,
            "is_fp8_kvcache": sparse,
            "indices": case.indices,
            **({"topk_length": case.topk_length} if bench.ragged and sparse else {}),
        }
        calls.append(functools.partial(peer.flash_mla_with_kvcache, **fixed))
    return calls, note
