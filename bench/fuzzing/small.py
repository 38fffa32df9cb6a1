"""Calls of `merge_states` and `sink_attention`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch

from bench.fuzzing.calls import Call, Mode
from bench.fuzzing.draws import Draw, num_sms, problems_of
from bench.fuzzing.memory import Image, contiguous_stride, padded_stride
from cute_kernels.gqa.op import _Request as GqaRequest
from cute_kernels.gqa.op import decode_spec
from cute_kernels.merge.spec import MergeSpec
from cute_kernels.sink import backward_spec, plan, spec
from tests.kit.sink_cases import SINKS, SinkCase, SinkExpectation, sink_case
from tests.kit.values import keys, query

MERGES: Final = (
    (512, "float32", "bfloat16", True),
    (512, "float32", "bfloat16", False),
    (512, "bfloat16", "bfloat16", False),
    (512, "float32", "float32", True),
    (128, "bfloat16", "bfloat16", False),
    (128, "float16", "float16", True),
    (64, "float32", "float32", False),
    (72, "bfloat16", "bfloat16", True),
    (8, "float16", "float16", False),
)
"""d, dtype of the states, dtype of the output, whether there are sinks."""
MERGE_SIZES: Final = ((8, 2), (40, 20), (2048, 3))
"""(rows, states): each runs another variant of the kernel."""
HALF_ULP: Final = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SUM_ERROR: Final = 4e-6
"""Error of float32 weights and sums, relative to the sum of magnitudes."""
MERGE_MODES = tuple(Mode(given, ("out", "lse")) for given in (("out", "lse"), ("out",), ("lse",), ()))


def kernel_specs() -> list[Any]:
    """Every kernel that these calls may launch, except those of `gqa_decode`."""
    merges = [
        MergeSpec.for_launch(rows=rows, num_states=n, d=d, in_dtype=inner, out_dtype=outer, has_sink=sink)
        for d, inner, outer, sink in MERGES
        for rows, n in MERGE_SIZES
    ]
    float16 = spec.SinkForwardSpec.for_launch("float16", 64, packed=False, window=None, ratio=1)
    lists = [spec.SinkWorkListSpec(keys) for keys in (False, True)]
    sinks = [*spec.launched_specs("bfloat16"), float16, *lists, *backward_spec.launched_specs("bfloat16")]
    return [*dict.fromkeys(merges), *sinks]


def merge_call(draw: Draw) -> Call:
    """Merges states of disjoint sets of keys, some of them empty."""
    d, inner, outer, has_sink = draw.choice(MERGES)
    leading, n = draw.choice(
        (
            ((1, 1, 1), 1), ((2, 3, 7), 2), ((7,), 3), ((3, 7), 8), ((4, 1, 9), 5), ((2, 2, 2, 4), 4),
            ((2, 2, 8), 9), ((1, 1, 33), 64), ((2, 1, 20), 20), ((40,), 33), ((1, 1, 3), 200),
            ((16, 2, 64), 2), ((8, 1, 128), 8), ((5, 0, 4), 2),
        )
    )  # fmt: skip
    if has_sink and len(leading) < 2:
        leading = (1, *leading)
    in_dtype, out_dtype = getattr(torch, inner), getattr(torch, outer)
    outs = torch.randn((n, *leading, d), generator=draw.gen, device=draw.device).to(in_dtype)
    lses = draw.choice((1.0, 5.0, 5.0, 60.0)) * torch.randn((n, *leading), generator=draw.gen, device=draw.device)
    offset = draw.choice((0.0, 0.0, 80.0, -1e4))
    lses += offset
    if draw.chance(0.7):
        drop = torch.rand((n, *leading), generator=draw.gen, device=draw.device) < 0.2
        drop.view(n, -1)[:, 1::11] = True
        lses[drop] = -torch.inf
        outs[drop] = torch.nan
    if len(leading) < 4 and draw.chance(0.5):
        outs = _padded(outs, draw)
        lses = _padded(lses.unsqueeze(-1), draw).squeeze(-1)
    sink = None
    if has_sink:
        sink = offset + 3 * torch.randn(leading[-1], generator=draw.gen, device=draw.device)
        sink[1 :: draw.choice((2, 5))] = draw.choice((-torch.inf, torch.inf, 30.0))
    shape = (*leading, d)
    wide = len(leading) < 4 and draw.chance(0.5)
    stride = padded_stride(shape, 16 // out_dtype.itemsize, draw.rng) if wide else contiguous_stride(shape)
    outputs = {
        "out": (out_dtype, shape, stride, 16),
        "lse": (torch.float32, leading, contiguous_stride(leading), 4),
    }
    modes = MERGE_MODES if inner == outer else tuple(mode for mode in MERGE_MODES if "out" in mode.given)
    rows = math.prod(leading)
    specs: tuple[Any, ...] = ()
    if rows:
        specs = (
            MergeSpec.for_launch(rows=rows, num_states=n, d=d, in_dtype=inner, out_dtype=outer, has_sink=has_sink),
        )

    def oracle(values: Mapping[str, torch.Tensor]) -> list[str]:
        return merge_problems(values["out"], values["lse"], outs, lses, sink)

    return Call(
        seed=draw.seed,
        op="merge_states",
        arguments={"outs": outs, "lses": lses, "s_aux": sink},
        image=Image.of_outputs(outputs, draw.device, draw.rng),
        modes=modes,
        oracle=oracle,
        specs=specs,
        shape=("merge", n, *leading, d, inner, outer, has_sink),
    )


def _padded(values: torch.Tensor, draw: Draw) -> torch.Tensor:
    unit = max(16 // values.element_size(), 1)
    stride = padded_stride(values.shape, unit, draw.rng)
    return torch.empty_strided(values.shape, stride, dtype=values.dtype, device=values.device).copy_(values)


def merge_problems(
    out: torch.Tensor, lse: torch.Tensor, outs: torch.Tensor, lses: torch.Tensor, sink: torch.Tensor | None
) -> list[str]:
    """What is wrong with merged states, compared with float64."""
    values = torch.where((lses == -torch.inf).unsqueeze(-1), 0.0, outs.double())
    total = torch.logsumexp(lses.double(), dim=0)
    weights = torch.where(total == -torch.inf, 0.0, torch.exp(lses.double() - total))
    if sink is not None:
        weights = weights * torch.where(total == -torch.inf, 0.0, torch.sigmoid(total - sink.double()))
    expected = (weights.unsqueeze(-1) * values).sum(0)
    size = (weights.unsqueeze(-1) * values.abs()).sum(0)
    # float32 holds a log-sum-exp far from 0 to a few ulps, and the weights inherit that error
    known = SUM_ERROR + 2.0**-23 * lses.masked_fill(lses == -torch.inf, 0.0).abs().amax(0).double().unsqueeze(-1)
    allowed = HALF_ULP[out.dtype] * expected.abs() + known * size + torch.finfo(out.dtype).tiny
    wrong = ~((out.double() - expected).abs() <= allowed)
    problems = [f"out: {int(wrong.sum())} of {wrong.numel()} elements are off"] if wrong.any() else []
    inexact = (lse != total.float()) & ~((lse.double() - total).abs() <= 1e-6 + 1e-6 * total.abs())
    return problems + ([f"lse: {int(inexact.sum())} of {inexact.numel()} are off"] if inexact.any() else [])


# ---- sink attention

FORWARD_MODES = (Mode((), ("out", "lse")), Mode((), ("out",)))
GRADIENTS = ("out", "dq", "dk", "dv", "ds_aux")
WINDOWS = (None, None, 1, 2, 63, 70, 128, 300, 600)


def sink_call(draw: Draw) -> Call:
    """Draws a forward, or a forward with its gradients."""
    differentiable = draw.chance(0.3)
    half = not differentiable and draw.chance(0.2)
    d = 64 if half else draw.choice((64, 128))
    packed = not half and draw.chance(0.5)
    h_kv = draw.choice((1, 2, 3))
    h_q = h_kv * draw.choice((1, 2, 4, 8) if draw.on_gpu else (1, 4))
    longest = draw.choice((1, 63, 130, 300)) if draw.on_gpu else draw.choice((1, 20, 65))
    if draw.large:
        longest = draw.choice((700, 1500))
    lengths = _lengths(draw, longest, packed, decodes=not differentiable and draw.chance(0.3))
    case = sink_case(
        lengths,
        h_q,
        h_kv,
        d,
        torch.float16 if half else torch.bfloat16,
        causal=draw.chance(0.75),
        window=None if half else draw.choice(WINDOWS),
        packed=packed,
        sinks=draw.choice(SINKS),
        padded=draw.chance(0.5),
        seed=draw.seed,
        device=draw.device,
    )
    family = "" if half else draw.family()  # float16 holds no 300 x 300
    if family:
        _refill(case, family, draw)
    deterministic = draw.chance(0.7)
    arguments = {**case.arguments(), "deterministic": deterministic}
    with_sink = case.s_aux is not None
    modes = (Mode((), GRADIENTS if with_sink else GRADIENTS[:-1]),) if differentiable else FORWARD_MODES
    return Call(
        seed=draw.seed,
        op="sink_attention",
        arguments=arguments,
        image=Image({}, torch.zeros(4, dtype=torch.int32, device=draw.device)),
        modes=modes,
        oracle=lambda values: sink_problems(case, values, draw),
        specs=sink_specs(case, differentiable, deterministic, num_sms(draw.device)),
        shape=("sink", tuple(lengths), h_q, h_kv, d, packed, case.window, case.causal, differentiable, half, family),
        d_out=case.d_out if differentiable else None,
        unstable=frozenset() if deterministic else frozenset({"dq"}),
        capturable=not differentiable,
    )


def _refill(case: SinkCase, family: str, draw: Draw) -> None:
    """Values of a family, in place; a head of a token is a token to it. Sequences of a batch are one to what sorts."""
    case.q.copy_(query(family, tuple(case.q.shape), draw.gen))
    for tensor in (case.k, case.v):
        *tokens, d = tensor.shape
        tensor.copy_(keys(family, (math.prod(tokens), d), d // 4, draw.gen).view(tensor.shape))


def _lengths(draw: Draw, longest: int, packed: bool, decodes: bool) -> list[tuple[int, int]]:
    """(queries, keys) of each sequence; 1 to 8 queries where `gqa_decode` may answer."""
    number = draw.choice((1, 1, 2, 3, 5) if draw.on_gpu else (1, 2))

    def pair() -> tuple[int, int]:
        queries = draw.rng.randint(1, 8) if decodes else draw.choice((longest, draw.rng.randint(9, max(9, longest))))
        return queries, draw.choice((queries, longest, draw.rng.randint(1, longest), queries + 100))

    if not packed:
        return [pair()] * number
    empty = (0, 0), (0, draw.rng.randint(0, longest)), (draw.rng.randint(0, longest), 0)
    return [draw.choice(empty) if draw.chance(0.2) else pair() for _ in range(number)]


def sink_specs(case: SinkCase, differentiable: bool, deterministic: bool, sms: int) -> tuple[Any, ...]:
    """The kernels that a call launches."""
    if not case.q.numel() or not case.k.numel():
        return ()
    (h_q, d), h_kv = case.q.shape[-2:], case.k.shape[-2]
    kind: dict[str, Any] = {"dtype": case.dtype, "d": d, "packed": case.packed}
    sizes: dict[str, Any] = {"s_q": case.q.shape[-3], "h_q": h_q, "h_kv": h_kv}
    if plan.route(**kind, **sizes, differentiable=differentiable) == "decode":
        read = {name: t for name, t in case.arguments().items() if "cu_seqlens" not in name and name not in ("k", "v")}
        missing: dict[str, Any] = dict.fromkeys(
            ("k_scale", "v_scale", "cache_seqlens", "block_table", "softcap", "alibi_slopes")
        )
        request = GqaRequest(**read, **missing, k_cache=case.k, v_cache=case.v, layout="BSNH", num_splits=None)
        return (decode_spec(request, sms),)
    hides = case.window is not None and (case.packed or case.window < case.k.shape[-3])
    kind["window"] = case.window if hides else None
    specs: list[Any] = [spec.SinkForwardSpec.for_launch(**kind, ratio=h_q // h_kv)]
    if case.packed:
        specs.append(spec.SinkWorkListSpec())
    if differentiable:
        keys = backward_spec.SinkBackwardSpec.for_launch(**kind, deterministic=deterministic)
        facts = (case.dtype, d, case.packed)
        specs += [keys, backward_spec.SinkPrepareSpec(*facts, keys.fused)]
        if keys.fused:
            specs.append(backward_spec.SinkFinishSpec(*facts))
        else:
            specs.append(backward_spec.SinkQueryGradSpec.for_launch(**kind, ratio=h_q // h_kv))
        if case.packed:
            specs.append(spec.SinkWorkListSpec(keys=True))
    return tuple(specs)


def sink_problems(case: SinkCase, values: Mapping[str, torch.Tensor], draw: Draw) -> list[str]:
    """What is wrong, compared with float64.

    Of large calls (more than 2^21 scores) only one sequence and one KV head are compared, and ds_aux, a sum over all
    tokens, is not.
    """
    work = sum(queries * keys for queries, keys in case.lengths) * case.q.shape[-2]
    sequence, heads = None, slice(None)
    if work > 1 << 21:
        sequence, head = draw.rng.randrange(len(case.lengths)), draw.rng.randrange(case.k.shape[-2])
        ratio = case.q.shape[-2] // case.k.shape[-2]
        part, heads = _part(case, sequence, head), slice(head * ratio, (head + 1) * ratio)
        kv_heads = slice(head, head + 1)
    else:
        part, kv_heads = case, heads
    expected = SinkExpectation.of(part)
    problems = []

    def pick(t: torch.Tensor, keys: bool) -> torch.Tensor:
        if sequence is None:
            return t
        rows = case.of_keys(t, sequence) if keys else case.of_queries(t, sequence)
        return rows[:, kv_heads if keys else heads].unsqueeze(0)

    lse = pick(values["lse"], False) if "lse" in values else None
    problems += problems_of(expected.check_forward(pick(values["out"], False), lse))
    for name, measure in zip(GRADIENTS[1:], expected.gradients, strict=True):
        if name not in values or (name == "ds_aux" and sequence is not None):
            continue
        got = values[name].unsqueeze(-1) if name == "ds_aux" else pick(values[name], name in ("dk", "dv"))
        problems += problems_of(measure.compare(got, name))
    return problems


def _part(case: SinkCase, sequence: int, head: int) -> SinkCase:
    """One sequence and one KV head of a case, as a batch of one."""
    ratio = case.q.shape[-2] // case.k.shape[-2]
    group = slice(head * ratio, (head + 1) * ratio)
    q, d_out = (case.of_queries(t, sequence)[:, group].unsqueeze(0) for t in (case.q, case.d_out))
    k, v = (case.of_keys(t, sequence)[:, head : head + 1].unsqueeze(0) for t in (case.k, case.v))
    s_aux = None if case.s_aux is None else case.s_aux[group]
    numbers = (case.causal, case.window, case.softmax_scale)
    return SinkCase([case.lengths[sequence]], q, k, v, s_aux, d_out, *numbers, None, None)
