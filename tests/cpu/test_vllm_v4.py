"""DeepSeek-V4 and HY-V4 in vLLM: layers with padded heads over our operator, in a module like vLLM's, without vLLM."""

import contextlib
import importlib
import logging
import shutil
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8_mla
from cute_kernels.integrations import on_import, padded_heads
from cute_kernels.integrations.padded_heads import V4Decode, real_heads
from cute_kernels.integrations.vllm import v4
from tests.kit import flash_mla_of_v4
from tests.kit.v4_layers import REAL_HEADS, V4Call, v4_call

V4_MODULE = "vllm.models.deepseek_v4.nvidia.flashmla"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(v4, "say_once", lines.append)
    return lines


@pytest.fixture
def module(said: list[str]) -> Any:
    """A module like vLLM's, changed by the plugin."""
    loaded = flash_mla_of_v4.load()
    v4.change_deepseek_v4(loaded)
    return loaded


def forward(module: Any, call: V4Call, output: torch.Tensor, **changes: Any) -> Any:
    """The forward of a layer; `changes` replace indices or caches."""
    case = call.case
    given = {
        "window_cache": case.kv_cache, "extra_cache": case.extra_kv_cache, "indices": case.indices,
        "topk_length": case.topk_length, "extra_indices": case.extra_indices,
        "extra_topk_length": case.extra_topk_length, "q": call.q,
    } | changes  # fmt: skip
    layer = module.DeepseekV4FlashMLAAttention(
        call.heads, case.softmax_scale, case.s_aux, given.pop("window_cache"), given.pop("extra_cache")
    )
    return layer.forward_mqa(given.pop("q"), None, types.SimpleNamespace(**given), output)


# ---- layers


@pytest.mark.parametrize("extra", [True, False], ids=["compressed", "window"])
@pytest.mark.parametrize("heads", REAL_HEADS)
def test_a_layer_computes_the_real_heads(heads: int, extra: bool, module: Any, said: list[str]) -> None:
    call = v4_call(heads, extra)
    output = call.output()
    out, lse = forward(module, call, output)
    call.check(output)
    assert bool(output[:, heads:].isnan().all()), "heads that are not real were written"
    assert out.data_ptr() == output.data_ptr() and out.shape == (*output.shape[:1], 1, *output.shape[1:])
    assert lse.shape == (len(output), heads, 1) and module.CALLS == []
    assert said == [f"DeepSeek-V4 decoding of {heads} heads runs on mla_fp8_decode"]


def test_a_call_outside_of_a_layer_computes_all_heads(said: list[str]) -> None:
    call = v4_call(64)
    case = call.case
    decode = V4Decode(flash_mla_of_v4.flash_mla_with_kvcache, said.append)
    given = {
        "q": case.q, "k_cache": case.kv_cache, "block_table": None, "cache_seqlens": None, "head_dim_v": 512,
        "tile_scheduler_metadata": None, "is_fp8_kvcache": True, "indices": case.indices, "attn_sink": case.s_aux,
        "extra_k_cache": case.extra_kv_cache, "extra_indices_in_kvcache": case.extra_indices,
        "topk_length": case.topk_length, "extra_topk_length": case.extra_topk_length, "softmax_scale": 0.05,
    }  # fmt: skip
    out, _ = decode(**given)
    call.check(out[:, 0])
    with real_heads(3):
        few, lse = decode(**given)
    assert few.shape == out.shape and lse.shape == (len(out), 3, 1) and torch.equal(few[:, :, :3], out[:, :, :3])


def test_threads_have_heads_of_their_own(module: Any) -> None:
    """VLLM has micro-batches: a layer in another thread must not change the heads of this thread's layer."""
    call = v4_call(16)
    output = call.output()
    with real_heads(8):
        thread = threading.Thread(target=forward, args=(module, call, output))
        thread.start()
        thread.join()
        assert padded_heads._heads.get() == 8
    call.check(output)


def test_heads_end_with_the_layer(module: Any) -> None:
    with pytest.raises(AttributeError, match="indices"):
        layer = module.DeepseekV4FlashMLAAttention(8, 0.1, None, torch.zeros(1, 64, 584, dtype=torch.uint8), None)
        layer.forward_mqa(torch.zeros(1, 64, 512), None, None, None)
    assert padded_heads._heads.get() is None


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"window_cache": torch.zeros(8, 64, 528, dtype=torch.uint8)}, "528 bytes"),
        ({"extra_cache": torch.zeros(8, 64, 288, dtype=torch.uint8)}, "288 bytes"),
        ({"q": torch.zeros(5, 64, 576, dtype=torch.bfloat16)}, "(5, 1, 64, 576)"),
        ({"q": torch.zeros(5, 64, 512, dtype=torch.float16)}, "float16"),
        ({"indices": torch.zeros(5, 1, 64, dtype=torch.int64)}, "indices: got"),
        ({"extra_indices": None}, "extra_indices: got None"),
    ],
)
def test_what_no_kernel_takes_stays_with_flash_mla(
    changes: dict[str, Any], word: str, module: Any, said: list[str]
) -> None:
    call = v4_call(16)
    output = call.output()
    for _ in range(2):
        assert forward(module, call, output, **changes) == ("FlashMLA's out", "FlashMLA's lse")
    assert bool(output.isnan().all())
    assert len(module.CALLS) == 2 and module.CALLS[0]["q"].shape[2] == 64, "FlashMLA has the padded heads"
    assert module.CALLS[0]["out"].data_ptr() == output.data_ptr()
    assert len(said) == 1 and word in said[0]


def test_an_argument_that_is_new_stays_with_flash_mla(said: list[str]) -> None:
    asked: list[dict[str, Any]] = []
    decode = V4Decode(lambda **arguments: asked.append(arguments), said.append)
    case = v4_call(64).case
    decode(
        q=case.q, k_cache=case.kv_cache, block_table=None, cache_seqlens=None, head_dim_v=512,
        tile_scheduler_metadata=None, is_fp8_kvcache=True, indices=case.indices, new_in_this_version=1,
    )  # fmt: skip
    assert asked[0]["new_in_this_version"] == 1 and "new_in_this_version" in said[0]


def test_arguments_by_position_stay_with_flash_mla(said: list[str]) -> None:
    decode = V4Decode(lambda *arguments: arguments, said.append)
    assert decode(1, 2) == (1, 2) and "not by name" in said[0]


# ---- HY-V4


@pytest.mark.parametrize("sinks", [True, False])
def test_hy_v4_computes_its_heads_with_sinks(sinks: bool, said: list[str]) -> None:
    module = flash_mla_of_v4.load()
    for _ in range(2):
        v4.change_hy_v4(module)
    gen = torch.Generator().manual_seed(0)
    cache = fp8_mla.pack(torch.randn(4, 64, 576, generator=gen).bfloat16())
    q = torch.randn(1, 7, 20, 576, generator=gen).bfloat16()
    indices = torch.randint(-1, 256, (1, 7, 32), generator=gen).int()
    s_aux = torch.linspace(-1, 4, 20) if sinks else None
    out, lse = module.HYV4FlashMLASparseImpl(s_aux)._fp8_flash_mla_kernel(q, cache, indices, None)
    expected, expected_lse = fp8_mla.reference_decode(q, cache, indices=indices, softmax_scale=0.1, s_aux=s_aux)
    torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(lse.double(), expected_lse.transpose(1, 2), rtol=1e-5, atol=1e-5)
    assert said == ["sparse MLA of HY-V4 with 20 heads runs on mla_fp8_decode"]


def test_hy_v4_on_another_gpu_stays_with_flash_mla(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    module = flash_mla_of_v4.load()
    v4.change_hy_v4(module)
    monkeypatch.setattr(v4, "device_refusal", lambda device: "an old GPU")
    layer = module.HYV4FlashMLASparseImpl(None)
    assert layer._fp8_flash_mla_kernel(torch.zeros(1), None, None, None) == ("FlashMLA's out", "FlashMLA's lse")
    assert said == ["sparse MLA of HY-V4 stays with FlashMLA: an old GPU"]


@pytest.mark.parametrize(
    "arguments, changes, word",
    [
        ({"scale": None}, {}, "scale"),
        ({"topk_indices": torch.zeros(1, 7, 32, dtype=torch.int64)}, {}, "indices: got"),
        ({}, {"_sinks_for_query": lambda self, q: None}, "head_dim"),
    ],
)
def test_hy_v4_that_moved_stays_with_flash_mla(
    arguments: dict[str, Any], changes: dict[str, Any], word: str, said: list[str]
) -> None:
    module = flash_mla_of_v4.load()
    cls = module.HYV4FlashMLASparseImpl
    cls._fp8_flash_mla_kernel = lambda self, **given: given
    v4.change_hy_v4(module)
    layer = cls(None)
    for name, value in changes.items():
        setattr(cls, name, value)
    call: dict[str, Any] = {
        "q": torch.zeros(1, 7, 20, 576).bfloat16(), "kernel_metadata": None,
        "kv_c_and_k_pe_cache": torch.zeros(4, 64, 656, dtype=torch.uint8),
        "topk_indices": torch.zeros(1, 7, 32, dtype=torch.int32), **arguments,
    }  # fmt: skip
    assert layer._fp8_flash_mla_kernel(**call) == call
    assert len(said) == 1 and said[0].startswith("sparse MLA of HY-V4 stays with FlashMLA: ") and word in said[0]


def test_a_v4_layer_that_does_not_say_its_heads_computes_all(module: Any, said: list[str]) -> None:
    call = v4_call(16)
    heads = call.q.shape[1]
    module.DeepseekV4FlashMLAAttention.n_local_heads = property(lambda self: self.gone, lambda *_: None)
    output = call.output()
    forward(module, call, output)
    call.check(output)
    assert said == [f"DeepSeek-V4 decoding of {heads} heads runs on mla_fp8_decode"]


# ---- modules


@contextlib.contextmanager
def without_vllm() -> Iterator[None]:
    """Imports no module of vLLM inside the block, and restores the ways to import one."""
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "vllm"}
    finders, folders = list(sys.meta_path), list(sys.path)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
            del sys.modules[name]
        sys.modules.update(before)
        sys.meta_path[:], sys.path[:] = finders, folders


@pytest.fixture
def vllm_on_disk(tmp_path: Path) -> Iterator[None]:
    """A vLLM that consists of the modules to be changed."""
    with without_vllm():
        sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, on_import.ChangingFinder)]
        for name in v4.CHANGES:
            file = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(flash_mla_of_v4.__file__, file)
        for folder in {file.parent for file in tmp_path.rglob("*.py")}:
            while folder != tmp_path:
                (folder / "__init__.py").touch()
                folder = folder.parent
        sys.path.insert(0, str(tmp_path))
        yield


def test_modules_are_changed_when_they_are_imported(vllm_on_disk: None) -> None:
    for _ in range(2):
        on_import.change_on_import(v4.CHANGES)
    assert sum(isinstance(finder, on_import.ChangingFinder) for finder in sys.meta_path) == 1
    assert V4_MODULE not in sys.modules, "the plugin imports a model"
    for name, change in v4.CHANGES.items():
        module = importlib.import_module(name)
        assert type(module.__spec__.loader).__name__ == "SourceFileLoader"  # type: ignore[union-attr]
        is_v4 = change is v4.change_deepseek_v4
        assert isinstance(module.flash_mla_with_kvcache, V4Decode) is is_v4
        assert hasattr(module.DeepseekV4FlashMLAAttention.forward_mqa, "__wrapped__") is is_v4
        assert hasattr(module.HYV4FlashMLASparseImpl._fp8_flash_mla_kernel, "__wrapped__") is not is_v4


def test_modules_that_are_imported_are_changed_at_once(vllm_on_disk: None) -> None:
    module = importlib.import_module(V4_MODULE)
    assert not isinstance(module.flash_mla_with_kvcache, V4Decode)
    for _ in range(2):
        on_import.change_on_import(v4.CHANGES)
    assert isinstance(module.flash_mla_with_kvcache, V4Decode)
    assert not isinstance(module.flash_mla_with_kvcache.original, V4Decode)
    assert not hasattr(module.DeepseekV4FlashMLAAttention.forward_mqa.__wrapped__, "__wrapped__")


def test_two_that_change_a_module_both_do(vllm_on_disk: None) -> None:
    changed: list[str] = []
    on_import.change_on_import(v4.CHANGES)
    on_import.change_on_import({V4_MODULE: lambda module: changed.append(module.__name__)})
    module = importlib.import_module(V4_MODULE)
    assert changed == [V4_MODULE] and isinstance(module.flash_mla_with_kvcache, V4Decode)


@pytest.mark.parametrize("is_imported", [False, True])
def test_a_change_that_fails_leaves_the_module_to_its_stack(
    is_imported: bool, vllm_on_disk: None, caplog: pytest.LogCaptureFixture
) -> None:
    def change(module: Any) -> None:
        raise AttributeError("moved")

    if is_imported:
        importlib.import_module(V4_MODULE)
    on_import.change_on_import({V4_MODULE: change})
    assert importlib.import_module(V4_MODULE).flash_mla_with_kvcache is not None
    assert [record.getMessage() for record in caplog.records] == [
        f"cute-kernels: {V4_MODULE} stays as it is: AttributeError: moved"
    ]


def test_a_module_that_is_not_there_is_not_found(vllm_on_disk: None, tmp_path: Path) -> None:
    on_import.change_on_import(v4.CHANGES)
    tmp_path.joinpath(*V4_MODULE.split(".")).with_suffix(".py").unlink()
    with pytest.raises(ModuleNotFoundError, match="flashmla"):
        importlib.import_module(V4_MODULE)


@pytest.mark.parametrize(
    "change, name",
    [
        (v4.change_deepseek_v4, "flash_mla_with_kvcache"),
        (v4.change_deepseek_v4, "DeepseekV4FlashMLAAttention"),
        (v4.change_hy_v4, "HYV4FlashMLASparseImpl"),
    ],
)
def test_a_name_that_moved_leaves_a_module_as_it_is(change: Any, name: str, caplog: pytest.LogCaptureFixture) -> None:
    module = flash_mla_of_v4.load()
    delattr(module, name)
    left = dict(vars(module))
    with caplog.at_level(logging.WARNING):
        change(module)
    assert dict(vars(module)) == left and len(caplog.records) == 1
    assert name in caplog.records[0].getMessage() and "stays with FlashMLA" in caplog.records[0].getMessage()
    layer = getattr(module, "DeepseekV4FlashMLAAttention", None)
    assert layer is None or not hasattr(layer.forward_mqa, "__wrapped__")
