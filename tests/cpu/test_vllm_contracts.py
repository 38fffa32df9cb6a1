"""What our adapters need of the installed vLLM: signatures, registration, and its sparse MLA, V4 and HY-V4 classes."""

import ast
import dataclasses
import importlib
import importlib.metadata
import inspect
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import vllm
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention import backend as theirs
from vllm.v1.attention.backends import registry, triton_attn
from vllm.v1.attention.backends.mla import flashmla_sparse

import fp8_mla
from cute_kernels.compat import flash_mla
from cute_kernels.integrations import vllm as cute_vllm
from cute_kernels.integrations.padded_heads import V4Decode
from cute_kernels.integrations.vllm import calls, gqa, sparse_mla, v4
from cute_kernels.integrations.vllm.backends import Function, moved
from tests.kit.flash_stand_in import FlashStandIn
from tests.kit.v4_layers import REAL_HEADS, v4_call
from tests.kit.vllm_batches import HEADS, KV_HEADS, draw_batch
from tests.kit.vllm_fakes import global_indices, sparse_mla_layer

ROOT = Path(__file__).resolve().parents[2]
NEW_CACHES = not hasattr(theirs.AttentionBackend, "get_kv_cache_shape")
"""Whether this vLLM calls `customize_spec` (0.33) or reads shapes of caches (0.26)."""


def test_4_bit_codes_are_those_of_vllm() -> None:
    """Triton's interpreter runs vLLM's kernel on a CPU."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.kit.vllm_int4"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert "the same bits" in done.stdout, done.stdout + done.stderr


# ---- signatures


KERNEL = ("self", "q", "kv_c_and_k_pe_cache", "topk_indices", "kernel_metadata")
UPSTREAM: list[Function] = [
    (registry, "register_backend", "backend class_path ..."),
    *gqa.EXTENDS,
    *sparse_mla.EXTENDS,
]


@pytest.mark.parametrize("function", UPSTREAM, ids=lambda function: f"{function[0].__name__}.{function[1]}")
def test_functions_of_vllm_are_where_they_were(function: Function) -> None:
    assert moved([function]) == [], f"vLLM {vllm.__version__}"


OURS = {
    triton_attn.TritonAttentionImpl: gqa.CuteAttentionImpl,
    triton_attn.TritonAttentionMetadataBuilder: gqa.CuteAttentionMetadataBuilder,
    triton_attn.TritonAttentionBackend: gqa.CuteAttentionBackend,
    flashmla_sparse.FlashMLASparseImpl: sparse_mla.CuteFlashMLASparseImpl,
    flashmla_sparse.FlashMLASparseMetadataBuilder: sparse_mla.CuteFlashMLASparseMetadataBuilder,
    flashmla_sparse.FlashMLASparseBackend: sparse_mla.CuteFlashMLASparseBackend,
}


@pytest.mark.parametrize("base, ours", OURS.items(), ids=lambda cls: cls.__name__)
def test_each_call_of_what_is_replaced_is_one_of_ours(base: Any, ours: Any) -> None:
    for name, value in vars(ours).items():
        replaced = getattr(base, name, None)
        if isinstance(value, property) or not callable(replaced):
            continue
        mine, his = (inspect.signature(f).parameters for f in (getattr(ours, name), replaced))
        named = [n for n, p in mine.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        count = len(his) if len(named) == len(mine) else len(named)  # ours may take further arguments
        assert named[:count] == list(his)[:count], f"vLLM {vllm.__version__}: {name} takes {list(his)}"


def test_fields_that_are_read_are_there() -> None:
    common = {field.name for field in dataclasses.fields(theirs.CommonAttentionMetadata)}
    read = {"query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu_upper_bound", "num_reqs",
            "num_actual_tokens", "block_table_tensor", "slot_mapping", "causal", "dcp_local_seq_lens"}  # fmt: skip
    assert read <= common, f"vLLM {vllm.__version__} has no {sorted(read - common)}"
    batch = {field.name for field in dataclasses.fields(triton_attn.TritonAttentionMetadata)}
    read = {"num_actual_tokens", "query_start_loc", "seq_lens", "block_table"}
    assert read <= batch, f"vLLM {vllm.__version__} has no {sorted(read - batch)}"


def test_flash_attention_takes_what_prompts_pass() -> None:
    """All arguments are keywords. The module is read as text, because it cannot be imported without a GPU."""
    file = Path(vllm.__file__).parent / "vllm_flash_attn" / "flash_attn_interface.py"
    functions = [node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)]
    (found,) = (node for node in functions if node.name == "flash_attn_varlen_func")
    taken = {argument.arg for argument in found.args.args}
    batch, flash = draw_batch([20, 5], [20, 5], 16), FlashStandIn()
    layer = calls.GqaCalls(HEADS, KV_HEADS, 64, 0.125, "auto", softcap=30.0, flash=flash)
    layer.prefill_fresh(batch.query, batch.keys, batch.values, batch.starts, 20, torch.empty_like(batch.query))
    passed = {"q", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table", *flash.calls[0]}
    assert passed <= taken, f"vLLM {vllm.__version__} has no {sorted(passed - taken)}"
    version = importlib.import_module("vllm.v1.attention.backends.fa_utils").get_flash_attn_version
    assert {"requires_alibi", "head_size"} <= set(inspect.signature(version).parameters)


def test_nothing_abstract_is_left() -> None:
    for ours in (gqa.CuteAttentionBackend, gqa.CuteAttentionImpl, gqa.CuteAttentionMetadataBuilder,
                 sparse_mla.CuteFlashMLASparseBackend, sparse_mla.CuteFlashMLASparseImpl):  # fmt: skip
        assert not getattr(ours, "__abstractmethods__", None)


# ---- what is registered and selected


@pytest.fixture
def places() -> Any:
    """Both places of vLLM's registry, empty before and after."""
    both = (registry.AttentionBackendEnum.CUSTOM, registry.AttentionBackendEnum.FLASHMLA_SPARSE)
    for place in both:
        place.clear_override()
    yield both
    for place in both:
        place.clear_override()


def test_the_plugin_registers_both_backends(places: Any) -> None:
    for _ in range(2):
        cute_vllm.register()
    custom, sparse = places
    assert custom.get_class() is gqa.CuteAttentionBackend
    assert sparse.get_class() is sparse_mla.CuteFlashMLASparseBackend
    assert registry.AttentionBackendEnum[gqa.CuteAttentionBackend.get_name()] is custom
    assert registry.AttentionBackendEnum[sparse.get_class().get_name()] is sparse


def test_vllm_finds_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point exists if the project is installed, as `make test-vllm` does."""
    names = {point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")}
    if "cute_kernels" not in names:
        pytest.skip("the project is not installed")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    load = importlib.import_module("vllm.plugins").load_plugins_by_group
    assert load("vllm.general_plugins")["cute_kernels"] is cute_vllm.register
    monkeypatch.setenv("VLLM_PLUGINS", "")
    assert load("vllm.general_plugins") == {}


def wrong(**changes: Any) -> list[str]:
    """The reasons for which vLLM does not select our GQA backend for a layer with `changes`; without them it would."""
    given = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16, "use_mla": False,
        "has_sink": True, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0), "attn_type": "decoder", "has_sliding_window": True,
    } | changes  # fmt: skip
    return gqa.CuteAttentionBackend.validate_configuration(**given)


@pytest.mark.parametrize(
    "changes",
    [
        *({"kv_cache_dtype": name} for name in ("auto", "bfloat16", "fp8", "fp8_e4m3", *calls.SCALED)),
        *({"block_size": size} for size in (16, 32, 48, 64, 128, 256, 512)),
        *({"head_size": size} for size in (64, 256, 512)),
        {"dtype": torch.float16, "kv_cache_dtype": "float16"},
    ],
)
def test_what_is_served(changes: dict[str, Any]) -> None:
    assert wrong(**changes) == []


def test_a_batch_invariant_server_is_served() -> None:
    assert gqa.CuteAttentionBackend.supports_batch_invariance()
    assert not sparse_mla.CuteFlashMLASparseBackend.supports_batch_invariance(), "the list of keys is not ours"


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_cache_dtype": "fp8_e5m2"},
        {"kv_cache_dtype": calls.INT4, "head_size": 512},
        {"kv_cache_dtype": "float16"},
        {"head_size": 80},
        {"block_size": 24},
        {"dtype": torch.float32},
        {"device_capability": DeviceCapability(10, 0)},
        {"device_capability": DeviceCapability(8, 0)},
        {"attn_type": "encoder_only"},
        {"use_mm_prefix": True},
        {"use_non_causal": True},
        {"use_per_head_quant_scales": True},
    ],
)
def test_what_is_not_served(changes: dict[str, Any]) -> None:
    assert len(wrong(**changes)) == 1


@pytest.mark.skipif(NEW_CACHES, reason="this vLLM asks for customize_spec")
def test_shapes_of_caches() -> None:
    """The backend's shapes of caches must be those that its views assume."""
    shape = gqa.CuteAttentionBackend.get_kv_cache_shape
    assert shape(10, 32, 8, 128, calls.FP8_SCALED) == (10, 8, 32, calls.scaled_token_bytes(128))
    assert shape(10, 32, 8, 128, calls.INT8) == (10, 8, 32, calls.scaled_token_bytes(128))
    assert shape(10, 32, 8, 128, calls.INT4) == (10, 8, 32, calls.scaled_token_bytes(128, torch.uint8))
    assert shape(10, 32, 8, 128, "auto") == shape(10, 32, 8, 128, "fp8") == (10, 8, 32, 256)


@pytest.mark.skipif(not NEW_CACHES, reason="this vLLM asks for shapes of caches")
def test_specifications_of_caches() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

    given = FullAttentionSpec(
        block_size=32, num_kv_heads=8, head_size=128, dtype=torch.int8, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD
    )
    ours = gqa.CuteAttentionBackend.customize_spec(given)
    assert ours.num_heads == 8 and ours.state_content_size_bytes == calls.scaled_token_bytes(128)


@pytest.mark.skipif(NEW_CACHES, reason="this vLLM does not ask")
@pytest.mark.parametrize("block_size, padded", [(16, True), (256, True), (48, False), (512, False), (528, False)])
def test_blocks_that_are_split_into_pages_are_not_padded(
    block_size: int, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM would take the distance of blocks for that of their pages."""
    config = types.SimpleNamespace(cache_config=types.SimpleNamespace(block_size=block_size))
    monkeypatch.setattr(gqa, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(triton_attn, "get_kv_cache_layout", lambda: "NHD")
    assert gqa.CuteAttentionBackend.indexes_kv_by_block_stride() is padded


# ---- sparse MLA


def sm90(monkeypatch: pytest.MonkeyPatch, capability: DeviceCapability | None) -> None:
    platform = types.SimpleNamespace(get_device_capability=lambda: capability)
    monkeypatch.setattr(sparse_mla, "current_platform", platform)


def test_sparse_mla_is_ours_on_sm90_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(sparse_mla.logger, "info_once", lambda text, *args: said.append(text % args), raising=False)
    backend = sparse_mla.CuteFlashMLASparseBackend
    for capability, words in ((DeviceCapability(10, 0), "10.0; needs 9.0"), (None, "unknown; needs 9.0")):
        sm90(monkeypatch, capability)
        assert backend.get_impl_cls() is flashmla_sparse.FlashMLASparseImpl
        assert said.pop().endswith(words)
    sm90(monkeypatch, DeviceCapability(9, 0))
    assert backend.get_impl_cls() is sparse_mla.CuteFlashMLASparseImpl and said == []
    assert sparse_mla.inactive_because("fp8_ds_mla") is None
    assert sparse_mla.inactive_because("auto") == "a KV cache of auto; needs --kv-cache-dtype fp8"
    assert backend.get_name() == "FLASHMLA_SPARSE"
    assert backend.get_builder_cls() is sparse_mla.CuteFlashMLASparseMetadataBuilder


def test_a_layer_says_once_whether_it_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(sparse_mla.logger, "info_once", lambda text, *args: said.append(text % args), raising=False)
    sm90(monkeypatch, DeviceCapability(9, 0))

    def init(self: Any, kv_cache_dtype: str) -> None:
        self.kv_cache_dtype, self.num_heads = kv_cache_dtype, 16

    monkeypatch.setattr(flashmla_sparse.FlashMLASparseImpl, "__init__", init)
    monkeypatch.setattr(flashmla_sparse.FlashMLASparseImpl, "__new__", lambda cls, *args: object.__new__(cls))
    for cache in ("fp8_ds_mla", "auto"):
        sparse_mla.CuteFlashMLASparseImpl(cache)
    assert said == [
        "cute-kernels: sparse MLA of 16 heads runs on mla_fp8_decode (VLLM_PLUGINS= turns it off)",
        "cute-kernels: sparse MLA runs on vLLM's kernels: a KV cache of auto; needs --kv-cache-dtype fp8",
    ]


@pytest.mark.parametrize("heads", [8, 16, 20, 128])
def test_vllms_metadata_drives_sparse_mla(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM's own forward runs over 656-byte tokens: below 32 heads as one sequence, else two tokens per request."""
    monkeypatch.setattr(flashmla_sparse, "triton_convert_req_index_to_global_index", global_indices)
    layer = sparse_mla_layer(sparse_mla.CuteFlashMLASparseImpl, heads)
    out, lse = layer.forward()
    indices = global_indices(
        layer.metadata.req_id_per_token, layer.metadata.block_table, layer.impl.topk_indices_buffer, BLOCK_SIZE=64
    )
    expected, expected_lse = fp8_mla.reference_decode(
        layer.q.unsqueeze(1), layer.cache, indices=indices.unsqueeze(1), softmax_scale=0.1
    )
    torch.testing.assert_close(out.double(), expected[:, 0].double(), rtol=2**-7, atol=2**-7)
    if lse is not None:  # 0.33, for context parallelism
        torch.testing.assert_close(lse.double(), expected_lse[:, 0].double(), rtol=1e-5, atol=1e-5)


# ---- DeepSeek-V4 and HY-V4

MODELS = {"vllm.models.deepseek_v4": True, "vllm.models.deepseek_v41": NEW_CACHES, "vllm.models.hy_v4": NEW_CACHES}
"""Whether this vLLM has the model: 0.26 has the first, 0.33 all."""
V4_MODULES = [name for name in v4.CHANGES if v4.CHANGES[name] is v4.change_deepseek_v4]
(HY_V4_MODULE,) = [name for name in v4.CHANGES if name not in V4_MODULES]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(v4, "say_once", lines.append)
    return lines


def imported(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model's module, changed by the plugin until the test ends."""
    if not MODELS[name.rsplit(".", 2)[0]]:
        pytest.skip("only vLLM 0.33 has this model")
    module = importlib.import_module(name)
    function = getattr(module, v4.FLASH_MLA)
    monkeypatch.setattr(module, v4.FLASH_MLA, getattr(function, "original", function))
    for owner, attribute in ((v4.V4_CLASS, v4.V4_METHOD), (v4.HY_V4_CLASS, v4.HY_V4_METHOD)):
        if hasattr(module, owner):  # undone if the plugin was there before
            method = getattr(getattr(module, owner), attribute)
            monkeypatch.setattr(getattr(module, owner), attribute, getattr(method, "__wrapped__", method))
    v4.CHANGES[name](module)
    return module


def test_flash_mla_takes_nothing_that_ours_does_not() -> None:
    file = Path(str(vllm.__file__)).parent / "third_party" / "flashmla" / "flash_mla_interface.py"
    (function,) = [
        node
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name == v4.FLASH_MLA
    ]
    theirs = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
    ours = list(inspect.signature(flash_mla.flash_mla_with_kvcache).parameters)
    assert ours[: len(theirs)] == theirs, f"vLLM {vllm.__version__}"


@pytest.mark.parametrize("name", V4_MODULES)
def test_classes_of_v4_are_where_they_were(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = imported(name, monkeypatch)
    layer = getattr(module, v4.V4_CLASS)
    assert isinstance(getattr(module, v4.FLASH_MLA), V4Decode)
    assert moved([(layer, "forward_mqa", "self q kv positions output ...")]) == []
    assert moved([(layer, "get_padded_num_q_heads", "num_heads ...")]) == []
    assert [layer.get_padded_num_q_heads(heads) for heads in (8, 64, 65, 128)] == [64, 64, 128, 128]
    base = inspect.getsource(layer.__mro__[1])
    assert "self.n_local_heads = " in base, f"vLLM {vllm.__version__}: nothing assigns n_local_heads"
    reads = base + inspect.getsource(importlib.import_module(f"{name.rsplit('.', 1)[0]}.ops.o_proj"))
    assert "_heads, :]" in reads, f"vLLM {vllm.__version__}: padded heads of the output are read"


def test_the_class_of_hy_v4_is_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = getattr(imported(HY_V4_MODULE, monkeypatch), v4.HY_V4_CLASS)
    kernel = getattr(layer, v4.HY_V4_METHOD)
    assert tuple(inspect.signature(kernel.__wrapped__).parameters) == KERNEL and kernel.__wrapped__ is not kernel
    assert moved([(layer, "_sinks_for_query", "self q head_dim kernel_heads ...")]) == []


def test_the_sparse_indexer_asks_what_we_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    from cute_kernels.integrations.vllm import indexer

    ((name, change),) = indexer.CHANGES.items()
    module = importlib.import_module(name)
    asks = indexer.GET_TOPK if hasattr(module, indexer.GET_TOPK) else "torch"
    originals = {key: getattr(module, key) for key in (indexer.LOGITS, asks)}
    for key, original in originals.items():
        monkeypatch.setattr(module, key, original)
    change(module)
    stays = [key for key, original in originals.items() if getattr(module, key) is original]
    assert stays == [], f"vLLM {vllm.__version__}"


@pytest.mark.parametrize("extra", [True, False], ids=["compressed", "window"])
@pytest.mark.parametrize("heads", REAL_HEADS)
@pytest.mark.parametrize("name", V4_MODULES)
def test_vllms_metadata_drives_v4(
    name: str, heads: int, extra: bool, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """VLLM's own `forward_mqa` runs for a batch that decodes, over its 584-byte tokens."""
    module, call = imported(name, monkeypatch), v4_call(heads, extra)
    case, tokens = call.case, len(call.q)
    layer = object.__new__(getattr(module, v4.V4_CLASS))
    torch.nn.Module.__init__(layer)
    is_41 = "v41" in name
    layer.compress_ratio = (2 if is_41 else 128) if extra else (0 if is_41 else 1)
    layer.n_local_heads, layer.scale, layer.attn_sink = heads, case.softmax_scale, case.s_aux
    layer.prefix, layer.kv_cache, layer.use_pcp = "layer", case.extra_kv_cache, False
    layer.swa_cache_layer = types.SimpleNamespace(prefix="window", kv_cache=case.kv_cache)
    layer.topk_indices_buffer = torch.zeros(tokens, 1, dtype=torch.int32)
    layer.compressed_cache_prefix, layer._compressed_kv_cache = "layer", lambda: case.extra_kv_cache
    window = types.SimpleNamespace(
        num_decodes=tokens, num_prefills=0, num_decode_tokens=tokens, num_prefill_tokens=0, token_to_req_indices=None,
        is_valid_token=torch.ones(tokens, dtype=torch.bool), decode_swa_indices=case.indices,
        decode_swa_lens=case.topk_length,
        **{f"tile_sched_{kind}": object() for kind in ("swaonly", "c1a", "c2a", "c4a", "c128a")},
    )  # fmt: skip
    compressed = types.SimpleNamespace(
        block_size=256, block_table=torch.zeros(tokens, 1, dtype=torch.int32),
        c128a_global_decode_topk_indices=case.extra_indices, c128a_decode_topk_lens=case.extra_topk_length,
    )  # fmt: skip
    context = types.SimpleNamespace(attn_metadata={"layer": compressed if extra else None, "window": window})
    monkeypatch.setattr(module, "get_forward_context", lambda: context)
    monkeypatch.setattr(  # a Triton kernel
        module, "compute_global_topk_indices_and_lens", lambda *args: (case.extra_indices, case.extra_topk_length)
    )
    output = call.output()
    layer.forward_mqa(call.q, None, None, output)
    call.check(output)
    assert bool(output[:, heads:].isnan().all())
    assert said == [f"DeepSeek-V4 decoding of {heads} heads runs on mla_fp8_decode"]


@pytest.mark.parametrize("heads", [8, 20, 64])
def test_vllms_metadata_drives_hy_v4(heads: int, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    module = imported(HY_V4_MODULE, monkeypatch)
    monkeypatch.setattr(flashmla_sparse, "triton_convert_req_index_to_global_index", global_indices)
    layer = sparse_mla_layer(getattr(module, v4.HY_V4_CLASS), heads)
    layer.impl.sinks = torch.linspace(-1, 4, heads)
    out, _ = layer.forward()
    indices = global_indices(
        layer.metadata.req_id_per_token, layer.metadata.block_table, layer.impl.topk_indices_buffer, BLOCK_SIZE=64
    )
    expected, _ = fp8_mla.reference_decode(
        layer.q.unsqueeze(1), layer.cache, indices=indices.unsqueeze(1), softmax_scale=0.1, s_aux=layer.impl.sinks
    )
    torch.testing.assert_close(out.double(), expected[:, 0].double(), rtol=2**-7, atol=2**-7)
    assert said == [f"sparse MLA of HY-V4 with {heads} heads runs on mla_fp8_decode"]
