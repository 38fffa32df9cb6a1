"""Calls of `gqa_decode` and `kv_int8_append`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from bench.fuzzing.calls import Call, Mode
from bench.fuzzing.draws import INT32_MAX, MAX_SCRATCH, Draw, extreme_lengths, name_of, num_sms, problems_of
from bench.fuzzing.memory import Image, contiguous_stride, padded_stride
from bench.fuzzing.mla import DECODE_MODES, SINKS, slot_mapping, special_values
from bench.timing import bits
from cute_kernels.gqa import op
from cute_kernels.gqa.append_spec import KvAppendSpec
from cute_kernels.gqa.layouts import LAYOUTS, PACKED, CacheSizes, scale_shapes
from cute_kernels.gqa.reference import reference_append
from cute_kernels.gqa.spec import GqaDecodeSpec
from tests.kit.gqa_cases import SCALE_NAMES, VALUES, GqaCase, check_gqa, gqa_case

FEW_ROWS: Final = 8
"""Query rows of a KV head up to which a kernel has 8 columns; above it has 16."""
PLAIN: Final = {"k_scales": None, "v_scales": None}
HALF = torch.float16


def _same(scales: str) -> dict[str, Any]:
    return {"k_scales": scales, "v_scales": scales}


VARIANTS: Final[tuple[dict[str, Any], ...]] = (
    # int8, d 128, scales per token and head: every layout and page size
    *({"layout": layout, "page_size": 16 if LAYOUTS[layout].packed else 64} for layout in LAYOUTS),
    *({"layout": "paged_NHD", "page_size": page_size} for page_size in (1, 2, 16, 1024)),
    {"layout": "paged_NHD", "page_size": 64, "many": True},
    {"layout": "BNSH", "many": True},
    # scales
    *({"layout": "BNSH", **_same(scales)} for scales in ("per_head", "per_group_32", "per_group_64")),
    {"layout": "paged_NHD", "k_scales": "per_token", "v_scales": "per_tensor"},
    {"layout": "paged_HND", "page_size": 32, **_same("per_head"), "scale_dtype": HALF},
    {"layout": "paged_NHD", "page_size": 64, **_same("per_token_head"), "scale_dtype": HALF},
    {"layout": "BSNH", "k_scales": "per_group_32", "v_scales": "per_head", "scale_dtype": HALF},
    {"layout": "paged_vllm", "page_size": 8, **_same("per_head")},
    # modifiers of scores
    {"layout": "BNSH", "alibi": True},
    {"layout": "BNSH", "alibi": True, "softcap": True},
    {"layout": "BNSH", **_same("per_head"), "q_dtype": HALF, "many": True, "alibi": True, "softcap": True},
    {"layout": "BNSH", "softcap": True},
    {"layout": "paged_NHD", "page_size": 64, "alibi": True},
    # FP8
    {"layout": "paged_NHD", "page_size": 64, "kv_dtype": "fp8", **PLAIN},
    {"layout": "paged_NHD", "page_size": 64, "kv_dtype": "fp8", **PLAIN, "q_dtype": HALF},
    {"layout": "paged_NHD", "page_size": 64, "kv_dtype": "fp8"},
    {"layout": "BNSH", "kv_dtype": "fp8", **_same("per_head")},
    {"layout": "paged_vllm", "kv_dtype": "fp8", "q_dtype": HALF, "d": 256, "scale_dtype": HALF},
    # 16 bits
    {"layout": "BNSH", "kv_dtype": "bf16"},
    {"layout": "BSNH", "kv_dtype": "bf16"},
    {"layout": "BSNH", "kv_dtype": "bf16", "d": 64},
    {"layout": "BSNH", "kv_dtype": "bf16", "d": 64, "many": True},
    {"layout": "BSNH", "kv_dtype": "fp16", "d": 64},
    {"layout": "paged_NHD", "page_size": 1, "kv_dtype": "bf16", "d": 64, "many": True},
    {"layout": "paged_NHD", "page_size": 16, "kv_dtype": "bf16"},
    {"layout": "paged_vllm", "page_size": 32, "kv_dtype": "fp16", "d": 256},
    # head dimensions
    {"layout": "BNSH", "d": 64},
    {"layout": "paged_NHD", "page_size": 64, "d": 64, "many": True},
    {"layout": "paged_NHD", "page_size": 64, "d": 256},
)
USUAL: Final[dict[str, Any]] = {
    "page_size": 16,
    "kv_dtype": "int8",
    **_same("per_token_head"),
    "scale_dtype": torch.float32,
    "q_dtype": torch.bfloat16,
    "d": 128,
    "many": False,
    "alibi": False,
    "softcap": False,
}
ALIKE: Final = {
    "per_head": ("per_head", "per_tensor"),
    "per_tensor": ("per_head", "per_tensor"),
    "per_token_head": ("per_token_head", "per_token_head", "per_token"),
    "per_token": ("per_token_head", "per_token"),
}
"""Granularities that run the same kernel."""
SPLITS = (None, None, None, None, 1, 2, 3, 8, 40, 256)
WINDOWS = (None, None, None, None, 1, 2, 63, 64, 65, 100, 1000, INT32_MAX)


def kernel_specs() -> list[Any]:
    """Every kernel that these calls may launch, found by planning small cases: each with and without a cluster."""
    specs: dict[Any, None] = {}
    for variant in VARIANTS:
        case = _small_case(variant)
        spec = decode_specs(case, 1, torch.device("cpu"))[0]
        specs[spec] = None
        if spec.warps == 8:
            specs[dataclasses.replace(spec, cluster=8)] = None
    return [*specs, *dict.fromkeys(_append_spec(**{**APPEND_USUAL, **variant}) for variant in APPEND_VARIANTS)]


def decode_specs(case: GqaCase, num_splits: int | None, device: torch.device) -> tuple[GqaDecodeSpec, ...]:
    """The kernels that a call launches if there is a key."""
    request = op._Request(**case.arguments(), num_splits=num_splits)
    return (op.decode_spec(request, num_sms(device)),)


def _small_case(variant: Mapping[str, Any]) -> GqaCase:
    options = {**USUAL, **variant}
    many, alibi, softcap = (options.pop(name) for name in ("many", "alibi", "softcap"))
    if options["kv_dtype"] in ("bf16", "fp16"):
        options["q_dtype"] = HALF if options["kv_dtype"] == "fp16" else torch.bfloat16
    alibi, softcap = "head" if alibi else "none", 2.0 if softcap else None
    return gqa_case(**options, seqlens=[3], h_q=16 if many else 2, h_kv=1, alibi=alibi, softcap=softcap)


def decode_call(draw: Draw) -> Call:
    """A decode of one of the variants."""
    options = {**USUAL, **draw.choice(VARIANTS)}
    many, alibi, softcap = (options.pop(name) for name in ("many", "alibi", "softcap"))
    if options["kv_dtype"] in ("bf16", "fp16"):
        options["q_dtype"] = HALF if options["kv_dtype"] == "fp16" else torch.bfloat16
    for name in ("k_scales", "v_scales"):
        options[name] = draw.choice(ALIKE.get(options[name], (options[name],)))
    if options["page_size"] == 1024:
        options["page_size"] = draw.choice((128, 256, 1024))  # a TMA copy brings 128 tokens of any of them
    if softcap:
        options["softcap"] = draw.choice((2.0, 15.0, 50.0))
    if alibi:
        options["alibi"] = draw.choice(("head", "batch"))
    sizes = [
        (s_q, ratio)
        for s_q in range(1, 9)
        for ratio in (1, 2, 3, 4, 7, 8, 16, 64)
        if (s_q * ratio > FEW_ROWS) == many and s_q * ratio <= 128
    ]
    s_q, ratio = draw.choice(sizes)
    h_kv, batch = draw.choice((1, 2, 2, 3, 8)), draw.batch()
    longest = draw.choice((1, 64, 130, 300, 700)) if draw.on_gpu else draw.choice((1, 64, 130))
    if draw.large:
        batch, longest = draw.choice(((1, 131_072), (1, 30_000), (128, 2048), (16, 4096)))
        h_kv = 2 if longest > 100_000 or batch > 100 else 8
    elif batch > 8:
        longest = min(longest, 130)
    paged = LAYOUTS[options["layout"]].paged
    whole = not paged and draw.chance(0.3)
    lengths = [longest] * batch if whole else draw.lengths(batch, longest, options["page_size"])
    lengths[draw.rng.randrange(batch)] = longest
    case = gqa_case(
        **options,
        seqlens=lengths,
        h_q=h_kv * ratio,
        h_kv=h_kv,
        s_q=s_q,
        values=draw.choice(VALUES),
        causal=draw.chance(0.7),
        window=draw.choice(WINDOWS),
        sink=draw.choice(SINKS),
        bad_entries=draw.chance(0.2),
        whole=whole,
        padded=draw.chance(0.5),
        seed=draw.seed,
        device=draw.device,
    )
    case = _vary(case, options["page_size"] if paged else longest, longest, whole, draw)
    num_splits = draw.choice(SPLITS)
    if (num_splits or 1) * batch * h_kv * max(8, s_q * ratio) * options["d"] > MAX_SCRATCH:
        num_splits = None
    keys = case.k_cache.numel() and batch and (case.block_table is None or case.block_table.shape[1])
    shape = tuple(case.q.shape)
    stride = padded_stride(shape, 4, draw.rng) if draw.chance(0.5) else contiguous_stride(shape)
    outputs = {
        "out": (case.q.dtype, shape, stride, 8),
        "lse": (torch.float32, shape[:3], padded_stride(shape[:3], 1, draw.rng), 4),
    }
    rows = draw.rows(len(case.q), 1 if draw.large else 3)

    def oracle(values: Mapping[str, torch.Tensor]) -> list[str]:
        if not rows:
            return []
        return problems_of(check_gqa(values["out"][rows], values["lse"][rows], rows_of(case, rows)))

    return Call(
        seed=draw.seed,
        op="gqa_decode",
        arguments={**case.arguments(), "num_splits": num_splits},
        image=Image.of_outputs(outputs, draw.device, draw.rng),
        modes=DECODE_MODES,
        oracle=oracle,
        specs=decode_specs(case, num_splits, draw.device) if keys else (),
        shape=("gqa", *case.k_cache.shape, *shape, case.layout, options["kv_dtype"], num_splits, case.window),
    )


def _vary(case: GqaCase, unit: int, longest: int, whole: bool, draw: Draw) -> GqaCase:
    """The case with extreme lengths, or with the same meaning passed in another way (lengths, table, scale)."""
    given = case.cache_seqlens
    if given is None:
        if draw.chance(0.5):
            lengths = torch.full((len(case.q),), longest, dtype=torch.int32, device=draw.device)
            case = dataclasses.replace(case, cache_seqlens=extreme_lengths(lengths, longest, draw))
    else:
        capacity = -1
        if case.block_table is not None:
            table = case.block_table
            if longest % unit == 0 and draw.chance(0.5):
                table = table[:, : longest // unit]  # the longest sequence fills it
            capacity = table.shape[1] * unit
            case = dataclasses.replace(case, block_table=table)
        case = dataclasses.replace(case, cache_seqlens=extreme_lengths(given, capacity, draw))
    if case.block_table is not None and draw.chance(0.02):
        case = dataclasses.replace(case, block_table=case.block_table[:, :0])
    if case.softmax_scale is None and draw.chance(0.3):
        case = dataclasses.replace(case, softmax_scale=case.q.shape[-1] ** -0.5 * draw.choice((0.25, 0.5, 1.0)))
    return case


def rows_of(case: GqaCase, rows: Sequence[int]) -> GqaCase:
    """The call for some of its sequences."""
    names = ["q", "block_table", "cache_seqlens"]
    if case.block_table is None:
        # scales with several axes have one for the sequences
        names += ["k_cache", "v_cache"]
        names += [name for name in ("k_scale", "v_scale") if getattr(case, name) is not None]
        names = [name for name in names if "scale" not in name or getattr(case, name).dim() > 1]
    if case.alibi_slopes is not None and case.alibi_slopes.dim() == 2:
        names.append("alibi_slopes")
    picked = {}
    for name in names:
        t = getattr(case, name)
        if t is None:
            continue
        narrow = t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t  # torch cannot index FP8
        picked[name] = narrow[list(rows)].view(t.dtype)
    return dataclasses.replace(case, **picked)


# ---- append

GIVEN = ("per_tensor", "per_head")
PLAIN_LAYOUTS: Final = tuple(name for name, layout in LAYOUTS.items() if not layout.packed)
APPEND_USUAL: Final[dict[str, Any]] = {
    "dtype": torch.bfloat16,
    "d": 128,
    "h_kv": 8,
    **_same("per_token_head"),
    "scale_dtype": torch.float32,
    "vllm": False,
}
APPEND_VARIANTS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"vllm": True},
    {"dtype": HALF},
    {"scale_dtype": HALF},
    _same("per_tensor"),
    _same("per_token"),
    {**_same("per_token"), "scale_dtype": HALF},
    {**_same("per_token"), "dtype": HALF, "d": 256, "h_kv": 64},
    {**_same("per_token"), "d": 64, "h_kv": 3, "dtype": HALF},
    _same("per_group_32"),
    {**_same("per_group_64"), "dtype": HALF, "scale_dtype": HALF},
    {"k_scales": "per_group_32", "d": 64, "scale_dtype": HALF},
    {"k_scales": "per_tensor", "v_scales": "per_group_64", "dtype": HALF, "scale_dtype": HALF, "vllm": True},
    {"h_kv": 2},
)


def _append_spec(
    *, dtype: torch.dtype, d: int, h_kv: int, k_scales: str, v_scales: str, scale_dtype: torch.dtype, vllm: bool
) -> KvAppendSpec:
    k_scale, v_scale = ("given" if kind in GIVEN else kind for kind in (k_scales, v_scales))
    return KvAppendSpec.for_launch(
        dtype=name_of(dtype),
        d=d,
        h_kv=h_kv,
        k_scale=k_scale,
        v_scale=v_scale,
        scale_dtype=name_of(scale_dtype),
        vllm=vllm,
    )


def append_call(draw: Draw) -> Call:
    """Appends new keys and values to caches of random codes."""
    options = {**APPEND_USUAL, **draw.choice(APPEND_VARIANTS)}
    if "per_token" not in (options["k_scales"], options["v_scales"]):
        options["h_kv"] = draw.choice((1, 2, 3, 8))  # the kernel does not depend on it
    h_kv, d = options["h_kv"], options["d"]
    layout = PACKED.name if options["vllm"] else draw.choice(PLAIN_LAYOUTS)
    rows = draw.choice(LAYOUTS[layout].page_sizes or (1, 16, 64, 128))
    tokens = draw.choice((0, 1, 7, 33, 130))
    if draw.large:
        tokens = 2000
    if not LAYOUTS[layout].paged and rows > 1:
        rows -= draw.choice((0, 3))
    # one head is a scale of its own shape only where there are several
    sizes = CacheSizes(-(-(tokens + draw.choice((2, 40))) // rows), rows, h_kv, d)
    tensors = _append_targets(layout, sizes, options, draw)
    shape = (tokens, h_kv, d)
    values = [torch.randn(shape, generator=draw.gen, device=draw.device) for _ in range(2)]
    k, v = (special_values(x, draw, options["dtype"]) for x in values)
    if draw.chance(0.4):
        k = torch.stack([k, k.flip(0)], dim=1)[:, 0]
        v = torch.cat([v, v.flip(1)], dim=1)[:, :h_kv]
    slots = slot_mapping(tokens, sizes.outer * sizes.rows, draw)
    image = Image.of_tensors(tensors, draw.rng)

    def oracle(got: Mapping[str, torch.Tensor]) -> list[str]:
        expected = {name: t.cpu().clone() for name, t in tensors.items()}
        reference_append(k.cpu(), v.cpu(), **expected, slot_mapping=slots.cpu(), layout=layout)
        problems = []
        for name, want in expected.items():
            differ = int((bits(got[name]).cpu() != bits(want)).sum())
            if differ:
                problems.append(f"{name}: {differ} of {want.numel()} are not those of reference_append")
        return problems

    return Call(
        seed=draw.seed,
        op="kv_int8_append",
        arguments={"k": k, "v": v, "slot_mapping": slots, "layout": layout},
        image=image,
        modes=(Mode(tuple(tensors)),),
        oracle=oracle,
        specs=(_append_spec(**options),) if tokens else (),
        shape=("kv append", layout, tokens, *sizes, options["k_scales"], options["v_scales"]),
    )


def _append_targets(layout: str, sizes: CacheSizes, options: Mapping[str, Any], draw: Draw) -> dict[str, torch.Tensor]:
    known = LAYOUTS[layout]
    size = dict.fromkeys("bp", sizes.outer) | dict.fromkeys("st", sizes.rows) | {"h": sizes.h_kv, "d": sizes.d}
    size |= {"c": sizes.d // 16, "x": 16}
    tensors = {}
    for name, axes in (("k_cache", known.key), ("v_cache", known.value)):
        shape = tuple(size[axis] for axis in axes)
        codes = torch.randint(-128, 128, shape, dtype=torch.int8, generator=draw.gen, device=draw.device)
        tensors[name] = _apart(codes, 16, draw)
    for name, kind in (("k_scale", options["k_scales"]), ("v_scale", options["v_scales"])):
        # some granularities are read, others written: all positive and finite
        values = torch.rand(scale_shapes(known, sizes)[SCALE_NAMES[kind]], generator=draw.gen, device=draw.device)
        tensors[name] = _apart((0.002 + 0.03 * values).to(options["scale_dtype"]), 1, draw)
    return tensors


def _apart(values: torch.Tensor, unit: int, draw: Draw) -> torch.Tensor:
    """The same values; in half of the draws the outermost stride is larger than it needs to be."""
    stride = list(values.stride())
    if values.dim() > 1 and draw.chance(0.5):
        stride[0] += unit * draw.choice((1, 5))
    return torch.empty_strided(values.shape, stride, dtype=values.dtype, device=values.device).copy_(values)
