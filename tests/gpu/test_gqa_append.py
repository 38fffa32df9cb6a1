"""`kv_int8_append` on the GPU: codes and scales equal the CPU reference bit for bit; no other byte changes."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from cute_kernels.gqa.append_op import kv_int8_append
from cute_kernels.gqa.append_spec import KvAppendSpec
from cute_kernels.gqa.layouts import LAYOUTS, CacheSizes, scale_shapes
from cute_kernels.gqa.reference import reference_append
from tests.kit.gqa_cases import SCALE_NAMES as KINDS
from tests.kit.graphs import capture
from tests.kit.mla_cases import covering_cases, generator

GIVEN = ("per_tensor", "per_head")
WRITTEN = tuple(kind for kind in KINDS if kind not in GIVEN)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCALE_DTYPES = {"f32": torch.float32, "f16": torch.float16}


@dataclass(frozen=True)
class Target:
    """Caches and scales on the GPU. Those that the append writes hold random bytes before."""

    layout: str
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor

    @classmethod
    def make(
        cls, layout: str, sizes: CacheSizes, kinds: tuple[str, str], scale_dtype: torch.dtype, seed: int = 0
    ) -> "Target":
        gen, known = generator(seed), LAYOUTS[layout]
        size = dict.fromkeys("bp", sizes.outer) | dict.fromkeys("st", sizes.rows) | {"h": sizes.h_kv, "d": sizes.d}
        size |= {"c": sizes.d // 16, "x": 16}
        caches = [
            torch.randint(-128, 128, [size[axis] for axis in axes], dtype=torch.int8, generator=gen).cuda()
            for axes in (known.key, known.value)
        ]
        scales = [
            (0.002 + 0.03 * torch.rand(scale_shapes(known, sizes)[KINDS[kind]], generator=gen)).to(scale_dtype).cuda()
            for kind in kinds
        ]
        return cls(layout, *caches, *scales)

    def tensors(self) -> list[torch.Tensor]:
        return [self.k_cache, self.v_cache, self.k_scale, self.v_scale]

    def expect(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> list[torch.Tensor]:
        """The tensors after the append, computed on the CPU."""
        expected = [t.cpu().clone() for t in self.tensors()]
        reference_append(k.cpu(), v.cpu(), *expected, slots.cpu(), layout=self.layout)
        return expected

    def append(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        kv_int8_append(k, v, *self.tensors(), slots, layout=self.layout)

    def check(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        expected = self.expect(k, v, slots)
        self.append(k.cuda(), v.cuda(), slots.cuda())
        self.require(expected)

    def require(self, expected: list[torch.Tensor]) -> None:
        for name, got, want in zip(("k_cache", "v_cache", "k_scale", "v_scale"), self.tensors(), expected, strict=True):
            got = got.cpu()
            wrong = (got != want) & ~((got != got) & (want != want))
            assert not wrong.any(), (
                f"{name}: {int(wrong.sum())} of {wrong.numel()} differ, first at {wrong.nonzero()[0]}"
            )


def random_tokens(n: int, h_kv: int, d: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """N(0,1) values with some much larger channels and tokens, and some heads of zeros."""
    gen = generator(seed)
    k, v = torch.randn((2, n, h_kv, d), generator=gen).unbind()
    k[..., :: d // 4] *= 20
    v[::5] *= 300
    k[1::7, 0] = 0
    v[2::7] = 0
    return k.to(dtype), v.to(dtype)


def slots_for(tokens: int, num_slots: int, seed: int, in_order: bool = False) -> torch.Tensor:
    """Distinct slots; every seventh one is negative or past the cache, so that the token is skipped."""
    slots = torch.arange(num_slots) if in_order else torch.randperm(num_slots, generator=generator(seed))
    slots = slots[:tokens].clone()
    skip = torch.tensor([-1, -(2**63), num_slots, 2**40, -(2**32), 2**63 - 1])
    slots[::7] = skip[torch.arange(len(slots[::7])) % len(skip)]
    return slots


def sizes_for(layout: str, rows: int, tokens: int, h_kv: int, d: int) -> CacheSizes:
    if LAYOUTS[layout].x_packed:
        rows = {1: 8, 16: 16, 61: 32, 64: 16}[rows]
    elif LAYOUTS[layout].paged and rows & (rows - 1):
        rows = 128
    return CacheSizes(-(-(tokens + 40) // rows), rows, h_kv, d)


FACTORS = {
    "layout": list(LAYOUTS),
    "k_kind": list(KINDS),
    "v_kind": list(KINDS),
    "dtype": list(DTYPES),
    "scale_dtype": list(SCALE_DTYPES),
    "d": [64, 128, 256, 512],
    "h_kv": [1, 2, 3, 8],
    "rows": [1, 16, 61, 64],
    "tokens": [1, 7, 33, 130, 515],
    "in_order": [False, True],
}


CASES = covering_cases(FACTORS, seed=1)
HEADS_AND_DIMS = [
    (1, 64), (1, 256), (3, 64), (5, 128), (8, 128), (12, 128), (16, 128), (16, 256), (17, 128), (40, 256),
    (4, 512), (5, 512),
]  # fmt: skip
OVER_HEADS = (("per_token", "per_token"), ("per_token_head", "per_token"), ("per_token", "per_head"))


def kernel_specs() -> list[KvAppendSpec]:
    """Most kernels of this file, so that several compile at a time; others compile when they are called."""

    def spec(kinds: tuple[str, str], **others: Any) -> KvAppendSpec:
        k_scale, v_scale = ("given" if kind in GIVEN else kind for kind in kinds)
        return KvAppendSpec.for_launch(k_scale=k_scale, v_scale=v_scale, **others)

    def types(dtype: str, scale_dtype: str) -> dict[str, str]:
        return {
            "dtype": str(DTYPES[dtype]).removeprefix("torch."),
            "scale_dtype": str(SCALE_DTYPES[scale_dtype]).removeprefix("torch."),
        }

    specs = [
        spec(
            (case["k_kind"], case["v_kind"]),
            **types(case["dtype"], case["scale_dtype"]),
            d=case["d"],
            h_kv=case["h_kv"],
            x_packed=LAYOUTS[case["layout"]].x_packed,
        )
        for case in CASES
    ]
    for vllm in (False, True):
        for h_kv, d in HEADS_AND_DIMS:
            specs += [spec(kinds, **types("fp16", "f32"), d=d, h_kv=h_kv, x_packed=vllm) for kinds in OVER_HEADS]
    for dtype in DTYPES:
        for scale_dtype in SCALE_DTYPES:
            specs += [spec((kind, kind), **types(dtype, scale_dtype), d=128, h_kv=8) for kind in WRITTEN]
            specs += [spec((kind, kind), **types(dtype, scale_dtype), d=64, h_kv=3) for kind in KINDS]
    return specs


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_equals_the_reference(case: dict[str, Any]) -> None:
    sizes = sizes_for(case["layout"], case["rows"], case["tokens"], case["h_kv"], case["d"])
    kinds = (case["k_kind"], case["v_kind"])
    target = Target.make(case["layout"], sizes, kinds, SCALE_DTYPES[case["scale_dtype"]], seed=case["tokens"])
    k, v = random_tokens(case["tokens"], case["h_kv"], case["d"], DTYPES[case["dtype"]], seed=case["tokens"])
    target.check(k, v, slots_for(case["tokens"], sizes.outer * sizes.rows, case["tokens"], case["in_order"]))


@pytest.mark.parametrize("tokens", [0, 1, 2, 31, 32, 33, 1000, 20_000])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_token_counts(layout: str, tokens: int) -> None:
    sizes = sizes_for(layout, 64, tokens, 8, 128)
    target = Target.make(layout, sizes, ("per_token_head", "per_token_head"), torch.float32)
    target.check(*random_tokens(tokens, 8, 128, torch.bfloat16, 1), slots_for(tokens, sizes.outer * sizes.rows, 2))


@pytest.mark.parametrize("layout", ["BSNH", "paged_vllm"])
@pytest.mark.parametrize("h_kv, d", HEADS_AND_DIMS)
def test_a_scale_per_token_over_any_number_of_heads(h_kv: int, d: int, layout: str) -> None:
    """The kernel keeps up to 2048 values in registers and reads more twice. K and V differ in granularity."""
    sizes = sizes_for(layout, 16, 45, h_kv, d)
    for kinds in OVER_HEADS:
        target = Target.make(layout, sizes, kinds, torch.float32)
        target.check(*random_tokens(45, h_kv, d, torch.float16, 3), slots_for(45, sizes.outer * sizes.rows, 4))


# ---- values


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """The 65,536 bit patterns as 512 rows of 128, in order, so that a row has about one exponent, and shuffled."""
    every = torch.arange(65536, dtype=torch.int32).short().view(dtype)
    shuffled = every[torch.randperm(65536, generator=generator(5))]
    return torch.cat((every, shuffled)).view(128, 8, 128)


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", WRITTEN)
def test_every_bit_pattern(kind: str, dtype: str, scale_dtype: str) -> None:
    k = patterns(DTYPES[dtype])
    v = k.flip(-1) if kind != "per_token" else k.reshape(8, 128, 128).transpose(0, 1).contiguous()
    target = Target.make("BNSH", CacheSizes(2, 64, 8, 128), (kind, kind), SCALE_DTYPES[scale_dtype])
    target.check(k, v, torch.arange(128))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_pattern_with_given_scales(dtype: str) -> None:
    """Given scales include subnormal ones, and scales with which all values or none exceed 127 codes."""
    k = patterns(DTYPES[dtype])
    target = Target.make("BSNH", CacheSizes(2, 64, 8, 128), ("per_head", "per_head"), torch.float32)
    target.k_scale.copy_(torch.tensor([2.0**-149, 3e-39, 2.0**-126, 1e-20, 2.0**-64, 0.01, 1.0, 7.3]))
    target.v_scale.copy_(torch.tensor([5.0, 65504.0, 2.0**64, 1.1 * 2.0**64, 1e30, 2.6e36, 2.0**127, 3.4e38]))
    target.check(k, k, torch.arange(128))
    half = Target.make("BSNH", CacheSizes(2, 64, 8, 128), ("per_head", "per_head"), torch.float16)
    half.k_scale.copy_(torch.tensor([2.0**-24, 2.0**-20, 2.0**-14, 0.001, 0.01, 0.5, 1.0, 1.5]))
    half.v_scale.copy_(torch.tensor([3.0, 10.0, 127.0, 300.0, 515.5, 1000.0, 65472.0, 65504.0]))
    half.check(k, k, torch.arange(128))


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_and_absmax_of_every_size(dtype: str, scale_dtype: str) -> None:
    """Values absmax * j / 254 are halfway between two codes, up to the rounding of x and of the scale."""
    kind, row = DTYPES[dtype], torch.arange(-127, 129).clamp(max=127) / 254
    row = torch.cat((row, torch.tensor([1.0, -0.5])))[-256:]
    exponents = torch.arange(-133, 128) if kind is torch.bfloat16 else torch.arange(-24, 16)
    mantissas = torch.tensor([1.0, 1.0 + 2**-7, 1.5, 127 / 64, 127 / 128 * 1.25])
    absmax = (2.0 ** exponents.double()[:, None] * mantissas).flatten()
    k = (absmax[:, None, None] * row.double()).float().to(kind).expand(-1, 2, -1).contiguous()
    k[:, 1] = k[:, 0].roll(1, 0)
    n = len(k)
    target = Target.make(
        "paged_NHD", CacheSizes(-(-n // 16), 16, 2, 256), ("per_token_head", "per_group_64"), SCALE_DTYPES[scale_dtype]
    )
    target.check(k, -k, torch.arange(n))


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_inf(kind: str, dtype: str, scale_dtype: str) -> None:
    gen = generator(6)
    k = torch.randn((60, 3, 64), generator=gen).to(DTYPES[dtype])
    for n, value in enumerate((math.nan, math.inf, -math.inf)):
        k[n::12, 0, 5] = value
        k[n + 3 :: 12, 1] = value
        k[n + 6 :: 12] = value
        k[n + 9 :: 12, :, ::2] = value
    target = Target.make("paged_HND", CacheSizes(8, 8, 3, 64), (kind, kind), SCALE_DTYPES[scale_dtype])
    target.check(k, k.flip(0), torch.arange(60))


# ---- memory


@pytest.mark.parametrize("kinds", [("per_token_head", "per_group_32"), ("per_token", "per_tensor")], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_tensors(layout: str, kinds: tuple[str, str]) -> None:
    """K and V are parts of a fused projection, caches of larger ones; scales and slots fill every second place."""
    tokens, h_kv, d = 77, 4, 128
    sizes = sizes_for(layout, 16, tokens, h_kv, d)
    dense = Target.make(layout, sizes, kinds, torch.float32)
    spread, whole = [], []
    for i, t in enumerate(dense.tensors()):
        rows_stay = i == 0 or (i == 1 and not LAYOUTS[layout].x_packed)  # the innermost axis is contiguous
        shape = [t.shape[0] + 1, 2 * t.shape[1], *t.shape[2:]] if rows_stay else [2 * size for size in t.shape]
        big = torch.full(shape, 77, dtype=t.dtype, device="cuda")
        view = big[1:, 1::2] if rows_stay else big[tuple(slice(None, None, 2) for _ in shape)]
        view.copy_(t)
        spread.append(view)
        whole.append(big)
    target = Target(layout, *spread)
    qkv = torch.full((tokens, 20, d), math.nan, dtype=torch.bfloat16, device="cuda")
    k, v = qkv[:, 12:16], qkv[:, 16:]
    for view, values in zip((k, v), random_tokens(tokens, h_kv, d, torch.bfloat16, 7), strict=True):
        view.copy_(values)
    slots = torch.full((2 * tokens,), 3, device="cuda")[::2]
    slots.copy_(slots_for(tokens, sizes.outer * sizes.rows, 8))
    expected = target.expect(k, v, slots)
    untouched = [big.clone() for big in whole]
    target.append(k, v, slots)
    target.require(expected)
    for view, big, before in zip(spread, whole, untouched, strict=True):
        view.fill_(1)
        covered = torch.zeros_like(big)
        covered.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(1)
        assert torch.equal(big[covered == 0], before[covered == 0])


def test_all_tokens_skipped() -> None:
    target = Target.make("paged_HND", CacheSizes(4, 16, 2, 64), ("per_token", "per_token_head"), torch.float32)
    before = [t.cpu().clone() for t in target.tensors()]
    k, v = random_tokens(50, 2, 64, torch.bfloat16, 9)
    target.append(k.cuda(), v.cuda(), torch.full((50,), -1, device="cuda"))
    target.require(before)


@pytest.mark.parametrize("layout", ["BNSH", "paged_NHD", "paged_vllm"])
def test_beyond_2_gib(layout: str) -> None:
    h_kv, d, tokens = 8, 128, 50
    rows = {"BNSH": 2_500_000, "paged_NHD": 64, "paged_vllm": 16}[layout]
    sizes = CacheSizes(2_500_000 // rows, rows, h_kv, d)
    small = CacheSizes(1, rows if rows < 100 else 64, h_kv, d)
    ends = Target.make(layout, small, ("per_token_head", "per_token_head"), torch.float32)
    shapes = [list(t.shape) for t in ends.tensors()]
    for shape in shapes:
        if layout == "BNSH":
            shape[2] = rows
        else:
            shape[0] = sizes.outer
    target = Target(
        layout, *(torch.zeros(s, dtype=t.dtype, device="cuda") for s, t in zip(shapes, ends.tensors(), strict=True))
    )
    k, v = random_tokens(tokens, h_kv, d, torch.bfloat16, 10)
    slots = sizes.outer * sizes.rows - 1 - torch.arange(tokens)
    target.append(k.cuda(), v.cuda(), slots.cuda())
    # its own cache: the last tokens of the large one
    last = [t[:, :, -64:] if layout == "BNSH" else t[-4:] for t in target.tensors()]
    if layout == "BNSH":
        first_slot = rows - 64
    else:
        first_slot = (sizes.outer - 4) * rows
    expected = [torch.zeros_like(t, device="cpu") for t in last]
    reference_append(k, v, *expected, slots - first_slot, layout=layout)
    Target(layout, *last).require(expected)
    for t, end in zip(target.tensors(), last, strict=True):
        end.zero_()
        assert not t.any(), "written elsewhere"


def test_tokens_beyond_2_gib() -> None:
    step = 2**30 + 8  # elements between tokens: the third token lies past 2^31
    buffer = torch.empty(2 * step + 4096, dtype=torch.bfloat16, device="cuda")
    k = buffer.as_strided((3, 2, 128), (step, 128, 1))
    v = buffer.as_strided((3, 2, 128), (step, 128, 1), 1024)
    for view, values in zip((k, v), random_tokens(3, 2, 128, torch.bfloat16, 11), strict=True):
        view.copy_(values)
    target = Target.make("BSNH", CacheSizes(1, 8, 2, 128), ("per_token_head", "per_token"), torch.float16)
    slots = torch.tensor([4, 0, 7])
    expected = target.expect(k, v, slots)
    target.append(k, v, slots.cuda())
    target.require(expected)


def test_captures_into_a_graph() -> None:
    target = Target.make("paged_NHD", CacheSizes(8, 16, 8, 128), ("per_token_head", "per_tensor"), torch.float32)
    k, v = (torch.zeros((64, 8, 128), dtype=torch.bfloat16, device="cuda") for _ in range(2))
    slots = torch.full((64,), -1, dtype=torch.int64, device="cuda")
    graph, _ = capture(lambda: target.append(k, v, slots))
    for seed in (1, 2):
        new, where = random_tokens(64, 8, 128, torch.bfloat16, seed), slots_for(64, 128, seed)
        expected = target.expect(*new, where)
        k.copy_(new[0])
        v.copy_(new[1])
        slots.copy_(where)
        graph.replay()
        target.require(expected)


def test_the_same_shapes_with_other_dtypes() -> None:
    for _ in range(2):
        for dtype in DTYPES.values():
            for scale_dtype in SCALE_DTYPES.values():
                kinds = ("per_token_head", "per_token_head")
                target = Target.make("BNSH", CacheSizes(2, 8, 2, 64), kinds, scale_dtype)
                target.check(*random_tokens(9, 2, 64, dtype, 14), slots_for(9, 16, 15))
