"""Calls with one wrong argument. Each must raise an error that names the argument, and write nothing."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, MutableSequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

from bench.fuzzing.calls import Call, Mode, invoke
from bench.fuzzing.generate import draw_call
from cute_kernels.gqa.layouts import LAYOUTS
from fp8_mla.formats import FORMATS, V3_2

FIRST: Final = 10**12
"""First seed of invalid calls; seeds of valid calls are below."""
PER_CALL: Final = 64
"""Neighbouring seeds that each change one argument of the same valid call."""
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
OTHERS = (torch.bool, torch.int16, torch.int32, torch.int64, torch.uint8, torch.complex64)


class Wrong(NamedTuple):
    """One argument made wrong.

    label   how it is wrong, in words
    names   the message must have one of these as a word
    change  the changed arguments, by name
    """

    label: str
    names: tuple[str, ...]
    change: dict[str, Any]


@dataclass(frozen=True)
class Rule:
    """What a tensor argument of an op has to be.

    dtypes  that the op takes, in this call or in another; empty: the tensor's own
    grow    axes whose size other arguments or the op fix, so that a larger size is wrong
    also    other arguments that the error may name where a shape or a dtype is wrong
    unit    whether the last stride must be 1
    align   alignment of rows and the address in bytes; 0: any
    needed  whether None is an error
    """

    dtypes: tuple[torch.dtype, ...]
    grow: tuple[int, ...]
    also: tuple[str, ...] = ()
    unit: bool = False
    align: int = 0
    needed: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


INT32 = (torch.int32,)
FLOAT32 = (torch.float32,)
HALVES = (torch.bfloat16, torch.float16)
RULES: Final[dict[str, dict[str, Rule]]] = {
    "mla_fp8_decode": {
        "q": Rule((torch.bfloat16,), (3,), unit=True, align=16, needed=True),
        "kv_cache": Rule((torch.uint8, torch.float8_e4m3fn), (-1,), unit=True, align=16, needed=True),
        "indices": Rule(INT32, (0, 1), unit=True, needed=True),
        "topk_length": Rule(INT32, (0, 1)),
        "block_table": Rule(INT32, (0,), unit=True, needed=True),
        "cache_seqlens": Rule(INT32, (0,), needed=True),
        "s_aux": Rule(FLOAT32, (0,), unit=True),
        "extra_kv_cache": Rule(
            (torch.uint8, torch.float8_e4m3fn), (-1,), ("extra_indices",), unit=True, align=16, needed=True
        ),
        "extra_indices": Rule(INT32, (0, 1), unit=True, needed=True),
        "extra_topk_length": Rule(INT32, (0, 1)),
        "out": Rule((torch.bfloat16,), (0, 1, 2, 3), unit=True, align=16),
        "lse": Rule(FLOAT32, (0, 1, 2)),
    },
    "mla_fp8_append": {
        "kv": Rule((torch.bfloat16,), (1,), unit=True, align=16, needed=True),
        "kv_cache": Rule((torch.uint8, torch.float8_e4m3fn), (-1,), unit=True, align=16, needed=True),
        "slot_mapping": Rule((torch.int64, torch.int32), (0,), needed=True),
    },
    "gqa_decode": {
        "q": Rule(HALVES, (3,), ("k_cache",), unit=True, align=8, needed=True),
        "k_cache": Rule(
            (torch.int8, torch.float8_e4m3fn, *HALVES), (-1, -2, -3), ("v_cache", "q"), unit=True, align=16, needed=True
        ),
        "v_cache": Rule((), (0, -1, -2, -3), unit=True, align=16, needed=True),
        "k_scale": Rule(HALVES[1:] + FLOAT32, (0, 1, 2, 3)),
        "v_scale": Rule(HALVES[1:] + FLOAT32, (0, 1, 2, 3)),
        "cache_seqlens": Rule(INT32, (0,)),
        "block_table": Rule(INT32, (0,), unit=True, needed=True),
        "alibi_slopes": Rule(FLOAT32, (0, 1), unit=True),
        "s_aux": Rule(FLOAT32, (0,), unit=True),
        "out": Rule((), (0, 1, 2, 3), unit=True, align=8),
        "lse": Rule(FLOAT32, (0, 1, 2)),
    },
    "kv_int8_append": {
        "k": Rule(HALVES, (1, 2), ("v",), unit=True, align=16, needed=True),
        "v": Rule((), (0, 1, 2), unit=True, align=16, needed=True),
        "k_cache": Rule((torch.int8,), (0, -1, -2), ("v_cache", "k"), unit=True, align=16, needed=True),
        "v_cache": Rule((torch.int8,), (0, -1, -2), needed=True),
        "k_scale": Rule(HALVES[1:] + FLOAT32, (0, 1, 2, 3), ("v_scale",), needed=True),
        "v_scale": Rule((), (0, 1, 2, 3), needed=True),
        "slot_mapping": Rule((torch.int64, torch.int32), (0,), needed=True),
    },
    "merge_states": {
        "outs": Rule((torch.float32, *HALVES), (-1,), ("lses", "out"), unit=True, align=16, needed=True),
        "lses": Rule(FLOAT32, (0, 1, 2, 3, 4), needed=True),
        "s_aux": Rule(FLOAT32, (0,)),
        "out": Rule((torch.float32, *HALVES), (0, 1, 2, 3), unit=True, align=16),
        "lse": Rule(FLOAT32, (0, 1, 2)),
    },
    "sink_attention": {
        "q": Rule(HALVES, (-1,), ("k",), unit=True, align=16, needed=True),
        "k": Rule((), (-1,), ("v",), unit=True, align=16, needed=True),
        "v": Rule((), (-1, -2, -3), unit=True, align=16, needed=True),
        "s_aux": Rule(FLOAT32, (0,), unit=True),
        "cu_seqlens_q": Rule(INT32, (0,), ("cu_seqlens_k",), unit=True, needed=True),
        "cu_seqlens_k": Rule(INT32, (0,), unit=True, needed=True),
    },
}
DECODES = ("mla_fp8_decode", "gqa_decode")
NO_GRADIENT: Final = {
    "mla_fp8_decode": ("q", "s_aux", "out"),
    "gqa_decode": ("q", "k_scale", "s_aux", "out"),
    "merge_states": ("outs", "lses", "out"),
    "mla_fp8_append": ("kv",),
    "kv_int8_append": ("k", "v"),
}
"""By op without a backward: arguments that it refuses when they require gradients."""


def wrong_ways(call: Call, given: Mapping[str, torch.Tensor], rng: random.Random) -> list[Wrong]:
    """Every way to make one argument of a valid call wrong.

    Args:
        call: the valid call.
        given: its outputs.
        rng: chooses among dtypes that are all wrong.
    """
    arguments = {**call.arguments, **given}
    ways: list[Wrong] = []
    for name, rule in RULES[call.op].items():
        value = arguments.get(name)
        if isinstance(value, torch.Tensor):
            ways += _wrong_tensors(name, value, rule, call, rng)
        elif name in arguments and name not in given:
            ways += _unwanted(name, call, arguments)
    ways += _wrong_numbers(call, arguments)
    ways += _wrong_together(call, arguments)
    return ways


def _wrong_tensors(name: str, t: torch.Tensor, rule: Rule, call: Call, rng: random.Random) -> Iterator[Wrong]:
    op, arguments = call.op, call.arguments
    anywhere = (name, *rule.also)
    for other in (t.tolist() if t.numel() < 100 else [1], 3.5, "tensor"):
        yield Wrong(f"{name} is a {type(other).__name__}", anywhere, {name: other})
    needed = rule.needed or (name in ("k_scale", "v_scale") and arguments.get("k_cache", t).dtype == torch.int8)
    if op == "gqa_decode" and name == "cache_seqlens":
        needed = arguments.get("block_table") is not None
    if needed:
        # keys are named by lengths and a table: without one, the error may name the other
        yield Wrong(f"{name} is None", (*anywhere, "cache_seqlens", "block_table"), {name: None})
    right = rule.dtypes or (t.dtype,)
    for dtype in rng.sample([dtype for dtype in (*FLOATS, *OTHERS) if dtype not in right], 2):
        yield Wrong(f"{name} of {dtype}", anywhere, {name: _fresh(t, t.shape, dtype)})
    if t.dtype.itemsize in (4, 8) and not t.is_floating_point():
        unsigned = torch.uint32 if t.dtype.itemsize == 4 else torch.uint64
        yield Wrong(f"{name} of {unsigned}", anywhere, {name: _fresh(t, t.shape, unsigned)})
    # the first argument fixes the device, so the error may name any other
    yield Wrong(f"{name} elsewhere", tuple(RULES[op]), {name: _elsewhere(t)})
    for axis in rule.grow:
        if -t.dim() <= axis < t.dim() and _decided(op, name, axis % t.dim(), arguments):
            shape = list(t.shape)
            shape[axis] += 8 if axis % t.dim() == t.dim() - 1 else 1
            names = (*anywhere, *(("q", "v") if axis % t.dim() == 0 else ()))
            yield Wrong(f"{name} with more along axis {axis}", names, {name: _fresh(t, shape, t.dtype)})
    yield Wrong(f"{name} of one axis more", (*anywhere, "q"), {name: t[None, None].expand(1, 2, *t.shape)})
    if t.numel() > 1 and rule.unit and t.shape[-1] > 1 and _has_rows(op, name, arguments):
        yield Wrong(f"{name} with a last stride of 2", anywhere, {name: torch.stack([t, t], -1)[..., 0]})
    if t.numel() and rule.align > t.element_size() and _has_rows(op, name, arguments):
        yield from _misaligned(name, t, rule, anywhere, _is_planar(name, arguments))
    if name in NO_GRADIENT.get(op, ()) and t.is_floating_point() and t.dtype.itemsize > 1:
        yield Wrong(f"{name} requires gradients", anywhere, {name: t.detach().clone().requires_grad_()})


def _has_rows(op: str, name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether the last axis of an argument must be dense; in packed caches whole pages must be."""
    layout = LAYOUTS.get(arguments.get("layout", ""))
    return not (layout is not None and layout.packed and name in ("k_cache", "v_cache"))


def _decided(op: str, name: str, axis: int, arguments: Mapping[str, Any]) -> bool:
    """Whether another argument or the op fixes the size along an axis."""
    contiguous = arguments.get("layout") in ("BNSH", "BSNH")
    if op == "gqa_decode" and name == "k_cache" and axis == 0:
        return contiguous
    return not (op == "mla_fp8_decode" and name.endswith("topk_length") and axis == 1 and arguments[name].dim() < 2)


def _is_planar(name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether an argument is a latent cache in whose pages strides mean nothing."""
    if not name.endswith("kv_cache"):
        return False
    token_format = FORMATS[arguments.get(name.replace("kv_cache", "cache_format")) or V3_2.name]
    return token_format.page_layout(1, arguments.get("cache_layout")).cache_layout == "planar"


def _misaligned(
    name: str, t: torch.Tensor, rule: Rule, names: tuple[str, ...], only_pages: bool = False
) -> Iterator[Wrong]:
    size, itemsize = t.numel(), t.element_size()
    step = rule.align // 2 // itemsize or 1
    memory = torch.zeros(size + rule.align, dtype=t.dtype, device=t.device)
    yield Wrong(f"{name} at an odd address", names, {name: memory[step : step + size].view(t.shape)})
    if t.dim() > 1 and t.shape[-2] > 1:
        rows = torch.zeros((*t.shape[:-1], t.shape[-1] + step), dtype=t.dtype, device=t.device)[..., : t.shape[-1]]
        if rows.stride(0 if only_pages else -2) * itemsize % rule.align and (not only_pages or len(t) > 1):
            yield Wrong(f"{name} with odd rows", names, {name: rows})


def _unwanted(name: str, call: Call, arguments: Mapping[str, Any]) -> Iterator[Wrong]:
    """Calls with a tensor where the call must have None."""
    table = torch.zeros((1, 1), dtype=torch.int32, device=call.image.before.device)
    if call.op == "gqa_decode" and name == "block_table":
        yield Wrong("block_table without pages", (name,), {name: table})
    if call.op == "gqa_decode" and name in ("k_scale", "v_scale"):
        other = "v_scale" if name == "k_scale" else "k_scale"
        if arguments["k_cache"].dtype.itemsize == 2 or arguments[other] is None:
            yield Wrong(f"{name} alone", (name, other), {name: torch.ones((), device=table.device)})
    if call.op == "mla_fp8_decode" and name in ("indices", "block_table", "cache_seqlens"):
        batch, s_q = arguments["q"].shape[:2]
        shape = {"indices": (batch, s_q, 4), "block_table": (batch, 4), "cache_seqlens": (batch,)}[name]
        both = torch.zeros(shape, dtype=torch.int32, device=table.device)
        yield Wrong(f"{name} with the other kind", ("indices", "block_table"), {name: both})
    if call.op == "sink_attention" and name.startswith("cu_seqlens"):
        yield Wrong(f"{name} alone", ("q", "cu_seqlens_q", "cu_seqlens_k"), {name: table[0]})


def _wrong_numbers(call: Call, arguments: Mapping[str, Any]) -> Iterator[Wrong]:
    numbers: dict[str, tuple[Any, ...]] = {}
    if call.op in DECODES:
        numbers = {"num_splits": (0, -1, 257, 2**40, 1.5, True, "2"), "softmax_scale": ("1", [1.0], 1j)}
    if call.op == "mla_fp8_decode":
        numbers["exchange"] = ("value", 1, "Codes", "")
        numbers["scores"] = ("fp16", 1, "fp8", "")
        numbers |= {"cache_format": ("v3", 1, "", ["v4"]), "cache_layout": ("rows", 1, "Planar")}
        numbers["extra_cache_format"] = ("v4 ", 2) if arguments.get("extra_kv_cache") is not None else ("v4",)
    if call.op == "mla_fp8_append":
        numbers = {"cache_format": ("v3", 1, ""), "cache_layout": ("rows", 1, "Planar")}
    if call.op == "gqa_decode":
        numbers |= {"window": (0, -1, -(2**31), 1.5, True, "1"), "layout": ("NHD", "bnsh", None, 3)}
        numbers["softcap"] = (0.0, -1.0, float("inf"), float("nan"), "2", True)
    if call.op == "kv_int8_append":
        numbers = {"layout": ("NHD", "paged", None, 3)}
    if call.op == "sink_attention":
        numbers = {"window": (0, -1, 1.5, True, "1"), "softmax_scale": ("1", [1.0], True)}
        numbers |= {"causal": (1, None, "yes"), "deterministic": (1, None, "no")}
    for name, values in numbers.items():
        for value in values:
            yield Wrong(f"{name} is {value!r}", (name,), {name: value})


def _wrong_together(call: Call, arguments: Mapping[str, Any]) -> Iterator[Wrong]:
    """Calls that are wrong by sizes: of one argument, or of several together."""
    q = arguments.get("q")
    if call.op in DECODES and q is not None:
        batch, s_q, h_q, d = q.shape
        yield Wrong("q without heads", ("q",), {"q": q[:, :, :0]})
        yield Wrong("q without queries", ("q",), {"q": q[:, :0]})
        if call.op == "gqa_decode":
            yield Wrong("nine queries", ("q",), {"q": _fresh(q, (batch, 9, h_q, d), q.dtype)})
            yield Wrong("1025 heads", ("q",), {"q": q[:, :, :1].expand(batch, s_q, 1025 * 24, d)})
            scale = arguments["v_scale"]
            if scale is not None:
                other = torch.float16 if scale.dtype == torch.float32 else torch.float32
                yield Wrong("scales of two dtypes", ("v_scale", "k_scale"), {"v_scale": scale.to(other)})
        else:
            yield Wrong("129 heads", ("q",), {"q": q[:, :, :1].expand(batch, s_q, 129, d)})
    if call.op == "merge_states":
        outs = arguments["outs"]
        yield Wrong("no states", ("outs",), {"outs": outs[:0]})
        yield Wrong("520 values", ("outs",), {"outs": _fresh(outs, (*outs.shape[:-1], 520), outs.dtype)})
        yield Wrong("12 values", ("outs",), {"outs": _fresh(outs, (*outs.shape[:-1], 12), outs.dtype)})
    if call.op == "sink_attention" and q is not None:
        k = arguments["k"]
        yield Wrong("codes for keys", ("k",), {"k": k.to(torch.int8)})
        yield Wrong("no heads", ("q",), {"q": q[..., :0, :]})
        if k.shape[-2] > 1:
            heads = [*q.shape[:-2], k.shape[-2] + 1, q.shape[-1]]
            yield Wrong("heads that are no multiple", ("q",), {"q": _fresh(q, heads, q.dtype)})
        cu_seqlens = arguments["cu_seqlens_q"]
        if cu_seqlens is not None and q.shape[0] > 0:
            yield Wrong("lengths from 1 on", ("cu_seqlens_q",), {"cu_seqlens_q": cu_seqlens + 1})
            late = cu_seqlens.clone()
            late[-1] += 1
            yield Wrong("lengths that end late", ("cu_seqlens_q",), {"cu_seqlens_q": late})
            middle = cu_seqlens.clone()
            middle[0] = 5
            yield Wrong("lengths that decrease", ("cu_seqlens_q",), {"cu_seqlens_q": middle})


def _fresh(t: torch.Tensor, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(tuple(shape), dtype=dtype, device=t.device)


def _elsewhere(t: torch.Tensor) -> torch.Tensor:
    """The tensor on another device."""
    return t.cpu() if t.is_cuda else t.to("meta")


# ---- the verdict


def judge(call: Call, wrong: Wrong, given: Mapping[str, torch.Tensor]) -> str:
    """Makes a wrong call; returns what is wrong with its refusal in words, or an empty string."""
    try:
        invoke(call.op, {**call.arguments, **given, **wrong.change}, Mode())
    except (ValueError, TypeError) as error:
        message = str(error)
        if any(re.search(rf"\b{re.escape(name)}\b", message) for name in wrong.names):
            return ""
        return f"{wrong.label}: {type(error).__name__} without {' or '.join(wrong.names)}: {message}"
    except Exception as error:
        return f"{wrong.label}: {type(error).__name__} instead of ValueError or TypeError: {error}"
    return f"{wrong.label}: accepted"


def run_invalid(
    first: int,
    last: int,
    device: torch.device,
    *,
    prepared: bool | None = None,
    marks: MutableSequence[int] | None = None,
) -> tuple[int, list[tuple[int, str]]]:
    """Makes the invalid calls of the seeds from `first` to before `last`.

    Args:
        first: not below `FIRST`.
        last: the first seed that is not made.
        device: to make them on.
        prepared: whether the valid call runs first, so that the op has a prepared launch for its shapes; None: before
            even seeds.
        marks: its first item is set to each seed before its call.

    Returns:
        How many were made, and pairs of a seed and what is wrong.
    """
    problems: list[tuple[int, str]] = []
    made, marks = 0, [0] if marks is None else marks
    for base in range(first // PER_CALL, -(-last // PER_CALL)):
        seeds = range(max(first, base * PER_CALL), min(last, (base + 1) * PER_CALL))
        call = draw_call(base, device, may_be_large=False)
        later = [seed for seed in seeds if (seed % 2 == 0 if prepared is None else prepared)]
        problems += _of_one_call(call, [seed for seed in seeds if seed not in later], marks)
        if later:
            block = call.image.before.clone()
            try:
                call.run(call.modes[0], call.image.views(block, call.modes[0].given))
            except (TypeError, ValueError) as error:
                problems.append((later[0], f"{call.op}: the valid call is refused: {error}"))
            problems += _of_one_call(call, later, marks)
        made += len(seeds)
    return made, problems


def _of_one_call(call: Call, seeds: list[int], marks: MutableSequence[int]) -> list[tuple[int, str]]:
    """What is wrong with the calls of some seeds. All outputs lie in one block, which must not change."""
    block, ways = wrong_calls(call)
    problems = []
    for seed in seeds:
        marks[0] = seed
        said = judge(call, chosen(ways.ways, seed), ways.given)
        if said:
            problems.append((seed, f"{call.op}: {said}"))
    if torch.equal(block, call.image.before):
        return problems
    for seed in seeds:  # one at a time, to find which call wrote
        block, ways = wrong_calls(call)
        wrong = chosen(ways.ways, seed)
        judge(call, wrong, ways.given)
        if not torch.equal(block, call.image.before):
            problems.append((seed, f"{call.op}: {wrong.label}: something was written"))
    return problems


class WrongCalls(NamedTuple):
    """Wrong calls that differ from one valid call, and the outputs of that call."""

    ways: list[Wrong]
    given: dict[str, torch.Tensor]


def wrong_calls(call: Call) -> tuple[torch.Tensor, WrongCalls]:
    """A block with the outputs of the call, which must not change, and all wrong calls with these outputs."""
    block = call.image.before.clone()
    given = call.image.views(block)
    return block, WrongCalls(wrong_ways(call, given, random.Random(call.seed)), given)


def chosen(ways: list[Wrong], seed: int) -> Wrong:
    """The way that a seed names."""
    return random.Random(seed).choice(ways)
