"""Tasks of ranks that train together; `tests.kit.context_workers` runs them in processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from cute_kernels import sink_attention
from cute_kernels.distributed import context_parallel_sink_attention
from tests.kit import packed_training
from tests.kit.compare import compare, rounding_variance
from tests.kit.sink_cases import Measure, SinkCase, SinkExpectation, sink_case


def fully_sharded(rank: int) -> list[tuple[str, Any]]:
    """Errors of FSDP2's gradients of a small gpt-oss, by parameter, relative to one process with all batches.

    Each rank has another kind of batch, so each rank must detect packing by itself.
    """
    from torch.distributed.fsdp import fully_shard

    import cute_kernels.integrations.transformers  # noqa: F401  registers "cute"

    world_size, kinds = dist.get_world_size(), ("positions", "right", "kwargs", "left")
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    whole, sharded = (packed_training.model("gpt_oss").to(device) for _ in range(2))
    for model in (whole, sharded):
        model.set_attn_implementation("cute")
    expected: dict[str, torch.Tensor] = {}
    for kind in kinds[:world_size]:
        found = packed_training.gradients(whole, packed_training.batch(kind, device)).of
        expected = {name: expected.get(name, 0) + gradient / world_size for name, gradient in found.items()}
    for layer in sharded.model.layers:
        fully_shard(layer)
    fully_shard(sharded)
    batch = packed_training.batch(kinds[rank], device)
    logits = sharded(**batch.inputs, use_cache=False).logits
    packed_training.loss_of(logits, batch).backward()
    off = {}
    for name, parameter in sharded.named_parameters():
        gradient = parameter.grad.full_tensor().float()
        off[name] = ((gradient - expected[name]).norm() / expected[name].norm()).item()
    return [("off", off)]


# ---- context_parallel_sink_attention


class Case(NamedTuple):
    """One attention over sequences whose tokens are spread over ranks.

    chunk    tokens of a chunk, by sequence, of a batch or packed
    options  options of the call and of the function that makes the case
    """

    name: str
    chunk: tuple[int, ...]
    options: dict[str, Any] = {}
    made: dict[str, Any] = {}

    def __str__(self) -> str:
        return self.name


A2A: Final = {"comm": "a2a"}
RUNS: Final = {"order": "contiguous"}
CASES: Final = [
    Case("batch", (5, 5)),
    Case("one token a chunk", (1,), made={"sinks": "absent"}),
    Case("float16, d 128, extreme sinks", (6,), made={"d": 128, "dtype": torch.float16, "sinks": "extreme"}),
    Case("window shorter than a chunk", (6, 6), {"window": 4}),
    Case("window of a chunk and its own token", (6,), {"window": 7}),
    Case("window longer than a chunk", (6,), {"window": 20}),
    Case("window of one", (6,), {"window": 1}),
    Case("window that hides nothing", (3,), {"window": 1000}),
    Case("packed", (4, 0, 1, 9), made={"packed": True}),
    Case("packed, window", (4, 3, 9), {"window": 3}, {"packed": True}),
    Case("packed, long window", (4, 1, 9), {"window": 6}, {"packed": True}),
    Case("packed, padding", (4, 2), {"window": 3}, {"packed": True, "padding": 5}),
    Case("runs", (7, 7), RUNS),
    Case("runs, window", (7, 7), {**RUNS, "window": 5}),
    Case("runs, packed", (3, 8), {**RUNS, "window": 4}, {"packed": True}),
    Case("deterministic", (5, 5), {"deterministic": True}),
    Case("heads", (5, 5), A2A),
    Case("heads, packed, padding", (4, 0, 9), {**A2A, "window": 5}, {"packed": True, "padding": 3}),
    Case("heads, runs", (5,), {**A2A, **RUNS}, {"sinks": "absent"}),
]  # fmt: skip
ON_GPUS: Final = [
    Case("batch", (256, 256), {"deterministic": True}, {"h_q": 16, "h_kv": 4}),
    Case("window", (256,), {"window": 128, "deterministic": True}, {"h_q": 16, "h_kv": 4}),
    Case("window of 200", (256,), {"window": 200}, {"h_q": 16, "h_kv": 4, "d": 128}),
    Case("wide window", (256,), {"window": 700, "deterministic": True}, {"h_q": 16, "h_kv": 4}),
    Case("packed", (128, 256), {"deterministic": True}, {"h_q": 16, "h_kv": 4, "packed": True}),
    Case("packed, window", (128, 256), {"window": 100}, {"h_q": 16, "h_kv": 4, "packed": True}),
    Case("packed, odd chunks", (100, 1, 0, 233), {}, {"h_q": 16, "h_kv": 4, "packed": True, "padding": 7}),
    Case("not deterministic", (256,), {}, {"h_q": 16, "h_kv": 4, "d": 128}),
    Case("heads", (256,), {**A2A, "deterministic": True}, {"h_q": 16, "h_kv": 4}),
    Case("heads, window", (256,), {**A2A, "window": 128}, {"h_q": 16, "h_kv": 4, "packed": True}),
]  # fmt: skip


def own_rows(t: torch.Tensor, case: Case, rank: int, world_size: int) -> torch.Tensor:
    """A rank's tokens out of whole sequences: (batch, tokens, ...), or packed (tokens, ...)."""
    runs = case.options.get("order") == "contiguous"
    chunks = [rank] if runs else [rank, 2 * world_size - 1 - rank]
    count = world_size * len(chunks)
    if not case.made.get("packed"):
        return torch.cat([t.chunk(count, 1)[i] for i in chunks], 1)
    parts, start = [], 0
    for n in case.chunk:
        parts += [t[start + i * n : start + (i + 1) * n] for i in chunks]
        start += count * n
    return torch.cat([*parts, t.new_zeros((case.made.get("padding", 0), *t.shape[1:]))])


def whole_case(case: Case, world_size: int, device: str) -> SinkCase:
    """The case in one process."""
    made = {"h_q": 8, "h_kv": 4, **case.made}
    made.pop("padding", None)
    count = world_size * (1 if case.options.get("order") == "contiguous" else 2)
    lengths = [(count * n, count * n) for n in case.chunk]
    return sink_case(
        lengths, **made, window=case.options.get("window"), padded=False, seed=len(case.name), device=device
    )


def leaves(*tensors: torch.Tensor | None) -> list[Any]:
    return [None if t is None else t.detach().clone().requires_grad_() for t in tensors]


def problems(case: Case, rank: int, world_size: int, device: str) -> list[str]:
    """Problems of a case on this rank, compared with one process and with the oracle."""
    whole, found = whole_case(case, world_size, device), []
    exact = device == "cpu" or all(n % 128 == 0 for n in case.chunk)
    determined = device == "cpu" or bool(case.options.get("deterministic"))
    inputs = leaves(whole.q, whole.k, whole.v, whole.s_aux)
    arguments = {name: value for name, value in whole.arguments().items() if name not in ("q", "k", "v", "s_aux")}
    out = sink_attention(*inputs, **arguments, deterministic=determined)
    wanted = [t for t in inputs if t is not None]
    expected = torch.autograd.grad(out, wanted, whole.d_out, retain_graph=True)
    own = leaves(*(own_rows(t, case, rank, world_size) for t in (whole.q, whole.k, whole.v)), whole.s_aux)
    options = {**case.options, "softmax_scale": whole.softmax_scale, "cu_seqlens": whole.cu_seqlens_q}
    d_out = own_rows(whole.d_out, case, rank, world_size)

    def call() -> tuple[Any, ...]:
        result = context_parallel_sink_attention(*own, **options)
        return result.detach(), *torch.autograd.grad(result, [t for t in own if t is not None], d_out)

    got, dq, dk, dv, *ds = call()
    if exact and not torch.equal(got, own_rows(out.detach(), case, rank, world_size)):
        found.append("out has other bits than in one process")
    if exact and determined and not torch.equal(dq, own_rows(expected[0], case, rank, world_size)):
        found.append("dq has other bits than in one process")
    if determined and not all(map(torch.equal, call(), (got, dq, dk, dv, *ds))):
        found.append("the second call gave other bits")
    for t in ds:
        dist.all_reduce(t)
    oracle = SinkExpectation.of(whole)
    dq_of, *key_measures = oracle.gradients[:3]
    if case.options.get("comm") != "a2a" and world_size > 1:
        key_measures = with_rounded_parts(key_measures, out, inputs[1:3], whole, case, world_size)
    measures = (oracle.out, dq_of, *key_measures)
    for name, measure, t in zip(("out", "dq", "dk", "dv"), measures, (got, dq, dk, dv), strict=True):
        rows = [own_rows(part, case, rank, world_size) for part in measure]
        result = compare(t, rows[0], rows[1], noise=rows[2], name=name, gain=False)
        found += list(result.problems)
    if ds:
        result = oracle.gradients[3].compare(ds[0].unsqueeze(-1), "ds_aux", gain=False)
        found += list(result.problems)
    return found


def with_rounded_parts(
    key_measures: list[Measure], out: torch.Tensor, keys: list[Any], whole: SinkCase, case: Case, world_size: int
) -> list[Measure]:
    """The measures of dk and dv plus one rounding: each rank rounds what its queries add to a key.

    One process rounds only their sum. Parts may cancel: parts between 1 and 2 err by up to 2^-8, whatever their sum is.
    """
    along = 0 if whole.packed else 1
    unpadded = case._replace(made={**case.made, "padding": 0})
    tokens = torch.arange(whole.d_out.shape[along], dtype=torch.int64, device=out.device)
    variances = [torch.zeros_like(measure.exact) for measure in key_measures]
    for rank in range(world_size):
        rows = own_rows(tokens if whole.packed else tokens[None], unpadded, rank, world_size).flatten()
        d_out = torch.zeros_like(whole.d_out)
        d_out.index_copy_(along, rows, whole.d_out.index_select(along, rows))
        for variance, part in zip(variances, torch.autograd.grad(out, keys, d_out, retain_graph=True), strict=True):
            variance += rounding_variance(part.double(), part.dtype)
    return [
        measure._replace(noise=(measure.noise.square() + variance).sqrt())
        for measure, variance in zip(key_measures, variances, strict=True)
    ]


def sink_training(rank: int) -> Iterator[tuple[str, Any]]:
    on_gpus = dist.get_backend() == "nccl"
    for case in ON_GPUS if on_gpus else CASES:
        yield case.name, problems(case, rank, dist.get_world_size(), "cuda" if on_gpus else "cpu")


def sink_training_refusals(rank: int) -> Iterator[tuple[str, Any]]:
    """The error of each wrong call, also on ranks that are not in a group."""
    q, k = (torch.zeros(1, 6, heads, 64, dtype=torch.bfloat16, device="cpu") for heads in (8, 2))

    def packed(borders: list[int]) -> dict[str, Any]:
        cu_seqlens = torch.tensor(borders, dtype=torch.int32, device="cpu")
        return {"q": q[0], "k": k[0], "v": k[0], "cu_seqlens": cu_seqlens}

    n = dist.get_world_size()
    first = dist.new_group([0])
    calls: dict[str, dict[str, Any]] = {
        "comm": {"comm": "ring"},
        "order": {"order": "striped"},
        "odd tokens": {"q": q[:, :5], "k": k[:, :5], "v": k[:, :5]},
        "decreasing borders": packed([0, 4 * n, 2 * n, 6 * n]),
        "borders past the end": packed([0, 8 * n]),
        "a length that does not divide": packed([0, 2 * n + 1, 6 * n]),
        "too few heads": {"comm": "a2a", "window": 4},
        "k of other tokens": {"k": k[:, :4], "v": k[:, :4]},
        "window": {"window": 0},
        "another call": {"window": 4 + rank},
        "another group": {"group": first},
    }
    for name, changes in calls.items():
        try:
            context_parallel_sink_attention(**{"q": q, "k": k, "v": k, "s_aux": None, **changes})
            yield name, ""
        except (TypeError, ValueError) as error:
            yield name, str(error)
