import re
from typing import Any

import pytest
import torch

from cute_kernels.mla import append_op
from cute_kernels.mla.append_op import mla_fp8_append
from cute_kernels.mla.append_spec import MlaAppendSpec, shipped_specs
from cute_kernels.mla.request import APPEND
from cute_kernels.runtime.launch import PreparedLaunches, by_name
from fp8_mla import pack
from fp8_mla.formats import FORMATS, V3_2, V4
from tests.kit.bad_input import TABLES
from tests.kit.prepared import DeclaredKernel, prepare
from tests.kit.sass import listings, reports

PAGES, PAGE_SIZE = 5, 7
POISON = 0xA5


def tokens(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, 576, generator=torch.Generator().manual_seed(seed)).bfloat16()


def poisoned_cache(*shape: int) -> torch.Tensor:
    return torch.full(shape, POISON, dtype=torch.uint8)


def expected_cache(kv: torch.Tensor, slots: list[int]) -> torch.Tensor:
    """The flat cache after an append, computed token by token."""
    flat = poisoned_cache(PAGES * PAGE_SIZE, 656)
    for row, slot in zip(kv, slots, strict=True):
        if 0 <= slot < PAGES * PAGE_SIZE:
            flat[slot] = pack(row)
    return flat.view(PAGES, PAGE_SIZE, 656)


LAST = PAGES * PAGE_SIZE - 1
SLOTS = [
    [],
    [0],
    [LAST],
    [3, 0, LAST, 7, 6],
    [-1, 5, -1, -(2**63), 4],
    [LAST + 1, 2, 2**31, 2**40, 2**63 - 1, 2**32 + 1],
    [-1, -1, LAST + 1],
    torch.randperm(PAGES * PAGE_SIZE, generator=torch.Generator().manual_seed(3)).tolist(),
]


@pytest.mark.parametrize("slots", SLOTS, ids=str)
def test_writes_the_slots_that_exist_and_no_others(slots):
    kv, cache = tokens(len(slots)), poisoned_cache(PAGES, PAGE_SIZE, 656)
    mla_fp8_append(kv, cache, torch.tensor(slots, dtype=torch.int64))
    assert torch.equal(cache, expected_cache(kv, slots))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("heads", [(), (1,)], ids=["3-d", "4-d"])
def test_cache_shapes_and_dtypes(heads, dtype):
    slots = [8, -1, 20, 2]
    kv, cache = tokens(4), poisoned_cache(PAGES, PAGE_SIZE, *heads, 656)
    mla_fp8_append(kv, cache.view(dtype), torch.tensor(slots))
    assert torch.equal(cache.view(PAGES, PAGE_SIZE, 656), expected_cache(kv, slots))


def test_strided_tensors():
    slots = [8, -1, 20, 2]
    wide_kv = torch.full((4, 640), float("nan"), dtype=torch.bfloat16)
    wide_kv[:, 64:] = tokens(4)
    two_layers = poisoned_cache(PAGES, 2, PAGE_SIZE, 672)  # two layers alternate, tokens are 16 bytes apart
    mapping = torch.stack([torch.tensor(slots), torch.full((4,), 33)], 1)[:, 0]
    mla_fp8_append(wide_kv[:, 64:], two_layers[:, 1, :, 16:], mapping)
    assert torch.equal(two_layers[:, 1, :, 16:], expected_cache(wide_kv[:, 64:], slots))
    assert (two_layers[:, 0] == POISON).all() and (two_layers[..., :16] == POISON).all()


def test_a_cache_without_pages_takes_nothing():
    mla_fp8_append(tokens(2), poisoned_cache(0, PAGE_SIZE, 656), torch.tensor([0, 1]))


KV, CACHE, SLOT = tokens(3), poisoned_cache(PAGES, PAGE_SIZE, 656), torch.tensor([1, 2, 3])
TABLE = TABLES["mla_fp8_append"]


def prepared(
    monkeypatch: pytest.MonkeyPatch, kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
) -> DeclaredKernel:
    """A launch that is prepared for every form of a cache, as earlier calls on a GPU would leave it."""
    kernel, fp8 = DeclaredKernel(MlaAppendSpec()), cache.view(torch.float8_e4m3fn)
    forms = (cache, cache[:, :, None], fp8, fp8[:, :, None])
    rows = {"data_stride": 656, "scale_offset": 512, "scale_stride": 656}
    launch = by_name(APPEND, kernel, "cute_kernels.mla.kernels.append:MlaAppendKernel", **rows)
    requests = [APPEND.request(kv=kv, kv_cache=form, slot_mapping=slots) for form in forms]
    prepare(monkeypatch, append_op, launch, *requests)
    kernel.calls.clear()
    return kernel


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [CACHE.shape, (PAGES, PAGE_SIZE, 1, 656)], ids=["3-d", "4-d"])
def test_a_prepared_launch_checks_nothing_in_python(shape, dtype, monkeypatch):
    kernel = prepared(monkeypatch, KV, CACHE, SLOT)
    monkeypatch.setattr(append_op, "check_tensor", None)
    mla_fp8_append(KV, CACHE.view(shape).view(dtype), SLOT)
    ((kv, pages, slots, *_),) = kernel.calls
    assert kv is KV and slots is SLOT
    assert (pages.shape, pages.dtype, pages.data_ptr()) == (CACHE.shape, torch.uint8, CACHE.data_ptr())


@pytest.mark.parametrize("label", TABLE.wrong("cpu"))
def test_bad_input_of_a_prepared_launch(label, monkeypatch):
    """A difference that the kernel cannot see must be in the key of the prepared launch."""
    kernel = prepared(monkeypatch, *TABLE.right("cpu").values())
    TABLE.refusal(label, "cpu")
    assert kernel.calls == []


def test_other_shapes_are_not_what_was_prepared(monkeypatch):
    kernel, cache = prepared(monkeypatch, KV, CACHE, SLOT), poisoned_cache(PAGES, PAGE_SIZE, 656)
    mla_fp8_append(KV[:2], cache, SLOT[:2])  # torch does this
    assert torch.equal(cache, expected_cache(KV[:2], [1, 2])) and kernel.calls == []


def test_the_first_launch_prepares_the_others(monkeypatch):
    kernel, cache = DeclaredKernel(MlaAppendSpec(), device="meta"), poisoned_cache(PAGES, PAGE_SIZE, 1, 656)
    monkeypatch.setattr(append_op, "_prepared", PreparedLaunches())
    monkeypatch.setattr(append_op, "require_sm90", lambda name, device: None)
    monkeypatch.setattr(append_op, "get_kernel", lambda spec: kernel)
    meta = [t.to("meta") for t in (KV, cache, SLOT)]  # stands for any device but the CPU
    for launches in (1, 2, 3):
        mla_fp8_append(*meta)
        assert len(kernel.calls) == launches and len(append_op._prepared) == 1
    mla_fp8_append(meta[0][:0], meta[1], meta[2][:0])
    mla_fp8_append(meta[0], meta[1][:0], meta[2])
    assert len(kernel.calls) == 3, "there was nothing to launch"


def test_a_long_call_keeps_more_bytes_in_flight():
    shipped = set()
    for name in FORMATS:
        short, long = MlaAppendSpec.for_launch(1, name), MlaAppendSpec.for_launch(65536, name)
        assert short.tokens_per_warp < long.tokens_per_warp
        shipped |= {short, long}
    assert shipped == set(shipped_specs())


def test_four_tokens_per_warp_compile():
    specs = [MlaAppendSpec(tokens_per_warp=4, warps=8, cache_format=name) for name in FORMATS]
    for spec, code in zip(specs, reports(specs), strict=True):
        assert code.problems(spec.expected) == [], spec
        rope_parts = spec.cache_format == "v3.2"  # for all tokens together
        assert code.count("LDG.E.128") == 8 + rope_parts, f"{spec}: two of each token's latent"


def test_all_loads_are_issued_before_anything_is_quantized():
    """A quantization between the loads would leave half of a warp's bytes in flight. ptxas may move the loads."""
    for spec, lines in zip(shipped_specs(), listings(shipped_specs()), strict=True):
        opcodes = [found[1] for line in lines if (found := re.search(r"\*/\s+(?:@!?U?P\d+ )?([A-Z]\S*)", line))]
        loads = [place for place, opcode in enumerate(opcodes) if opcode.startswith("LDG")]
        maxima = [place for place, opcode in enumerate(opcodes) if opcode.startswith(("FMNMX", "VHMNMX"))]
        expected = 1 + 2 * spec.tokens_per_warp + (spec.cache_format == "v3.2")
        assert len(loads) == expected, f"{spec}: slots, latents, rope parts"
        assert loads[-1] < maxima[0], spec


def test_the_launch_tells_the_kernel_where_rows_are(monkeypatch):
    asked: list[Any] = []
    calls: list[Any] = []

    def get_kernel(spec: Any) -> Any:
        asked.append(spec)
        return lambda *arguments: calls.append(arguments)

    monkeypatch.setattr(append_op, "get_kernel", get_kernel)
    kv, pages, slots = torch.zeros(5000, 576), CACHE, torch.zeros(5000)
    tensors = {"mKV": kv, "mCache": pages, "mSlots": slots}
    append_op.prepare_append(5000, V3_2, V3_2.page_layout(PAGE_SIZE))({}, **tensors)
    append_op.prepare_append(1, V4, V4.page_layout(64))({}, **tensors)
    assert asked == [MlaAppendSpec.for_launch(5000), MlaAppendSpec.for_launch(1, "v4")]
    (first, second) = calls
    assert first[0] is kv and first[1] is pages and first[2] is slots and first[3:] == (656, 512, 656)
    assert second[1] is pages and second[3:] == (576, 64 * 576, 8)
