"""SGLang's plugin on stand-ins for SGLang's objects, without the engine: the hook in sparse MLA, and backend "cute".

One test reads the sources of an installed SGLang and says which name or argument has moved.
"""

import ast
import dataclasses
import importlib.metadata
import importlib.util
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_kernels import gqa_decode, mla_fp8_decode
from cute_kernels.integrations import hooks, on_import, padded_heads
from cute_kernels.integrations import sglang as plugin
from tests.kit.sglang_stand_ins import (
    HEADS,
    AttentionType,
    Case,
    DeepseekV4AttnBackend,
    installed,
    sparse_backend,
    sparse_call,
)
from tests.kit.v4_layers import REAL_HEADS, v4_call

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    with installed(monkeypatch) as modules:
        yield modules


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(plugin, "say_once", lines.append)
    monkeypatch.setattr(hooks, "say_once", lines.append)  # before sglang_gqa is imported
    return lines


def test_the_plugin_registers_once(sglang: types.SimpleNamespace) -> None:
    for _ in range(2):
        plugin.register()
    assert sglang.choices == ["fa3", "cute"] and list(sglang.backends) == ["cute"]
    assert sglang.deterministic == sglang.radix == ["fa3", "cute"]
    finders = [finder for finder in sys.meta_path if isinstance(finder, on_import.ChangingFinder)]
    assert sum(finder.changes == plugin.CHANGES for finder in finders) == 1


@pytest.mark.parametrize("name", ["arg_groups.choices", "layers.attention.attention_registry"])
def test_an_sglang_with_other_registries_starts(
    name: str, sglang: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, f"sglang.srt.{name}", None)
    plugin.register()
    (record,) = caplog.records
    assert name in record.getMessage() and record.getMessage().endswith("written against SGLang 0.5.23")
    assert any(isinstance(f, on_import.ChangingFinder) and f.changes == plugin.CHANGES for f in sys.meta_path)


# ---- sparse MLA


def test_sparse_mla_is_that_of_the_op(said: list[str]) -> None:
    call = sparse_call()
    out = plugin.sparse_mla(None, sparse_backend(), **call)
    q, cache = call["q_all"].view(3, 1, HEADS, 576), call["kv_cache"].view(torch.uint8).view(2, 64, 656)
    expected = mla_fp8_decode(q, cache, indices=call["page_table_1"].unsqueeze(1), softmax_scale=0.1)
    assert out.shape == (3, 1, HEADS, 512) and torch.equal(out, expected)
    assert said == ["sparse MLA runs on mla_fp8_decode"]


@pytest.mark.parametrize(
    "backend, layer, word",
    [
        ({"dsa_kv_cache_store_fp8": False}, {}, "not FP8"),
        ({"flashmla_kv_format": "V32_NO_ROPE", "kv_cache_dim": 528}, {"head_dim": 512}, "528 bytes"),
        ({}, {"head_dim": 512}, "head dimensions 512"),
        ({}, {"tp_q_head_num": 256}, "256 heads"),
    ],
)
def test_what_no_kernel_takes_stays_with_flash_mla(
    backend: dict[str, Any], layer: dict[str, Any], word: str, said: list[str]
) -> None:
    call, given = sparse_call(), sparse_backend(**backend)
    vars(call["layer"]).update(layer)
    asked: list[Any] = []

    def original(backend: Any, **arguments: Any) -> str:
        asked.append((backend, arguments))
        return "FlashMLA"

    assert plugin.sparse_mla(original, given, **call) == "FlashMLA"
    assert asked == [(given, call)]
    assert len(said) == 1 and word in said[0]


class Missing:
    """An argument or attribute that this version does not have."""


@pytest.mark.parametrize(
    "change, word",
    [
        ({"topk_lens": None}, "topk_lens"),
        ({"metadata": Missing}, "metadata"),
        ({"q_all": Missing, "q": None}, "'q'"),
        ({"q_all": None}, "device"),
        ({"page_table_1": torch.zeros(3, 32, dtype=torch.int64)}, "indices: got"),
        ({"backend": {"flashmla_kv_format": Missing}}, "flashmla_kv_format"),
        ({"backend": {"physical_page_size": Missing}}, "physical_page_size"),
        ({"layer": types.SimpleNamespace(head_dim=576)}, "tp_q_head_num"),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else None,
)
def test_a_call_that_moved_stays_with_flash_mla(change: dict[str, Any], word: str, said: list[str]) -> None:
    """Whatever has moved in SGLang, `original` gets the unchanged call."""
    facts = change.get("backend", {})
    backend = sparse_backend(**{name: value for name, value in facts.items() if value is not Missing})
    for name in [name for name, value in facts.items() if value is Missing]:
        delattr(backend, name)
    call = {**sparse_call(), **{name: value for name, value in change.items() if name != "backend"}}
    call = {name: value for name, value in call.items() if value is not Missing}
    assert plugin.sparse_mla(lambda *args, **kwargs: (args, kwargs), backend, **call) == ((backend,), call)
    assert len(said) == 1 and said[0].startswith("sparse MLA stays with FlashMLA: ") and word in said[0]
    by_position = tuple(call.values())
    assert plugin.sparse_mla(lambda *args, **kwargs: (args, kwargs), None, *by_position) == ((None, *by_position), {})


def test_on_another_device_nothing_of_a_stack_is_read(said: list[str]) -> None:
    q = torch.zeros(1, 4, 576, device="meta")
    assert plugin.sparse_mla(lambda *args: args, None, q, *[None] * 6) == (None, q, *[None] * 6)
    assert said == ["sparse MLA stays with FlashMLA: device meta: kernels need an SM90 GPU (H100, H200)"]


def test_the_hook_is_put_in_where_sglang_imports_its_backend(said: list[str]) -> None:
    class DeepseekSparseAttnBackend:
        def __init__(self) -> None:
            vars(self).update(vars(sparse_backend()))

        def _forward_flashmla_kv(self, *args: Any, **kwargs: Any) -> Any:
            return "FlashMLA"

    module: Any = types.ModuleType("dsa_backend")
    module.DeepseekSparseAttnBackend = DeepseekSparseAttnBackend
    for _ in range(2):
        plugin.CHANGES["sglang.srt.layers.attention.dsa_backend"](module)
    assert not hasattr(DeepseekSparseAttnBackend._forward_flashmla_kv.__wrapped__, "__wrapped__")  # type: ignore[attr-defined]
    backend, call = DeepseekSparseAttnBackend(), sparse_call()
    assert torch.equal(backend._forward_flashmla_kv(**call), plugin.sparse_mla(None, sparse_backend(), **call))
    assert backend._forward_flashmla_kv(**call, topk_lens=None) == "FlashMLA"
    said.clear()
    plugin.change_sparse_mla(types.ModuleType("dsa_backend"))
    assert said == ["sparse MLA stays with FlashMLA: this SGLang has no DeepseekSparseAttnBackend._forward_flashmla_kv"]


@pytest.mark.parametrize("sm90, word", [(True, None), (False, "need an SM90")])
def test_another_gpu_is_refused(sm90: bool, word: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padded_heads, "is_sm90", lambda device: sm90)
    reason = padded_heads.device_refusal(torch.device("cuda", 0))
    assert reason is None if word is None else re.search(word, reason or "")


# ---- DeepSeek-V4


@pytest.fixture
def v4_backend() -> Any:
    """A backend class like SGLang's, in a module that was changed twice."""
    copied = type("DeepseekV4AttnBackend", (DeepseekV4AttnBackend,), dict(vars(DeepseekV4AttnBackend)))
    module = types.ModuleType("deepseek_v4_backend")
    module.DeepseekV4AttnBackend = copied  # type: ignore[attr-defined]
    for _ in range(2):
        plugin.change_deepseek_v4(module)
    assert not hasattr(copied._forward_attention.__wrapped__, "__wrapped__")  # type: ignore[attr-defined]
    return copied


@pytest.mark.parametrize("extra", [True, False], ids=["compressed", "window"])
@pytest.mark.parametrize("heads", REAL_HEADS)
def test_deepseek_v4_computes_the_real_heads(heads: int, extra: bool, v4_backend: Any, said: list[str]) -> None:
    call = v4_call(heads, extra)
    backend, layer = v4_backend(call.case), types.SimpleNamespace(tp_q_head_num=heads)
    for _ in range(2):
        out = backend.forward(call.q, None, None, layer, None, compress_ratio=4, attn_sink=call.case.s_aux)
        assert out.shape == call.q.shape, "SGLang copies padded heads"
        call.check(out)
    assert backend.asked == [] and set(said) == {f"DeepSeek-V4 decoding of {heads} heads runs on mla_fp8_decode"}
    layer.tp_q_head_num = 3  # for this call
    few = backend.forward(call.q, None, None, layer, None, 4, attn_sink=call.case.s_aux)
    assert torch.equal(few[:, :3], out[:, :3])
    assert said[-1] == "DeepSeek-V4 decoding of 3 heads runs on mla_fp8_decode"


def test_deepseek_v4_without_a_known_layer_computes_all_heads(v4_backend: Any, said: list[str]) -> None:
    """SGLang may have another order of arguments. Then the first heads of q include the real ones."""
    call = v4_call(16)
    backend = v4_backend(call.case)
    out = backend.forward(call.q, None, None, None, None, compress_ratio=4, attn_sink=call.case.s_aux)
    call.check(out)
    assert backend.asked == [] and said == [f"DeepSeek-V4 decoding of {call.q.shape[1]} heads runs on mla_fp8_decode"]


def test_deepseek_v4_over_other_rows_stays_with_flash_mla(v4_backend: Any, said: list[str]) -> None:
    call = v4_call(16)
    other = dataclasses.replace(call.case, kv_cache=torch.zeros(8, 64, 528, dtype=torch.uint8))
    backend, layer = v4_backend(other), types.SimpleNamespace(tp_q_head_num=16)
    for _ in range(2):
        backend.forward(call.q, None, None, layer, None, 4, attn_sink=call.case.s_aux)
    assert len(backend.asked) == 2 and backend.asked[0]["use_legacy"] is True
    assert backend.asked[0]["q"].shape[2] == 64
    assert len(said) == 1 and "528 bytes" in said[0]


def test_a_backend_without_flash_mla_is_called_as_it_is(v4_backend: Any) -> None:
    """On GPUs that are not NVIDIA's the constructor makes no such attribute."""
    backend = v4_backend(v4_call(16).case)
    del backend._flash_mla_with_kvcache
    layer = types.SimpleNamespace(tp_q_head_num=16)
    with pytest.raises(AttributeError, match="_flash_mla_with_kvcache"):
        backend.forward(backend.case.q[:, 0], None, None, layer, None, 4)


def test_a_method_that_moved_is_named(said: list[str]) -> None:
    plugin.change_deepseek_v4(types.ModuleType("deepseek_v4_backend"))
    assert len(said) == 1 and "no DeepseekV4AttnBackend._forward_attention" in said[0]


# ---- the backend "cute"


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=2**-8)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("d", [64, 128])
def test_new_tokens_are_stored_and_seen(d: int, fp8: bool, sglang: types.SimpleNamespace, said: list[str]) -> None:
    case = Case(sglang, d, fp8)
    before = case.pool.k.clone()
    out = case.decode()
    changed = (case.pool.k.float() != before.float()).any(-1).any(-1).nonzero().squeeze(1).tolist()
    assert changed == sorted(case.batch.out_cache_loc.tolist())
    assert out.shape == (2, 8 * d) and out.dtype is torch.bfloat16
    close(out, case.expected())
    assert said == ["layers decode on gqa_decode"]


def test_windows_sinks_and_softcap_mean_the_same(sglang: types.SimpleNamespace) -> None:
    case = Case(sglang)
    sinks = torch.arange(8, dtype=torch.float32, device="cpu").bfloat16() / 4
    case.layer.sliding_window_size, case.layer.logit_cap = 19, 5.0  # SGLang counts the keys before the query's own
    close(case.decode(sinks=sinks), case.expected(window=20, sinks=sinks, softcap=5.0))


def test_a_window_may_have_pages_of_its_own(sglang: types.SimpleNamespace) -> None:
    case = Case(sglang)
    case.decode()
    case.layer.sliding_window_size, case.backend.use_sliding_window_kv_pool = 15, True
    assert case.decode(save_kv_cache=False)[0] == "FlashAttention", "it has none yet"
    case.metadata.swa_page_table, case.metadata.page_table = case.table, torch.zeros_like(case.table)
    close(case.decode(save_kv_cache=False), case.expected(window=16))


def test_the_result_goes_where_sglang_wants_it(sglang: types.SimpleNamespace) -> None:
    case = Case(sglang)
    plain = case.decode()
    place = torch.full_like(plain, torch.nan)
    case.batch._attn_output = place
    out = case.decode()
    assert out.data_ptr() == place.data_ptr() and torch.equal(place, plain)


def test_deterministic_inference_is_one_split(sglang: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(sglang)
    adapter = importlib.import_module("cute_kernels.integrations.sglang_gqa")
    asked: list[Any] = []

    def decode(*args: Any, num_splits: int | None, **kwargs: Any) -> Any:
        asked.append(num_splits)
        return gqa_decode(*args, num_splits=num_splits, **kwargs)

    monkeypatch.setattr(adapter, "gqa_decode", decode)
    for on in (False, True):
        sglang.modes.enable_deterministic_inference = on
        close(case.decode(), case.expected())
    assert asked == [None, 1]


@pytest.mark.parametrize(
    "change, others, word",
    [
        ("case.metadata.max_seq_len_q = 4", {}, "4 query tokens"),
        ("case.layer.attn_type = AttentionType.ENCODER_ONLY", {}, "not causal"),
        ("case.layer.is_cross_attention = True", {}, "not causal"),
        ("case.layer.v_head_dim = 32", {}, "head dimensions 64 and 32"),
        ("case.layer.k_scale = torch.tensor(1.0)", {}, "alone"),
        ("case.metadata.pa_swa_page_table = case.table", {}, "prompt"),
        ("case.batch.spec_info, case.backend.topk = object(), 2", {}, "branch"),
        ("case.backend.kv_cache_dtype = torch.float8_e5m2", {}, "float8_e5m2"),
        ("case.backend.kv_cache_is_mxfp8 = True", {}, "MXFP8"),
        ("case.q = case.q[:1]", {}, "padded"),
        ("case.q = case.q.float()", {}, "float32"),
        (
            "case.backend.local_attn_builder = types.SimpleNamespace(applies=lambda layer, metadata: True)",
            {},
            "in chunks",
        ),
        ("", {"return_lse": True}, "return_lse"),
        ("del case.backend.local_attn_builder", {}, "local_attn_builder"),
        ("del case.metadata.max_seq_len_q", {}, "max_seq_len_q"),
        ("del case.layer.k_scale", {}, "k_scale"),
        ("", {"q_rope": torch.zeros(1), "k_rope": None}, "q_rope:"),
    ],
)
def test_what_no_kernel_takes_stays_with_flash_attention(
    change: str, others: dict[str, Any], word: str, sglang: types.SimpleNamespace, said: list[str]
) -> None:
    case = Case(sglang)
    exec(change, {"case": case, "torch": torch, "types": types, "AttentionType": AttentionType})
    before = case.pool.k.clone()
    assert case.decode(**others) == ("FlashAttention", others)
    assert torch.equal(case.pool.k, before), "who attends stores"
    assert len(said) == 1 and word in said[0]


def test_a_call_that_the_kernel_refuses_stays_with_flash_attention(
    sglang: types.SimpleNamespace, said: list[str]
) -> None:
    case = Case(sglang)
    case.metadata.cache_seqlens_int32 = case.lengths.long()
    assert case.decode() == ("FlashAttention", {}) and "cache_seqlens: got" in said[0] and len(said) == 1


def test_latent_attention_has_no_such_backend(sglang: types.SimpleNamespace) -> None:
    plugin.register()
    with pytest.raises(ValueError, match='needs "dsa"'):
        sglang.backends["cute"](types.SimpleNamespace(use_mla_backend=True))


def test_pages_agree_with_rows_of_a_contiguous_cache(sglang: types.SimpleNamespace) -> None:
    """The oracle above must agree with the operator over the same tokens without pages."""
    case = Case(sglang)
    case.decode()
    slots = (case.table[0, :3].long().unsqueeze(1) * 16 + torch.arange(16, device="cpu")).reshape(1, -1)[:, :33]
    k, v = case.pool.k[slots], case.pool.v[slots]
    out = gqa_decode(case.q[:1].view(1, 1, 8, -1), k, v, layout="BSNH", softmax_scale=0.2)
    close(out.reshape(1, -1), case.expected()[:1])


# ---- an installed SGLang

ATTENTION = "srt/layers/attention"
ARGUMENTS = {
    (f"{ATTENTION}/dsa_backend.py", "DeepseekSparseAttnBackend._forward_flashmla_kv"): (
        "self", "q_all", "kv_cache", "v_head_dim", "sm_scale", "layer", "metadata", "page_table_1"
    ),
    (f"{ATTENTION}/flashattention_backend.py", "FlashAttentionBackend.forward_decode"): (
        "self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "q_rope", "k_rope", "sinks", "q_descale",
        "k_descale", "v_descale", "score_mod", "aux_tensors", "rel_bias", "rel_bias_event", "return_lse",
    ),
    (f"{ATTENTION}/flashattention_backend.py", "FlashAttentionBackend.get_paged_mha_kv_cache"): (
        "self", "layer", "head_group_num"
    ),
    (f"{ATTENTION}/deepseek_v4_backend.py", "DeepseekV4AttnBackend._forward_attention"): (
        "self", "q", "k", "v", "layer", "forward_batch", "compress_ratio", "save_kv_cache", "attn_sink",
        "cos_sin_cache",
    ),
    (f"{ATTENTION}/dsa/dsa_indexer.py", "Indexer._get_topk_paged"): (
        "self", "forward_batch", "layer_id", "q_fp8", "weights", "metadata"
    ),
    (f"{ATTENTION}/dsa/dsa_indexer.py", "Indexer._get_index_k_read_buffer"): ("pool", "layer_id"),
    **{(f"{ATTENTION}/dsa/dsa_indexer_metadata.py", f"DSAIndexerMetadata.get_{name}"): ("self",)
       for name in ("page_table_64", "seqlens_expanded", "dsa_extend_len_cpu")},
    (f"{ATTENTION}/dsa/dsa_topk_backend.py", "DSATopKBackend.is_sgl_kernel"): ("self",),
    ("kernels/ops/attention/dsv4/topk.py", "topk_transform_paged_v2"): (
        "scores", "seq_lens", "page_tables", "out_page_indices", "page_size", "metadata", "out_raw_indices"
    ),
    (f"{ATTENTION}/attention_registry.py", "register_attention_backend"): ("name",),
    ("srt/mem_cache/memory_pool.py", "MHATokenToKVPool.set_kv_buffer"): (
        "self", "layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale", "layer_id_override", "dcp_kv_mask"
    ),
    ("srt/mem_cache/memory_pool.py", "KVWriteLoc.for_layer"): ("cls", "forward_batch", "layer", "swa_loc", "full_loc"),
    ("srt/runtime_context.py", "get_exec"): (),
}  # fmt: skip
NAMES = {
    f"{ATTENTION}/dsa_backend.py": (
        "self.dsa_kv_cache_store_fp8", "self.flashmla_kv_format", "self.kv_cache_dim", "self.physical_page_size",
        "page_size",
    ),
    f"{ATTENTION}/dsa/dsa_indexer.py": ("self.index_topk", "self.num_init_tokens", "self.num_local_tokens"),
    f"{ATTENTION}/dsa/dsa_indexer_metadata.py": (
        "attn_metadata", "topk_backend", "topk_transform_method", "force_unfused_topk"
    ),
    f"{ATTENTION}/dsa/dsa_topk_backend.py": ("PAGED", "SGL_KERNEL"),
    "srt/mem_cache/memory_pool.py": ("self.index_page_size",),
    "srt/environ.py": ("SGLANG_DSA_FUSE_TOPK",),
    f"{ATTENTION}/deepseek_v4_backend.py": ("self._flash_mla_with_kvcache",),
    f"{ATTENTION}/flashattention_backend.py": (
        "self.token_to_kv_pool", "self.kv_cache_dtype", "self.kv_cache_is_mxfp8", "self.use_sliding_window_kv_pool",
        "self.local_attn_builder", "self.topk", "cache_seqlens_int32", "page_table", "swa_page_table",
        "pa_swa_page_table", "max_seq_len_q", "swa_out_cache_loc",
    ),
    "srt/layers/radix_attention.py": (
        "self.tp_q_head_num", "self.head_dim", "self.v_head_dim", "self.scaling", "self.logit_cap",
        "self.sliding_window_size", "self.is_cross_attention", "self.attn_type", "self.k_scale", "self.v_scale",
        "ENCODER_ONLY",
    ),
    "srt/arg_groups/choices.py": (
        "ATTENTION_BACKEND_CHOICES", "add_attention_backend_choices", "add_deterministic_attention_backend_choices",
        "add_radix_supported_deterministic_attention_backend_choices",
    ),
    "srt/model_executor/forward_batch_info.py": ("out_cache_loc", "spec_info", "_attn_output"),
}  # fmt: skip
"""Names that each file assigns or declares."""


def functions(tree: ast.Module) -> dict[str, tuple[str, ...]]:
    """Names of the arguments of each function of a module and of its classes, also those after *."""
    owners = [("", tree), *((f"{node.name}.", node) for node in tree.body if isinstance(node, ast.ClassDef))]
    return {
        f"{prefix}{node.name}": tuple(a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))
        for prefix, owner in owners
        for node in owner.body  # type: ignore[attr-defined]
        if isinstance(node, ast.FunctionDef)
    }


def assigned(tree: ast.Module) -> set[str]:
    """Everything that a module assigns or declares, as source text."""
    found = set()
    for node in ast.walk(tree):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        found |= {ast.unparse(part) for target in targets for part in getattr(target, "elts", [target])}
    return found


def moved(package: Path) -> list[str]:
    """Descriptions of names or arguments of SGLang that are not where the plugin looks for them."""
    trees = {
        file: ast.parse((package / file).read_text(encoding="utf-8"))
        for file in {*NAMES, *(file for file, _ in ARGUMENTS)}
    }
    lines = []
    for (file, name), needed in ARGUMENTS.items():
        have = functions(trees[file]).get(name)
        if have is None:
            lines.append(f"{file}: no {name}")
        elif have != needed:
            gone, new = [a for a in needed if a not in have], [a for a in have if a not in needed]
            lines.append(f"{file}: {name} takes {have}; gone {gone}, new {new}")
    for file, names in NAMES.items():
        lines += [f"{file}: nothing assigns {name}" for name in names if name not in assigned(trees[file])]
    return lines


def installed_package() -> Path:
    """The folder of an installed SGLang; without one the test is skipped."""
    found = importlib.util.find_spec("sglang")
    folders = [Path(place) for place in (found.submodule_search_locations or ())] if found is not None else []
    if not folders or not (folders[0] / "srt").is_dir():
        pytest.skip("SGLang is not installed")
    return folders[0]


def test_an_installed_sglang_has_what_the_plugin_reads() -> None:
    package = installed_package()
    version = importlib.metadata.version("sglang")
    assert moved(package) == [], f"SGLang {version} is not what cute_kernels.integrations.sglang was written against"


@pytest.mark.parametrize("extra", [True, False], ids=["compressed", "window"])
@pytest.mark.parametrize("heads", REAL_HEADS)
def test_an_installed_sglangs_own_method_computes_the_real_heads(heads: int, extra: bool, said: list[str]) -> None:
    """`_forward_attention` is taken from the source without its module, which needs packages for a GPU."""
    text = (installed_package() / f"{ATTENTION}/deepseek_v4_backend.py").read_text(encoding="utf-8")
    (cls,) = [
        n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == DeepseekV4AttnBackend.__name__
    ]
    (method,) = [n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == plugin.DEEPSEEK_V4_METHOD]
    call = v4_call(heads, extra)
    case = call.case

    class Pool:
        get_swa_key_page_size = staticmethod(lambda: 64)
        get_extra_key_page_size = staticmethod(lambda layer: 2)
        get_swa_key_bytes_per_token = staticmethod(lambda: 584)
        get_extra_key_bytes_per_token = staticmethod(lambda layer: 584)
        get_swa_key_buffer_radix = staticmethod(lambda layer: rows(case.kv_cache))
        get_extra_key_buffer = staticmethod(lambda layer: rows(case.extra_kv_cache))

    class Metadata:
        swa_page_indices, swa_topk_lengths = case.indices[:, 0], case.topk_length  # type: ignore[index]
        sparse_page_indices = staticmethod(lambda ratio: case.extra_indices[:, 0])  # type: ignore[index]
        sparse_topk_lengths = staticmethod(lambda ratio: case.extra_topk_length)
        get_flashmla_metadata = staticmethod(lambda ratio: None)

    def rows(pages: Any) -> torch.Tensor:
        return pages.as_strided((len(pages), pages.stride(0)), (pages.stride(0), 1))

    names: dict[str, Any] = {
        "torch": torch, "DSV4AttnMetadata": Metadata, "DeepSeekV4TokenToKVPool": Pool, "_is_xpu": False,
        "get_platform": lambda: types.SimpleNamespace(is_sm100=False, is_sm120=False),
    }  # fmt: skip
    exec("from __future__ import annotations\n" + ast.unparse(method), names)
    module: Any = types.ModuleType("deepseek_v4_backend")
    module.DeepseekV4AttnBackend = type("Backend", (), {method.name: names[method.name]})
    plugin.change_deepseek_v4(module)
    backend = module.DeepseekV4AttnBackend()
    backend.mtp_enabled = backend.trtllm_attn = backend.is_dsv41 = backend._swa_interleaved = False
    backend.forward_metadata = types.SimpleNamespace(core_attn_metadata=Metadata())
    backend.token_to_kv_pool, backend.head_dim_v, backend.softmax_scale = Pool(), 512, case.softmax_scale
    backend._mega_paged_prefill = backend._use_sparse_prefill = lambda *args, **kwargs: False
    backend._flash_mla_with_kvcache = lambda **arguments: pytest.fail("FlashMLA was called")
    layer = types.SimpleNamespace(tp_q_head_num=heads, layer_id=0, v_head_dim=512)
    q = call.q
    out = backend._forward_attention(
        q, q, q, layer, None, compress_ratio=4 if extra else 0, save_kv_cache=False,
        attn_sink=case.s_aux,
    )  # fmt: skip
    assert out.shape == q.shape
    call.check(out)
    assert said == [f"DeepSeek-V4 decoding of {heads} heads runs on mla_fp8_decode"]
