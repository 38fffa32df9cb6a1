"""SGLang's plugin: the hook in sparse MLA and the backend "cute", on stand-ins of SGLang's objects, without the engine.

One test reads the sources of an installed SGLang and says which name or argument has moved.
"""

import ast
import importlib.metadata
import importlib.util
import re
import sys
import types
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8_mla
from cute_kernels import gqa_decode, mla_fp8_decode
from cute_kernels.integrations import sglang as plugin

ROOT = Path(__file__).resolve().parents[2]
HEADS, TOPK = 16, 32


# ---- a stand-in of SGLang


class AttentionType(Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class KVWriteLoc:
    def __init__(self, loc: torch.Tensor, swa_loc: torch.Tensor | None = None) -> None:
        self.loc, self.swa_loc = loc, swa_loc

    @classmethod
    def for_layer(cls, forward_batch: Any, layer: Any, *, swa_loc: torch.Tensor | None = None) -> "KVWriteLoc":
        return cls(forward_batch.out_cache_loc, swa_loc)


class Pool:
    """Rows (slots, heads, d) of one layer; FP8 is stored divided by its scale."""

    def __init__(self, slots: int, heads: int, d: int, dtype: torch.dtype) -> None:
        self.k, self.v = (torch.zeros(slots, heads, d, dtype=dtype, device="cpu") for _ in "kv")

    def set_kv_buffer(self, layer: Any, where: KVWriteLoc, k: Any, v: Any, k_scale: Any, v_scale: Any) -> None:
        for rows, new, scale in ((self.k, k, k_scale), (self.v, v, v_scale)):
            rows[where.loc] = (new if scale is None else new / scale).to(rows.dtype)


class FlashAttentionBackend:
    """The attributes that SGLang's class has and the adapter reads; its own attention is a word."""

    def __init__(self, runner: Any) -> None:
        self.token_to_kv_pool, self.page_size, self.kv_cache_dtype = runner.pool, runner.page_size, runner.pool.k.dtype
        self.kv_cache_is_mxfp8 = self.use_sliding_window_kv_pool = False
        self.local_attn_builder, self.topk, self.forward_metadata = None, 0, runner.metadata

    def get_paged_mha_kv_cache(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self.token_to_kv_pool
        return tuple(t.view(-1, self.page_size, *t.shape[1:]) for t in (pool.k, pool.v))

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save: bool = True, **others: Any) -> Any:
        return ("FlashAttention", others)


class HookRegistry:
    hooks: list[tuple[str, Any, Any]] = []

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: Any) -> None:
        cls.hooks.append((target, hook, hook_type))


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Modules in the places of SGLang's, with what the plugin takes from them."""
    choices: list[str] = ["fa3"]
    backends: dict[str, Any] = {}
    members: dict[str, dict[str, Any]] = {
        "arg_groups.choices": {
            "ATTENTION_BACKEND_CHOICES": choices,
            "add_attention_backend_choices": choices.extend,
        },
        "layers.attention.attention_registry": {
            "register_attention_backend": lambda name: lambda make: backends.setdefault(name, make)
        },
        "layers.attention.flashattention_backend": {"FlashAttentionBackend": FlashAttentionBackend},
        "layers.radix_attention": {"AttentionType": AttentionType},
        "mem_cache.memory_pool": {"KVWriteLoc": KVWriteLoc},
        "plugins.hook_registry": {
            "HookRegistry": HookRegistry,
            "HookType": types.SimpleNamespace(AROUND="around"),
        },
    }
    for name, inside in members.items():
        path = f"sglang.srt.{name}".split(".")
        for end in range(1, len(path) + 1):
            full = ".".join(path[:end])
            if not isinstance(sys.modules.get(full), Standin):
                monkeypatch.setitem(sys.modules, full, Standin(full))
        for member, value in inside.items():
            setattr(sys.modules[".".join(path)], member, value)
    monkeypatch.setattr(HookRegistry, "hooks", [])
    monkeypatch.delitem(sys.modules, "cute_kernels.integrations.sglang_gqa", raising=False)
    yield types.SimpleNamespace(choices=choices, backends=backends)
    sys.modules.pop("cute_kernels.integrations.sglang_gqa", None)


class Standin(types.ModuleType):
    """A module that is none of SGLang's, and a package."""

    __path__: list[str] = []


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(plugin, "say_once", lines.append)
    return lines


def test_the_plugin_registers_once(sglang: types.SimpleNamespace) -> None:
    for _ in range(2):
        plugin.register()
    assert HookRegistry.hooks == [(plugin.SPARSE_MLA, plugin.sparse_mla, "around")]
    assert sglang.choices == ["fa3", "cute"] and list(sglang.backends) == ["cute"]


def test_the_entry_point_names_the_function() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'entry-points\."sglang\.srt\.plugins"\]\ncute_kernels = "([^"]+)"', text)[1] == (  # type: ignore[index]
        f"{plugin.register.__module__}:{plugin.register.__name__}"
    )


# ---- sparse MLA


def sparse_backend(**changes: Any) -> Any:
    facts = {
        "dsa_kv_cache_store_fp8": True, "flashmla_kv_format": "V32", "kv_cache_dim": 656, "physical_page_size": 64
    }  # fmt: skip
    return types.SimpleNamespace(**{**facts, **changes})


def sparse_call(tokens: int = 3, heads: int = HEADS) -> dict[str, Any]:
    """Arguments as SGLang's forward_decode passes them: by name, and the cache as rows of a pool."""
    generator = torch.Generator("cpu").manual_seed(1)
    latents = torch.randn(128, 576, generator=generator, dtype=torch.float32, device="cpu").bfloat16()
    rows = fp8_mla.pack(latents).view(128, 1, 656).view(torch.float8_e4m3fn)
    slots = torch.randint(-1, 128, (tokens, TOPK), generator=generator, dtype=torch.int32, device="cpu")
    q = torch.randn(tokens, heads * 576, generator=generator, dtype=torch.float32, device="cpu").bfloat16()
    return {
        "q_all": q,
        "kv_cache": rows,
        "v_head_dim": 512,
        "sm_scale": 0.1,
        "layer": types.SimpleNamespace(tp_q_head_num=heads, head_dim=576),
        "metadata": None,
        "page_table_1": slots,
    }


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


@pytest.mark.parametrize("sm90, word", [(True, None), (False, "need an SM90")])
def test_another_gpu_is_refused(sm90: bool, word: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "is_sm90", lambda device: sm90)
    reason = plugin.device_refusal(torch.device("cuda", 0))
    assert reason is None if word is None else re.search(word, reason or "")


# ---- the backend "cute"


class Case:
    """Two requests over a paged pool, and the backend for them."""

    def __init__(self, sglang: types.SimpleNamespace, d: int = 64, fp8: bool = False) -> None:
        plugin.register()
        generator = torch.Generator("cpu").manual_seed(2)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").bfloat16()

        self.pool = Pool(8 * 16, 2, d, torch.float8_e4m3fn if fp8 else torch.bfloat16)
        for rows in (self.pool.k, self.pool.v):
            rows.copy_(draw(*rows.shape))
        self.lengths = torch.tensor([33, 60], dtype=torch.int32, device="cpu")
        # a server's table is as wide as its longest context; rows of a batch are a part of it
        self.table = torch.full((4, 6), -1, dtype=torch.int32, device="cpu")[:2]
        self.table[0, :3], self.table[1, :4] = torch.tensor([5, 0, 2]), torch.tensor([1, 7, 3, 4])
        self.metadata = types.SimpleNamespace(
            cache_seqlens_int32=self.lengths, page_table=self.table, swa_page_table=None, pa_swa_page_table=None,
            max_seq_len_q=1, swa_out_cache_loc=None,
        )  # fmt: skip
        runner = types.SimpleNamespace(use_mla_backend=False, pool=self.pool, page_size=16, metadata=self.metadata)
        self.backend = sglang.backends["cute"](runner)
        scale = torch.tensor(0.5, dtype=torch.float32, device="cpu") if fp8 else None
        self.layer = types.SimpleNamespace(
            tp_q_head_num=8, head_dim=d, v_head_dim=d, scaling=0.2, logit_cap=0.0, sliding_window_size=-1,
            is_cross_attention=False, attn_type=AttentionType.DECODER, use_irope=False, k_scale=scale, v_scale=scale,
        )  # fmt: skip
        last = self.lengths - 1
        slots = self.table.gather(1, (last // 16).long().unsqueeze(1)).squeeze(1) * 16 + last % 16
        self.batch = types.SimpleNamespace(out_cache_loc=slots.long(), spec_info=None, _attn_output=None)
        self.q, self.k, self.v = draw(2, 8 * d), draw(2, 2, d), draw(2, 2, d)

    def decode(self, **others: Any) -> Any:
        return self.backend.forward_decode(self.q, self.k, self.v, self.layer, self.batch, **others)

    def expected(self, **options: Any) -> torch.Tensor:
        """float64 attention of each request over its own tokens, gathered by hand."""
        scale = 1.0 if self.layer.k_scale is None else 0.5
        outs = []
        for n, length in enumerate(self.lengths.tolist()):
            place = torch.arange(length, dtype=torch.int64, device="cpu")
            slots = self.table[n].long()[place // 16] * 16 + place % 16
            k, v = (t[slots].double().transpose(0, 1).unsqueeze(0) * scale for t in (self.pool.k, self.pool.v))
            q = self.q[n].double().view(1, 1, 8, -1).transpose(1, 2)
            scores = q @ k.repeat_interleave(4, 1).transpose(2, 3) * 0.2
            if "softcap" in options:
                scores = options["softcap"] * torch.tanh(scores / options["softcap"])
            if "window" in options:
                scores[..., : length - options["window"]] = -torch.inf
            weights = scores.exp()
            total = weights.sum(-1, keepdim=True)
            if "sinks" in options:
                total = total + options["sinks"].double().exp().view(1, 8, 1, 1)
            outs.append((weights / total @ v.repeat_interleave(4, 1)).reshape(-1))
        return torch.stack(outs)


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
        ("", {"q_rope": torch.zeros(1), "k_rope": None}, "q_rope:"),
    ],
)
def test_what_no_kernel_takes_stays_with_flash_attention(
    change: str, others: dict[str, Any], word: str, sglang: types.SimpleNamespace, said: list[str]
) -> None:
    case = Case(sglang)
    exec(change, {"case": case, "torch": torch, "types": types, "AttentionType": AttentionType})
    before = case.pool.k.clone()
    assert case.decode(**others) == ("FlashAttention", {"sinks": None, **others})
    assert torch.equal(case.pool.k, before), "who attends stores"
    assert len(said) == 1 and word in said[0]


def test_latent_attention_has_no_such_backend(sglang: types.SimpleNamespace) -> None:
    plugin.register()
    with pytest.raises(ValueError, match='needs "dsa"'):
        sglang.backends["cute"](types.SimpleNamespace(use_mla_backend=True))


def test_pages_agree_with_rows_of_a_contiguous_cache(sglang: types.SimpleNamespace) -> None:
    """The oracle above against the op over the same tokens without pages."""
    case = Case(sglang)
    case.decode()
    slots = (case.table[0, :3].long().unsqueeze(1) * 16 + torch.arange(16, device="cpu")).reshape(1, -1)[:, :33]
    k, v = case.pool.k[slots], case.pool.v[slots]
    out = gqa_decode(case.q[:1].view(1, 1, 8, -1), k, v, layout="BSNH", softmax_scale=0.2)
    close(out.reshape(1, -1), case.expected()[:1])  # type: ignore[union-attr]


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
    (f"{ATTENTION}/attention_registry.py", "register_attention_backend"): ("name",),
    ("srt/plugins/hook_registry.py", "HookRegistry.register"): ("cls", "target", "hook", "hook_type", "source"),
    ("srt/mem_cache/memory_pool.py", "MHATokenToKVPool.set_kv_buffer"): (
        "self", "layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale", "layer_id_override", "dcp_kv_mask"
    ),
    ("srt/mem_cache/memory_pool.py", "KVWriteLoc.for_layer"): ("cls", "forward_batch", "layer", "swa_loc", "full_loc"),
}  # fmt: skip
NAMES = {
    f"{ATTENTION}/dsa_backend.py": (
        "self.dsa_kv_cache_store_fp8", "self.flashmla_kv_format", "self.kv_cache_dim", "self.physical_page_size"
    ),
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
    "srt/arg_groups/choices.py": ("ATTENTION_BACKEND_CHOICES", "add_attention_backend_choices"),
    "srt/model_executor/forward_batch_info.py": ("out_cache_loc", "spec_info", "_attn_output"),
}  # fmt: skip
"""What each file assigns or declares."""


def functions(tree: ast.Module) -> dict[str, tuple[str, ...]]:
    """Arguments of each function of a module and of its classes, by name; those after * included."""
    owners = [("", tree), *((f"{node.name}.", node) for node in tree.body if isinstance(node, ast.ClassDef))]
    return {
        f"{prefix}{node.name}": tuple(a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))
        for prefix, owner in owners
        for node in owner.body  # type: ignore[attr-defined]
        if isinstance(node, ast.FunctionDef)
    }


def assigned(tree: ast.Module) -> set[str]:
    """Everything that a module assigns or declares, as it is written."""
    found = set()
    for node in ast.walk(tree):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        found |= {ast.unparse(part) for target in targets for part in getattr(target, "elts", [target])}
    return found


def moved(package: Path) -> list[str]:
    """In words, each name or argument of SGLang that is not where the plugin looks for it."""
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


def test_an_installed_sglang_has_what_the_plugin_reads() -> None:
    if (found := importlib.util.find_spec("sglang")) is None or not found.submodule_search_locations:
        pytest.skip("SGLang is not installed")
    package = Path(next(iter(found.submodule_search_locations)))
    if not (package / "srt").is_dir():
        pytest.skip("SGLang is not installed")
    version = importlib.metadata.version("sglang")
    assert moved(package) == [], f"SGLang {version} is not what cute_kernels.integrations.sglang was written against"


def test_a_moved_argument_is_named() -> None:
    tree = ast.parse("class A:\n    limit: int = 0\n\n    def f(self, q, *, scale):\n        self.page = q\n")
    assert functions(tree) == {"A.f": ("self", "q", "scale")}
    assert assigned(tree) == {"limit", "self.page"}
