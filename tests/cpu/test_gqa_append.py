"""`kv_int8_append` on the CPU: its rule, its errors, its launches, and the arithmetic that its kernel relies on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from cute_kernels.gqa import append_op
from cute_kernels.gqa.append_op import kv_int8_append
from cute_kernels.gqa.append_spec import MAX_HELD, SCALES, KvAppendSpec, shipped_specs
from cute_kernels.gqa.layouts import HEAD_DIMS, LAYOUTS, CacheSizes, Which, scale_shapes
from cute_kernels.gqa.reference import quantize
from cute_kernels.gqa.request import APPEND
from cute_kernels.runtime.compile import compile_kernel
from cute_kernels.runtime.launch import PreparedLaunches, by_name
from tests.kit.bad_input import TABLES
from tests.kit.gqa_cases import SCALE_NAMES as KINDS
from tests.kit.mla_cases import generator
from tests.kit.prepared import DeclaredKernel, prepare
from tests.kit.sass import report as report_of

PAGES, ROWS, H_KV, D = 3, 8, 2, 64
SIZES = CacheSizes(PAGES, ROWS, H_KV, D)
POISON = 0x5A


def make_caches(layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = (LAYOUTS[layout].shape(which, SIZES, 1) for which in get_args(Which))
    return torch.full(key, POISON, dtype=torch.int8), torch.full(value, POISON, dtype=torch.int8)


def make_scale(layout: str, kind: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    shape = scale_shapes(LAYOUTS[layout], SIZES)[KINDS[kind]]
    return torch.linspace(0.01, 0.02, torch.Size(shape).numel()).view(shape).to(dtype)


def make_tokens(n: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    gen = generator(seed)
    return torch.randn(n, H_KV, D, generator=gen).to(dtype), 3 * torch.randn(n, H_KV, D, generator=gen).to(dtype)


# ---- the rule, token by token


def code_place(layout: str, page: int, offset: int, head: int) -> tuple[Any, ...]:
    """The place of the d codes of one token and head by the documentation, without a `CacheLayout`."""
    if layout in ("BNSH", "paged_HND"):
        return page, head, offset
    if layout in ("BSNH", "paged_NHD"):
        return page, offset, head
    return page, head, slice(None), offset


def scale_place(layout: str, kind: str, page: int, offset: int, head: int) -> tuple[Any, ...]:
    """The place of the scale or scales of one token and head."""
    if kind == "per_token":
        return page, offset
    if layout in ("BSNH", "paged_NHD"):
        return page, offset, head
    if layout == "paged_vllm" and kind.startswith("per_group"):
        return page, head, slice(None), offset
    return page, head, offset


SLOTS = [5, -1, 0, PAGES * ROWS - 1, PAGES * ROWS, 11, -(2**63), 2**40, 2**32 + 1, 12]


@pytest.mark.parametrize("kinds", [(k, v) for k in KINDS for v in KINDS if k == v or "per_token" in (k, v)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_writes_the_slots_that_exist_and_no_others(layout: str, kinds: tuple[str, str]) -> None:
    tokens = make_tokens(len(SLOTS))
    caches = make_caches(layout)
    scales = make_scale(layout, kinds[0], torch.float16), make_scale(layout, kinds[1], torch.float16)
    expected = [[t.clone() for t in caches], [t.clone() for t in scales]]
    for n, slot in enumerate(SLOTS):
        if not 0 <= slot < PAGES * ROWS:
            continue
        page, offset = divmod(slot, ROWS)
        for i, kind in enumerate(kinds):
            given = scales[i] if kind in ("per_tensor", "per_head") else None
            codes, scale = quantize(tokens[i][n], KINDS[kind], torch.float16, given)
            for head in range(H_KV):
                place = expected[0][i][code_place(layout, page, offset, head)]
                place.copy_(codes[head].view(place.shape))
                if given is None:
                    own = scale if kind == "per_token" else scale[head]
                    expected[1][i][scale_place(layout, kind, page, offset, head)] = own
    kv_int8_append(*tokens, *caches, *scales, torch.tensor(SLOTS), layout=layout)
    for got, want in zip((*caches, *scales), (*expected[0], *expected[1]), strict=True):
        assert torch.equal(got, want)


def test_a_scale_without_axes_is_one_for_all() -> None:
    results = []
    for shape in ((), (1,)):
        caches, k_scale, v_scale = make_caches("BNSH"), torch.full(shape, 0.01), torch.full(shape, 0.03)
        kv_int8_append(*make_tokens(2), *caches, k_scale, v_scale, torch.tensor([1, 9]), layout="BNSH")
        results.append(caches)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not torch.equal(results[0][0], make_caches("BNSH")[0])


def test_nothing_to_do() -> None:
    k_cache, v_cache = make_caches("paged_NHD")
    scale = make_scale("paged_NHD", "per_token_head")
    none = torch.tensor([], dtype=torch.int64)
    kv_int8_append(*make_tokens(0), k_cache, v_cache, scale, scale.clone(), none, layout="paged_NHD")
    assert (k_cache == POISON).all()
    empty, no_scale, slots = k_cache[:0], scale[:0], torch.tensor([0, 1])
    kv_int8_append(*make_tokens(2), empty, empty, no_scale, no_scale, slots, layout="paged_NHD")


# ---- launches

TABLE = TABLES["kv_int8_append"]
C = TABLE.right("cpu")


def prepared(monkeypatch: pytest.MonkeyPatch, compares: bool = True) -> DeclaredKernel:
    """A prepared launch for `C`, as an earlier call on a GPU would leave it; whether it compares addresses."""
    scales = {"k_scale": "per_token_head", "v_scale": "per_token_head", "scale_dtype": "float32"}
    kernel = DeclaredKernel(KvAppendSpec.for_launch(dtype="bfloat16", d=D, h_kv=H_KV, x_packed=False, **scales))
    launch = by_name(APPEND, kernel, "cute_kernels.gqa.kernels.append:KvAppendKernel", heads_first=1)
    known = append_op.PreparedLaunch(launch, apart=set() if compares else None)
    prepare(monkeypatch, append_op, known, APPEND.request(**C, kind="int8"))
    kernel.calls.clear()
    return kernel


def test_a_prepared_launch_checks_nothing_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = prepared(monkeypatch)
    monkeypatch.setattr(append_op, "check_tensor", None)
    kv_int8_append(**C)
    (arguments,) = kernel.calls
    assert all(got is C[name] for got, name in zip(arguments, C, strict=False) if name != "layout")
    assert arguments[-1] == 1


@pytest.mark.parametrize("label", TABLE.wrong("cpu"))
def test_bad_input_of_a_prepared_launch(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences that the kernel cannot see must be in the key or in the addresses, which lead to the checks."""
    kernel = prepared(monkeypatch, compares="in the memory of" in label)
    TABLE.refusal(label, "cpu")
    assert kernel.calls == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_launch_prepares_the_others(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    specs: list[KvAppendSpec] = []
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(append_op, "_prepared", PreparedLaunches())
    monkeypatch.setattr(append_op, "require_sm90", lambda name, device: None)

    def get_kernel(spec: KvAppendSpec) -> Callable[..., None]:
        specs.append(spec)
        return lambda *arguments: calls.append(arguments)

    monkeypatch.setattr(append_op, "get_kernel", get_kernel)
    k, v = (t.to("meta") for t in make_tokens(3))
    k_cache, v_cache = (t.to("meta") for t in make_caches(layout))
    k_scale, v_scale = torch.ones((), device="meta"), make_scale(layout, "per_group_32").to("meta")
    slots = torch.arange(3, device="meta")
    for launches in (1, 2, 3):
        kv_int8_append(k, v, k_cache, v_cache, k_scale, v_scale, slots, layout=layout)
        assert len(calls) == launches and len(append_op._prepared) == 1
    (spec,) = specs
    assert (spec.k_scale, spec.v_scale, spec.x_packed) == ("given", "per_group_32", layout == "paged_vllm")
    for arguments in calls:
        assert arguments[4].shape == (1,)
        assert arguments[-1] == (layout in ("BNSH", "paged_HND"))
    kv_int8_append(k[:0], v[:0], k_cache, v_cache, k_scale, v_scale, slots[:0], layout=layout)
    assert len(calls) == 3, "there was nothing to launch"


def test_the_x_of_packed_pages_is_16() -> None:
    k_cache, v_cache = make_caches("paged_vllm")
    scale = torch.ones(())
    with pytest.raises(ValueError, match="k_cache: got x = 8.*needs 16"):
        kv_int8_append(*make_tokens(1), k_cache.view(PAGES, H_KV, D // 8, ROWS, 8), v_cache, scale, scale,
                       torch.tensor([0]), layout="paged_vllm")  # fmt: skip


# ---- what the kernel relies on: its division


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Fused a * b + c in float32, rounded once: the product is exact in float64, the sum rounded to odd there."""
    product, c = a.double() * b.double(), c.double()
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = total.view(torch.int64)
    step = torch.where(error.sign() == total.sign(), 1, -1)
    return torch.where((error != 0) & (bits % 2 == 0), bits + step, bits).view(torch.float64).float()


def divide(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Divides as `KvAppendKernel._divide` does."""
    inverse = 1 / scale
    quotient = x * inverse
    return fma(fma(-scale, quotient, x), inverse, quotient)


@pytest.mark.parametrize("significant_bits", [8, 11], ids=["bfloat16", "float16"])
def test_quotients_near_a_tie_round_as_ieee_ones(significant_bits: int) -> None:
    """Tries each significand of x, each tie below 127, and the scales within 6 units of the one that gives a tie."""
    first = 1 << (significant_bits - 1)
    x = torch.arange(first, 2 * first).float()[:, None, None] / first
    ties = torch.arange(127).float()[:, None] + 0.5
    scales = ((x / ties).view(torch.int32) + torch.arange(-6, 7, dtype=torch.int32)).view(torch.float32)
    x = x.expand_as(scales)
    ratio, ours = x / scales, divide(x, scales)
    assert (ratio.round() != (x / scales.nextafter(torch.tensor(torch.inf))).round()).any(), "these are near ties"
    assert torch.equal(ours.round(), ratio.round())


def test_quotients_are_within_a_unit() -> None:
    """Values further than 6 units from a tie therefore round correctly."""
    gen = generator(3)
    x = torch.randn(1 << 20, generator=gen).half().float()
    scales = torch.rand(1 << 20, generator=gen) + 2.0**-10
    exact = x.double() / scales.double()
    one = 2.0 ** (exact.abs().log2().floor() - 23)
    assert ((divide(x, scales).double() - exact).abs() <= one)[exact != 0].all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_absmax_gives_the_ieee_scale(dtype: torch.dtype) -> None:
    absmax = torch.arange(0x7F80 if dtype is torch.bfloat16 else 0x7C00, dtype=torch.int16).view(dtype).float()
    least = 2.0**-126
    ours = divide(absmax, torch.full_like(absmax, 127.0))
    assert torch.equal(ours.clamp(min=least), (absmax / torch.full_like(absmax, 127.0)).clamp(min=least))


def test_the_bound_of_a_given_scale_leaves_no_code_beyond_127() -> None:
    scales = torch.rand(1 << 20, generator=generator(4)) + 0.5
    bound = 127 * scales
    assert (divide(bound, scales).round() == 127).all() and ((bound / scales).round() == 127).all()


# ---- specifications


@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("h_kv", [1, 2, 3, 7, 8, 12, 32, 128])
def test_a_team_holds_its_unit(h_kv: int, d: int) -> None:
    for k_scale in SCALES:
        for v_scale in SCALES:
            shape = {"dtype": "float16", "scale_dtype": "float16", "d": d, "h_kv": h_kv}
            made = KvAppendSpec.for_launch(k_scale=k_scale, v_scale=v_scale, **shape)
            assert made.can_implement() == []
            pieces = d // 16 * (h_kv if made.by_token else 1)
            assert made.held == 0 or made.team * made.held >= pieces
            assert made.held > 0 or pieces > 32 * MAX_HELD


@pytest.mark.parametrize("h_kv, k_scale, vllm", [(1, "per_token", True), (12, "per_token", False), (16, "given", True)])
def test_other_variants_compile(h_kv: int, k_scale: str, vllm: bool) -> None:
    made = KvAppendSpec.for_launch(
        dtype="bfloat16", d=128, h_kv=h_kv, k_scale=k_scale, v_scale="per_token", scale_dtype="float32", x_packed=vllm
    )
    assert report_of(made).problems(made.expected) == []


def test_no_approximate_division_and_no_flushing(tmp_path: Path) -> None:
    compile_kernel(shipped_specs()[0], tmp_path)
    (ptx,) = tmp_path.glob("*.ptx")
    text = ptx.read_text()
    assert "rcp.rn.f32" in text and "fma.rn.f32" in text and "cvt.rni.s32.f32" in text
    assert not any(word in text for word in (".ftz", ".approx", "div.full"))
