"""Ranks of a group that decode together, and the problems that each rank finds.

Each rank makes the whole case from its seed, keeps its own tokens, and calls. All ranks have the same results, and one
of them holds those of a case against the oracle, after all calls: ranks do not wait for each other's checks.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist

from cute_kernels import gqa_decode, mla_fp8_decode, sink_attention
from cute_kernels.distributed import context_parallel_decode, context_parallel_prefill, shard_indices, shard_lengths
from cute_kernels.distributed.prefill import own_heads
from tests.kit import context_shards
from tests.kit.compare import check_decode, rounding_noise
from tests.kit.context_shards import kept
from tests.kit.draws import generator, normal
from tests.kit.gqa_cases import check_gqa, gqa_case
from tests.kit.mla_cases import dense_case, sparse_case
from tests.kit.sink_cases import SinkCase, SinkExpectation, sink_case

WORLD: Final = 4
SHORT: Final = 5.0
"""Seconds until a group gives up on a rank that has died or never calls."""


@dataclass(frozen=True)
class Case:
    """One whole decode, and how its tokens are dealt out to ranks.

    op          "dense", "sparse", "gqa" or "prefill"
    options     options of the function that makes the case
    interleave  number of consecutive tokens that go to one rank
    page_size   tokens of a page of a rank
    """

    name: str
    op: str
    options: dict[str, Any] = field(default_factory=dict)
    interleave: int = 1
    page_size: int = 4

    def __str__(self) -> str:
        return self.name


RAGGED: Final = [37, 0, 1, 64, 3, 2, 130]
"""Sequence lengths. With 4 ranks and interleave 1, the third leaves three ranks without tokens, the fifth one rank."""
ONE_RANK: Final = [3, 1, 2, 0]
"""Sequence lengths at which, with interleave 4, the first rank holds every token."""
_PAGED: Final = {"layout": "paged_NHD", "page_size": 16, "d": 64, "h_q": 8, "h_kv": 2}
_ROWS: Final = {"layout": "BSNH", "d": 64, "h_q": 8, "h_kv": 4}
_MLA: Final = {"h_q": 8, "page_size": 8}

CASES: Final = [
    *(
        Case(f"dense-s{s_q}-i{interleave}-seed{seed}", "dense",
             {**_MLA, "seqlens": RAGGED, "s_q": s_q, "sink": sink, "seed": seed}, interleave)
        for s_q, interleave, sink, seed in [(1, 1, "none", 0), (1, 4, "inf", 1), (3, 1, "finite", 2), (3, 4, "none", 3),
                                            (3, 64, "finite", 4), (4, 3, "inf", 5)]
    ),
    Case("dense-not-causal", "dense", {**_MLA, "seqlens": RAGGED, "s_q": 3, "causal": False, "seed": 6}, 2),
    Case("dense-only-the-first-rank", "dense", {**_MLA, "seqlens": ONE_RANK, "s_q": 3, "sink": "finite", "seed": 7}, 4),
    Case("dense-no-token", "dense", {**_MLA, "seqlens": [0, 0], "sink": "finite", "seed": 8}),
    Case("dense-wild-scales", "dense", {**_MLA, "seqlens": [70, 5], "scales": "mixed", "s_q": 2, "seed": 9}, 2),
    *(
        Case(f"sparse-{lengths}-i{interleave}-seed{seed}", "sparse",
             {"batch": 5, "h_q": 8, "s_q": 3, "topk": 33, "page_size": 16, "num_slots": 320, "lengths": lengths,
              "sink": sink, "seed": seed}, interleave)
        for lengths, interleave, sink, seed in [("none", 1, "finite", 10), ("batch", 4, "none", 11),
                                                ("query", 2, "inf", 12)]
    ),
    *(
        Case(f"latent-{'-'.join(formats)}-i{interleave}", "sparse",
             {"formats": formats, "cache_layout": layout, "batch": 3, "h_q": 8, "s_q": 2, "topk": 40,
              "extra_topk": 24, "page_size": 16, "extra_page_size": 32, "num_slots": 320, "lengths": lengths,
              "sink": "finite", "padded": False, "seed": 60 + i}, interleave)
        for i, (formats, layout, lengths, interleave) in enumerate([
            (("v3.2_nope",), None, "none", 1),
            (("v4", "v4"), None, "query", 2),
            (("v4.1", "v4.1_fp4"), "interleaved", "batch", 4),
        ])
    ),
    *(
        Case(f"gqa-{name}", "gqa", {"seqlens": RAGGED, "seed": 20 + i, **options}, interleave)
        for i, (name, interleave, options) in enumerate([
            ("paged", 1, {**_PAGED, "sink": "finite"}),
            ("paged-s3", 2, {**_PAGED, "s_q": 3, "sink": "inf"}),
            ("paged-s3-not-causal", 4, {**_PAGED, "s_q": 3, "causal": False}),
            ("vllm-s2", 8, {**_PAGED, "layout": "paged_vllm", "s_q": 2, "k_scales": "per_group_32",
                            "v_scales": "per_token"}),
            ("rows", 1, {**_ROWS, "sink": "finite"}),
            ("rows-s3", 4, {**_ROWS, "s_q": 3, "sink": "finite"}),
            ("heads-first-s3", 3, {**_ROWS, "layout": "BNSH", "s_q": 3, "kv_dtype": "bf16"}),
            ("fp8", 1, {**_PAGED, "layout": "paged_HND", "kv_dtype": "fp8", "k_scales": "per_head",
                        "v_scales": "per_head", "q_dtype": torch.float16}),
            ("window", 2, {**_PAGED, "window": 24}),
            ("window-s3", 1, {**_PAGED, "window": 8, "s_q": 3, "sink": "finite"}),
            ("rows-window-s3", 4, {**_ROWS, "window": 16, "s_q": 3}),
            ("alibi", 1, {**_PAGED, "alibi": "head"}),
            ("alibi-s3-softcap", 1, {**_PAGED, "alibi": "batch", "s_q": 3, "softcap": 8.0, "sink": "finite"}),
            ("alibi-one-run", 128, {**_PAGED, "alibi": "batch", "s_q": 3}),
            ("alibi-not-causal", 1, {**_PAGED, "alibi": "batch", "s_q": 3, "causal": False}),
            ("alibi-window-rows", 1, {**_ROWS, "alibi": "head", "s_q": 3, "window": 20}),
        ])
    ),
    Case("prefill", "prefill", {"context": [29, 29], "chunks": [21, 21], "h_q": 8, "h_kv": 4, "seed": 50}, 2),
    Case("prefill-few-kv-heads", "prefill", {"context": [29], "chunks": [5], "h_q": 8, "h_kv": 1, "seed": 51}, 8),
    Case("prefill-odd-heads", "prefill", {"context": [9], "chunks": [4], "h_q": 12, "h_kv": 3, "seed": 52}),
    Case("prefill-packed", "prefill", {"context": [29, 0, 1, 64], "chunks": [3, 17, 1, 8], "packed": True, "h_q": 8,
                                       "h_kv": 2, "seed": 53}, 4),
    Case("prefill-no-context", "prefill", {"context": [0, 0], "chunks": [9, 9], "h_q": 8, "h_kv": 8, "seed": 54}),
]  # fmt: skip


# ---- one case on one rank


Check = Callable[[torch.Tensor, torch.Tensor], list[str]]


def run_case(
    case: Case, rank: int, world_size: int, device: str, gathers_q: bool = True, **options: Any
) -> tuple[list[str], torch.Tensor, torch.Tensor, Check]:
    """Problems on this rank, results of all heads, and the check that compares them with one process.

    Each way of combining is called twice and must give the same bits. Scatter must give a slice of what gather gives.
    """
    whole, arguments, op = make(case, rank, world_size, device)
    arguments |= options
    out, lse = call(op, arguments, case, heads="gather")
    problems = []
    again = call(op, arguments, case, heads="gather")
    if not all(map(same_bits, (out, lse), again)):
        problems.append("the second call gave other bits")
    own = out.shape[-2] // world_size
    mine = slice(rank * own, (rank + 1) * own)
    scattered = call(op, arguments, case, heads="scatter")
    if not (same_bits(scattered[0], out[..., mine, :]) and same_bits(scattered[1], lse[..., mine])):
        problems.append("scatter is no slice of gather")
    if case.op != "prefill" and gathers_q:
        own_q = arguments["q"][..., mine, :]
        for heads, expected in (("gather", (out, lse)), ("scatter", scattered)):
            queried = call(op, {**arguments, "q": own_q}, case, heads=heads, gather_q=True)
            if not all(map(same_bits, queried, expected)):
                problems.append(f"{heads} with gathered queries gave other bits")
    return problems, out, lse, whole


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)  # no result has a NaN


def call(op: Callable[..., Any], arguments: dict[str, Any], case: Case, **options: Any) -> tuple[Any, Any]:
    if case.op == "prefill":
        found = context_parallel_prefill(**arguments, **options, return_lse=True)
    else:
        given = {**arguments, **options}
        found = context_parallel_decode(op, None, interleave=case.interleave, **given, return_lse=True)
    assert isinstance(found, tuple)
    return found


def make(case: Case, rank: int, world_size: int, device: str) -> tuple[Check, dict[str, Any], Callable[..., Any]]:
    """Returns the check against one process, this rank's arguments, and the operator."""
    dealt = {"rank": rank, "world_size": world_size, "interleave": case.interleave}
    if case.op == "prefill":
        return *make_prefill(**dealt, **case.options, device=device), sink_attention
    if case.op == "gqa":
        gqa = gqa_case(**case.options, device=device)
        arguments = context_shards.gqa(gqa, page_size=8 if gqa.layout == "paged_vllm" else case.page_size, **dealt)
        return lambda out, lse: list(check_gqa(out, lse, gqa).problems), arguments, gqa_decode
    if case.op == "dense":
        mla = dense_case(**case.options, device=device)
        arguments = context_shards.mla_dense(mla, page_size=case.page_size, **dealt)
        lengths = arguments["cache_seqlens"]
        arguments["local_lengths"] = shard_lengths(lengths, s_q=mla.q.shape[1], causal=mla.causal, **dealt)
    else:
        mla = sparse_case(**case.options, device=device)
        arguments = {**mla.arguments(), **context_shards.mla_caches(mla, **dealt)}
        for prefix in ("", "extra_"):
            if (lists := arguments[f"{prefix}indices"]) is not None:
                own, counts = shard_indices(lists, topk_length=arguments[f"{prefix}topk_length"], **dealt)
                arguments |= {f"{prefix}indices": own, f"{prefix}topk_length": counts}
    whole = mla.arguments()
    return lambda out, lse: list(check_decode(out, lse, **whole).problems), arguments, mla_fp8_decode


def make_prefill(
    *, rank: int, world_size: int, interleave: int, context: list[int], chunks: list[int], device: str, **options: Any
) -> tuple[Check, dict[str, Any]]:
    """A chunk of each sequence that follows the sequence's context."""
    lengths = [(n, n + c) for n, c in zip(chunks, context, strict=True)]
    whole = sink_case(lengths, **options, padded=False, device=device)
    assert whole.s_aux is not None
    whole.s_aux = 3 * whole.s_aux + 3  # as large as a log-sum-exp, so that a wrong sink shows
    own = [kept(c, rank, world_size, interleave) for c in context]
    join = torch.cat if whole.packed else torch.stack
    arguments: dict[str, Any] = {"q": whole.q, "s_aux": whole.s_aux, "softmax_scale": whole.softmax_scale}
    for name in ("k", "v"):
        rows = [whole.of_keys(getattr(whole, name), i) for i in range(len(context))]
        arguments[name] = join([t[c:] for t, c in zip(rows, context, strict=True)])
        arguments[f"{name}_context"] = join([t[p] for t, p in zip(rows, own, strict=True)])
    if whole.packed:
        ends = torch.tensor([0, *map(len, own)], dtype=torch.int32, device=device).cumsum(0).int()
        arguments |= {"cu_seqlens_q": whole.cu_seqlens_q, "cu_seqlens_context": ends}

    def check(out: torch.Tensor, lse: torch.Tensor) -> list[str]:
        expected = SinkExpectation.of(whole)
        noise = join([partials_noise(whole, i, c, world_size, interleave) for i, c in enumerate(context)])
        measure = expected.out._replace(noise=noise)
        return list(measure.compare(out, "prefill", gain=False, lse=lse, expected_lse=expected.lse).problems)

    return check, arguments


def partials_noise(case: SinkCase, sequence: int, context: int, world_size: int, interleave: int) -> torch.Tensor:
    """Standard deviation, at each element of a sequence's result, of rounding all partial results to bfloat16.

    One process rounds once. Here each rank's part of the context is rounded, then the chunk, then the merged result on
    the rank that has the head's chunk. If parts cancel, their rounding errors are larger than that of the result.
    """
    assert case.s_aux is not None
    q = case.of_queries(case.q, sequence).double()
    k, v = (case.of_keys(t, sequence).double() for t in (case.k, case.v))
    heads, kv_heads = q.shape[1], k.shape[1]
    keys, values = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
    scores = torch.einsum("shd,khd->hsk", q, keys) * case.softmax_scale
    scores = scores.masked_fill(~case.mask(sequence), -torch.inf)
    total = torch.logaddexp(scores.logsumexp(dim=-1), case.s_aux.double().unsqueeze(1))
    weights = torch.exp(scores - total.unsqueeze(-1))

    def part(keys_of: list[int]) -> torch.Tensor:
        return torch.einsum("hsk,khd->shd", weights[..., keys_of], values[keys_of])

    chunk = part(list(range(context, len(k))))
    squares = chunk.square()
    for rank in range(world_size):
        earlier = part(kept(context, rank, world_size, interleave))
        mine = own_heads(heads, kv_heads, rank, world_size)
        squares += earlier.square()
        squares[:, mine] += (earlier + chunk)[:, mine].square()
    return rounding_noise(torch.bfloat16) * squares.sqrt()


# ---- tasks of ranks


def all_cases(rank: int) -> list[tuple[str, Any]]:
    """Problems by case. On GPUs decodes are combined in both ways."""
    if dist.get_backend() != "nccl":
        return problems_of(CASES, rank, "cpu")
    decodes = [case for case in CASES if case.op != "prefill"]
    found = dict(problems_of(CASES, rank, "cuda"))
    for name, problems in problems_of(decodes, rank, "cuda", combine="symmetric"):
        found[name] += [f"symmetric: {problem}" for problem in problems]
    return list(found.items())


def problems_of(cases: Sequence[Case], rank: int, device: str, **options: Any) -> list[tuple[str, Any]]:
    """Problems by case, with the options of `run_case`."""
    world_size = dist.get_world_size()
    found = []
    checks: list[Callable[[], None]] = []
    for number, case in enumerate(cases):
        problems, out, lse, whole = run_case(case, rank, world_size, device, **options)
        theirs: list[Any] = [None] * world_size
        dist.all_gather_object(theirs, hashlib.sha256(bits(out) + bits(lse)).hexdigest())
        if len(set(theirs)) != 1:
            problems.append("ranks have different results")
        if rank == number % world_size:
            checks.append(functools.partial(_check, problems, whole, out, lse))
        found.append((case.name, problems))
    for check in checks:
        check()
    return found


def _check(problems: list[str], whole: Check, out: torch.Tensor, lse: torch.Tensor) -> None:
    problems += whole(out, lse)


def bits(t: torch.Tensor) -> bytes:
    return bytes(t.contiguous().view(torch.uint8).flatten().tolist())


COMPILED: Final = ("dense-s3-i4-seed3", "sparse-batch-i4-seed11", "gqa-paged-s3")


def compiled(rank: int) -> Iterator[tuple[str, Any]]:
    """Yields problems of calls inside a compiled function, by case and way of combining.

    On CPUs None means "collective", so only one case tests None.
    """
    on_gpus = dist.get_backend() == "nccl"
    for case in (case for case in CASES if case.name in COMPILED):
        others = ["symmetric"] if on_gpus else [None] * (case.name == COMPILED[0])
        for combine in ("collective", *others):
            yield f"{case.name} {combine}", compiled_call(case, rank, "cuda" if on_gpus else "cpu", combine)


def compiled_call(case: Case, rank: int, device: str, combine: str | None) -> list[str]:
    """Which of two compiled calls differ in bits from an eager call. Only collectives are traced as a whole."""
    _, arguments, op = make(case, rank, dist.get_world_size(), device)
    q = arguments.pop("q")

    def layer(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = call(op, {**arguments, "q": 2 * q, "combine": combine}, case)
        return out + 1, lse

    torch._dynamo.reset()
    traced = torch.compile(layer, backend="aot_eager", fullgraph=combine == "collective")
    expected = layer(q)
    return [f"call {i} gave other bits" for i in range(2) if not all(map(same_bits, traced(q), expected))]


def a_rank_dies(rank: int) -> list[tuple[str, Any]]:
    """One rank exits silently after the others have joined. Before that, the other ranks could not call."""
    joined = torch.zeros(1, dtype=torch.uint8, device="cpu")
    if rank == WORLD - 1:
        for other in range(WORLD - 1):
            dist.recv(joined, other)
        os._exit(17)
    dist.send(joined, WORLD - 1)
    return [("error", _failure())]


def a_rank_never_calls(rank: int) -> list[tuple[str, Any]]:
    """One rank is busy with something else for longer than the group waits."""
    if rank == WORLD - 1:
        time.sleep(4 * SHORT)
        return []
    return [("error", _failure())]


def _failure() -> tuple[str, float]:
    """The message of the error that a call raises, and how many seconds it took."""
    start = time.monotonic()
    try:
        context_parallel_decode(_partial, None)
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "no error", time.monotonic() - start


def _partial(tokens: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.zeros((tokens, 1, 4, 64), dtype=torch.bfloat16, device="cpu")
    return out, torch.zeros((tokens, 1, 4), dtype=torch.float32, device="cpu")


def disagreements(rank: int) -> Iterator[tuple[str, str]]:
    """What each rank is told if one of two makes a different call, and whether a correct call works afterwards."""
    lengths = torch.tensor([32, 17], dtype=torch.int32, device="cpu")
    q, k, v = (
        torch.randn(2, *shape, generator=generator(1), dtype=torch.float32, device="cpu").bfloat16()
        for shape in ((1, 4, 64), *[(2, 16, 64)] * 2)
    )
    right: dict[str, Any] = {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": lengths}
    half = {name: right[name].half() for name in ("q", "k_cache", "v_cache")}
    sinks = torch.zeros(4, dtype=torch.float32, device="cpu")
    for name, wrong in {
        "heads": {"heads": "scatter"},
        "q dtype": half,
        "q batch": {name: value[:1] for name, value in right.items()},
        "q order": {"q": -q},
        "interleave": {"interleave": 2},
        "gather_q": {"gather_q": True, "q": q[:, :, :2]},
        "cache_seqlens": {"cache_seqlens": lengths - 1},
        "softmax_scale": {"softmax_scale": 0.5},
        "window": {"window": 16},
        "s_aux": {"s_aux": sinks},
    }.items():
        yield name, _told(gqa_decode, **right | (wrong if rank else {}))
    yield "decode", _told(_partial if rank else functools.partial(_partial, tokens=2))
    chunk = normal((1, 3, 2, 64), generator(2)).bfloat16()
    if rank:
        yield "function", _told(gqa_decode, **right)
    else:
        yield "function", _told_by(lambda: context_parallel_prefill(*[chunk] * 5))
    noise = q * (1 + 2.0**-7 * normal(q.shape, generator(rank)))
    yield "rounding of q", _told(gqa_decode, **right | {"q": noise.bfloat16()})
    yield "nothing", _told(gqa_decode, **right)


def _told(decode: Callable[..., Any], **arguments: Any) -> str:
    return _told_by(lambda: context_parallel_decode(decode, None, **arguments))


def _told_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def replays(rank: int) -> list[tuple[str, Any]]:
    """How many of ten thousand graph replays differ in bits from an eager call; on GPUs, for each way of combining."""
    return [(f"other bits: {combine}", _replays(rank, combine)) for combine in ("collective", "symmetric")]


def _replays(rank: int, combine: str) -> int:
    case = Case("replays", "dense", {"seqlens": [3000, 17], "h_q": 128, "page_size": 64, "sink": "finite"}, 1, 64)
    _, arguments, op = make(case, rank, dist.get_world_size(), "cuda")
    arguments["combine"] = combine
    expected = call(op, arguments, case, heads="scatter")
    torch.cuda.synchronize()
    graph, other = torch.cuda.CUDAGraph(), torch.zeros((), dtype=torch.int64, device="cuda")
    with torch.cuda.graph(graph):
        results = call(op, arguments, case, heads="scatter")
        for got, right in zip(results, expected, strict=True):
            other.add_((got != right).any())
    for _ in range(10_000):
        graph.replay()
    return int(other)
