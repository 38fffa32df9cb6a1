"""The plugin in known and unknown versions of vLLM, on stand-ins for vLLM's modules, without vLLM."""

import importlib
import logging
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cute_kernels.integrations import on_import
from cute_kernels.integrations import vllm as cute_vllm
from cute_kernels.integrations.vllm import backends, indexer, v4
from cute_kernels.integrations.vllm.calls import INT8
from cute_kernels.integrations.vllm.prompts import Prompts
from tests.kit import vllm_stand_ins as stand_ins
from tests.kit.flash_stand_in import FlashStandIn
from tests.kit.vllm_batches import HEADS, KV_HEADS, draw_batch, empty_cache

REGISTRY = "vllm.v1.attention.backends.registry"
TRITON = "vllm.v1.attention.backends.triton_attn"
SPARSE = "vllm.v1.attention.backends.mla.flashmla_sparse"


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with stand_ins.installed(monkeypatch) as places:
        yield places


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Records the arguments of `change_on_import`, which does nothing."""
    asked: list[Any] = []
    monkeypatch.setattr(on_import, "change_on_import", asked.append)
    return asked


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# ---- registering


def gone(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.setitem(sys.modules, name, None)


def without(owner: str, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.delattr(f"{owner}.{name}")


def raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def register_backend(place: Any) -> None: ...

    monkeypatch.setattr(sys.modules[REGISTRY], "register_backend", register_backend)


@pytest.mark.parametrize(
    "change, word",
    [
        (gone("vllm"), "vllm"),
        (gone(REGISTRY), "registry"),
        (without(REGISTRY, "register_backend"), "register_backend"),
        (without(f"{REGISTRY}.AttentionBackendEnum", "CUSTOM"), "CUSTOM"),
        (without("tests.kit.vllm_stand_ins.Place", "is_overridden"), "is_overridden"),
        (raises, "register_backend"),
    ],
    ids=["no vllm", "no registry", "no function", "no member", "no method", "other arguments"],
)
def test_a_vllm_with_another_registry_starts(
    change: Callable[[pytest.MonkeyPatch], None], word: str, places: Any, changed: list[Any],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    change(monkeypatch)
    cute_vllm.register()
    (line,) = lines(caplog)
    assert word in line and line.endswith("tested with vLLM 0.26 and 0.33")


@pytest.mark.parametrize("version", ["0.26.0", "0.26.1rc1", "0.33.2.dev3+gabc"])
def test_tested_versions_need_no_flag(
    version: str, places: Any, changed: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A second registration must change nothing."""
    monkeypatch.setattr(sys.modules["vllm"], "__version__", version)
    for _ in range(2):
        cute_vllm.register()
    assert places.CUSTOM.path == cute_vllm.GQA_BACKEND
    assert places.FLASHMLA_SPARSE.path == cute_vllm.SPARSE_MLA_BACKEND
    assert changed == [v4.CHANGES] * 2 and lines(caplog) == []


def test_the_backend_of_another_plugin_stays(places: Any, changed: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    places.CUSTOM.path = "another.Backend"
    cute_vllm.register()
    assert places.CUSTOM.path == "another.Backend"
    assert places.FLASHMLA_SPARSE.path == cute_vllm.SPARSE_MLA_BACKEND
    assert lines(caplog) == ["cute-kernels: attention backend CUSTOM is another.Backend already, not ours"]


@pytest.mark.parametrize("version", ["0.27.0", "0.3.3", "1.26.0", "dev", None])
def test_other_versions_keep_what_needs_no_flag(
    version: str | None, places: Any, changed: list[Any], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys.modules["vllm"], "__version__", version)
    cute_vllm.register()
    assert places.CUSTOM.path == cute_vllm.GQA_BACKEND, "a flag asks for it"
    assert not places.FLASHMLA_SPARSE.path and changed == []
    (line,) = lines(caplog)
    assert f"vLLM is {version}; tested with vLLM 0.26 and 0.33" in line and "register(untested=True)" in line
    cute_vllm.register(untested=True)
    assert places.FLASHMLA_SPARSE.path == cute_vllm.SPARSE_MLA_BACKEND and changed == [v4.CHANGES, indexer.CHANGES]
    assert lines(caplog) == [line]


# ---- classes by name


def resolved(path: str) -> Any:
    """Resolves names as vLLM does."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_a_known_vllm_gets_our_classes(places: Any, caplog: pytest.LogCaptureFixture) -> None:
    for path, module in zip((cute_vllm.GQA_BACKEND, cute_vllm.SPARSE_MLA_BACKEND), stand_ins.OURS, strict=True):
        for _ in range(2):
            found = resolved(path)
            assert found is getattr(sys.modules[module], path.rpartition(".")[2]) and found.__module__ == module
    assert lines(caplog) == []
    with pytest.raises(AttributeError, match="no attribute 'Another'"):
        _ = backends.Another


def longer(
    self: Any, q: Any, kv_c_and_k_pe_cache: Any, topk_indices: Any, kernel_metadata: Any, scale: Any
) -> None: ...


def shorter(self: Any, q: Any, topk_indices: Any, kernel_metadata: Any) -> None: ...


def renamed(self: Any, q: Any, cache: Any, topk_indices: Any, kernel_metadata: Any) -> None: ...


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("FlashMLASparseImpl", None, "FlashMLASparseImpl"),
        ("FlashMLASparseMetadataBuilder", None, "FlashMLASparseMetadataBuilder"),
        ("FlashMLASparseImpl._fp8_flash_mla_kernel", None, "FlashMLASparseImpl has no _fp8_flash_mla_kernel"),
        ("FlashMLASparseImpl._fp8_flash_mla_kernel", longer, "takes self, q, kv_c_and_k_pe_cache, topk_indices,"),
        ("FlashMLASparseImpl._fp8_flash_mla_kernel", shorter, "takes self, q, topk_indices, kernel_metadata, and"),
        ("FlashMLASparseImpl._fp8_flash_mla_kernel", renamed, "takes self, q, cache, topk_indices,"),
    ],
)
def test_sparse_mla_is_vllms_where_what_it_extends_has_moved(
    name: str, value: Any, words: str, places: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if value is None:
        monkeypatch.delattr(f"{SPARSE}.{name}")
    else:
        monkeypatch.setattr(f"{SPARSE}.{name}", value)
    for _ in range(2):
        assert resolved(cute_vllm.SPARSE_MLA_BACKEND) is stand_ins.FlashMLASparseBackend
    (line,) = lines(caplog)
    assert words in line and "sparse MLA runs on vLLM's kernels" in line and "tested with vLLM 0.26 and 0.33" in line


@pytest.mark.parametrize(
    "arguments, word",
    [({"scale": None}, "scale"), ({"topk_indices": torch.zeros(1, 2, 32).long()}, "indices: got"), ({}, None)],
)
def test_a_call_of_sparse_mla_that_moved_stays_with_flash_mla(
    arguments: dict[str, Any], word: str | None, places: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved(cute_vllm.SPARSE_MLA_BACKEND)
    module: Any = sys.modules[stand_ins.OURS[1]]
    said: list[str] = []
    monkeypatch.setattr(module, "_stays", said.append)
    monkeypatch.setattr(stand_ins.FlashMLASparseImpl, "_fp8_flash_mla_kernel", lambda self, **given: given)
    call: dict[str, Any] = {
        "q": torch.zeros(1, 2, 16, 576).bfloat16(), "kernel_metadata": None,
        "kv_c_and_k_pe_cache": torch.zeros(4, 64, 656, dtype=torch.uint8),
        "topk_indices": torch.zeros(1, 2, 32, dtype=torch.int32), **arguments,
    }  # fmt: skip
    found = object.__new__(module.CuteFlashMLASparseImpl)._fp8_flash_mla_kernel(**call)
    if word is None:
        assert found[0].shape == (1, 2, 16, 512) and said == []
    else:
        assert found == call and len(said) == 1 and word in said[0]


def forward_with_more(
    self: Any, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any,
    output_scale: Any = None, output_block_scale: Any = None, mask: Any = None,
) -> None: ...  # fmt: skip


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("TritonAttentionMetadataBuilder", None, "TritonAttentionMetadataBuilder"),
        ("TritonAttentionImpl.do_kv_cache_update", None, "has no do_kv_cache_update"),
        ("TritonAttentionImpl._pth_key_value_caches", None, "has no _pth_key_value_caches"),
        ("TritonAttentionImpl.forward", forward_with_more, "output_block_scale, mask, and took"),
        ("TritonAttentionMetadataBuilder.build", shorter, "takes self, q, topk_indices"),
    ],
)
def test_the_backend_for_gqa_is_refused_where_what_it_extends_has_moved(
    name: str, value: Any, words: str, places: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The backend is refused before weights are loaded. Later, a keyword that a layer passes on is a TypeError."""
    if value is None:
        monkeypatch.delattr(f"{TRITON}.{name}")
    else:
        monkeypatch.setattr(f"{TRITON}.{name}", value)
    with pytest.raises(ImportError, match="tested with vLLM 0.26 and 0.33; use another attention backend") as error:
        resolved(cute_vllm.GQA_BACKEND)
    (line,) = lines(caplog)
    assert words in line and words in str(error.value)


def test_further_arguments_may_have_defaults() -> None:
    class Owner:
        def method(self, a: Any, b: Any, c: Any = None, *args: Any, **kwargs: Any) -> None: ...

    def lines(parameters: str) -> list[str]:
        return backends.moved([(Owner, "method", parameters)])

    assert lines("self a b ...") == lines("self a b c ...") == lines("self a b c args kwargs") == []
    for parameters in ("self a ...", "self a b", "self b a ...", "a ..."):
        assert len(lines(parameters)) == 1
    assert backends.moved([(Owner, "other", "")]) == ["Owner has no other"]


# ---- rows without a token


@pytest.mark.parametrize("kv_cache_dtype", ["auto", INT8])
@pytest.mark.parametrize("flash", [None, FlashStandIn()], ids=["cpu", "flash"])
@pytest.mark.parametrize("padded_tokens", [0, 7], ids=["none are tokens", "some are tokens"])
@pytest.mark.parametrize("decodes", [0, 2])
def test_rows_past_the_last_request_are_0(
    decodes: int, padded_tokens: int, flash: FlashStandIn | None, kv_cache_dtype: str, places: Any
) -> None:
    """Outputs are padded for graphs, and a later kernel may take the largest value of all rows.

    vLLM counts some of the padding rows as tokens of the batch.
    """
    gqa = importlib.import_module("cute_kernels.integrations.vllm.gqa")
    batch = draw_batch([40, 17, 50, 33], [1, 1, 30, 5], 16)
    end = len(batch.query)
    starts = (batch.starts[decodes:] - decodes).int()
    prompts = Prompts(
        starts=starts, lengths=batch.seq_lens[decodes:], block_table=batch.block_table[decodes:],
        starts_host=starts.tolist(), lengths_host=batch.seq_lens[decodes:].tolist(),
    )  # fmt: skip
    rest = (end + padded_tokens - decodes, 30, starts, batch.seq_lens[decodes:], batch.block_table[decodes:])
    m = gqa.CuteAttentionMetadata(
        end + padded_tokens, 30, batch.starts, batch.seq_lens, batch.block_table, num_decodes=decodes,
        num_decode_tokens=decodes, prefill=stand_ins.TritonAttentionMetadata(*rest) if decodes else None,
        prompts=prompts if flash else None,
    )  # fmt: skip
    impl = gqa.CuteAttentionImpl(HEADS, 64, 0.125, KV_HEADS, kv_cache_dtype=kv_cache_dtype)
    impl.calls.flash = flash
    layer = types.SimpleNamespace(_k_scale=torch.tensor(1.0), _v_scale=torch.tensor(1.0))
    kv_cache = empty_cache(batch.pages, 16, kv_cache_dtype)
    impl.do_kv_cache_update(layer, batch.keys, batch.values, kv_cache, batch.all_slots)
    query, key, value = (
        torch.cat([t, torch.full((20, *t.shape[1:]), torch.nan, dtype=t.dtype)])
        for t in (batch.query, batch.keys[:end], batch.values[:end])
    )
    output = torch.full_like(query, torch.nan)
    impl.forward(layer, query, key, value, kv_cache, m, output)
    assert batch.error(output[:end], None) < 0.02
    assert not output[end:].any(), "rows of padding were not written"
