"""Stand-ins for SGLang 0.5.23's objects that its plugin reads and calls, so that the plugin runs without SGLang."""

import contextlib
import functools
import sys
import types
from collections.abc import Iterator
from enum import Enum
from typing import Any

import pytest
import torch

import fp8_mla
from cute_kernels.integrations import sglang as plugin
from tests.kit.draws import integers, normal

HEADS, TOPK = 16, 32


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
    """A pool with rows (slots, heads, d) of one layer. FP8 values are stored divided by their scale."""

    def __init__(self, slots: int, heads: int, d: int, dtype: torch.dtype, device: str) -> None:
        self.k, self.v = (torch.zeros(slots, heads, d, dtype=dtype, device=device) for _ in "kv")

    def set_kv_buffer(self, layer: Any, where: KVWriteLoc, k: Any, v: Any, k_scale: Any, v_scale: Any) -> None:
        for rows, new, scale in ((self.k, k, k_scale), (self.v, v, v_scale)):
            rows[where.loc] = (new if scale is None else new / scale).to(rows.dtype)


class FlashAttentionBackend:
    """The attributes of SGLang's class that the adapter reads. Its own attention returns a word."""

    def __init__(self, runner: Any) -> None:
        self.token_to_kv_pool, self.page_size, self.kv_cache_dtype = runner.pool, runner.page_size, runner.pool.k.dtype
        self.kv_cache_is_mxfp8 = self.use_sliding_window_kv_pool = False
        self.local_attn_builder, self.topk, self.forward_metadata = None, 0, runner.metadata

    def get_paged_mha_kv_cache(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self.token_to_kv_pool
        return tuple(t.view(-1, self.page_size, *t.shape[1:]) for t in (pool.k, pool.v))

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save: bool = True, **others: Any) -> Any:
        return ("FlashAttention", others)


class DeepseekV4AttnBackend:
    """What the plugin reads of SGLang's class, and the class's call of FlashMLA by a partial. FlashMLA is a record."""

    def __init__(self, case: Any = None) -> None:
        self.case, self.asked = case, list[dict[str, Any]]()
        self._flash_mla_with_kvcache = functools.partial(self.flash_mla, use_legacy=True)

    def flash_mla(self, **arguments: Any) -> tuple[Any, Any]:
        self.asked.append(arguments)
        return torch.zeros(1, 1, dtype=torch.float32, device="cpu"), None

    def forward(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self._forward_attention(q, k, v, layer, forward_batch, *args, **kwargs)

    def _forward_attention(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, compress_ratio: int, attn_sink: Any = None
    ) -> Any:
        case, pages = self.case, self.case.extra_kv_cache
        return self._flash_mla_with_kvcache(
            q=q.unsqueeze(1), k_cache=case.kv_cache.unsqueeze(2), head_dim_v=512, block_table=None,
            cache_seqlens=None, tile_scheduler_metadata=None, softmax_scale=case.softmax_scale, is_fp8_kvcache=True,
            indices=case.indices, topk_length=case.topk_length, attn_sink=attn_sink,
            extra_k_cache=None if pages is None else pages.unsqueeze(2),
            extra_indices_in_kvcache=case.extra_indices, extra_topk_length=case.extra_topk_length,
        )[0].squeeze(1)  # fmt: skip


class Standin(types.ModuleType):
    """A module that is not SGLang's; it is also a package."""

    __path__: list[str] = []


@contextlib.contextmanager
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """Installs stand-ins for the SGLang modules that the plugin imports, and yields `choices` and the like."""
    choices: list[str] = ["fa3"]
    deterministic, radix = ["fa3"], ["fa3"]
    modes = types.SimpleNamespace(enable_deterministic_inference=False)
    backends: dict[str, Any] = {}
    members: dict[str, dict[str, Any]] = {
        "arg_groups.choices": {
            "ATTENTION_BACKEND_CHOICES": choices,
            "add_attention_backend_choices": choices.extend,
            "add_deterministic_attention_backend_choices": deterministic.extend,
            "add_radix_supported_deterministic_attention_backend_choices": radix.extend,
        },
        "layers.attention.attention_registry": {
            "register_attention_backend": lambda name: lambda make: backends.setdefault(name, make)
        },
        "layers.attention.flashattention_backend": {"FlashAttentionBackend": FlashAttentionBackend},
        "layers.radix_attention": {"AttentionType": AttentionType},
        "mem_cache.memory_pool": {"KVWriteLoc": KVWriteLoc},
        "runtime_context": {"get_exec": lambda: types.SimpleNamespace(deterministic=modes)},
    }
    for name, inside in members.items():
        path = f"sglang.srt.{name}".split(".")
        for end in range(1, len(path) + 1):
            full = ".".join(path[:end])
            if not isinstance(sys.modules.get(full), Standin):
                monkeypatch.setitem(sys.modules, full, Standin(full))
        for member, value in inside.items():
            setattr(sys.modules[".".join(path)], member, value)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "cute_kernels.integrations.sglang_gqa", raising=False)
    yield types.SimpleNamespace(
        choices=choices, deterministic=deterministic, radix=radix, modes=modes, backends=backends
    )
    sys.modules.pop("cute_kernels.integrations.sglang_gqa", None)


# ---- calls


def sparse_backend(**changes: Any) -> Any:
    facts = {
        "dsa_kv_cache_store_fp8": True, "flashmla_kv_format": "V32", "kv_cache_dim": 656, "physical_page_size": 64
    }  # fmt: skip
    return types.SimpleNamespace(**{**facts, **changes})


def sparse_call(tokens: int = 3, heads: int = HEADS, device: str = "cpu") -> dict[str, Any]:
    """Arguments as SGLang's forward_decode passes them: keywords, and the cache as rows of a pool."""
    generator = torch.Generator("cpu").manual_seed(1)
    latents = normal((128, 576), generator).bfloat16()
    rows = fp8_mla.pack(latents).view(128, 1, 656).view(torch.float8_e4m3fn)
    slots = integers(-1, 128, (tokens, TOPK), generator, torch.int32)
    q = normal((tokens, heads * 576), generator).bfloat16()
    return {
        "q_all": q.to(device),
        "kv_cache": rows.to(device),
        "v_head_dim": 512,
        "sm_scale": 0.1,
        "layer": types.SimpleNamespace(tp_q_head_num=heads, head_dim=576),
        "metadata": None,
        "page_table_1": slots.to(device),
    }


class Case:
    """Two requests over a paged pool, and the backend that serves them."""

    def __init__(self, sglang: types.SimpleNamespace, d: int = 64, fp8: bool = False, device: str = "cpu") -> None:
        plugin.register()
        generator = torch.Generator("cpu").manual_seed(2)

        def draw(*shape: int) -> torch.Tensor:
            return normal(shape, generator).bfloat16().to(device)

        self.pool = Pool(8 * 16, 2, d, torch.float8_e4m3fn if fp8 else torch.bfloat16, device)
        for rows in (self.pool.k, self.pool.v):
            rows.copy_(draw(*rows.shape))
        self.lengths = torch.tensor([33, 60], dtype=torch.int32, device=device)
        # a server's table is as wide as its longest context; the rows of a batch are a part of it
        pages = [[5, 0, 2, -1, -1, -1], [1, 7, 3, 4, -1, -1]]
        self.table = torch.tensor([*pages, *pages], dtype=torch.int32, device=device)[:2]
        self.metadata = types.SimpleNamespace(
            cache_seqlens_int32=self.lengths, page_table=self.table, swa_page_table=None, pa_swa_page_table=None,
            max_seq_len_q=1, swa_out_cache_loc=None,
        )  # fmt: skip
        runner = types.SimpleNamespace(use_mla_backend=False, pool=self.pool, page_size=16, metadata=self.metadata)
        self.backend = sglang.backends["cute"](runner)
        scale = torch.tensor(0.5, dtype=torch.float32, device=device) if fp8 else None
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
        scale = 1.0 if self.layer.k_scale is None else 0.5
        outs = []
        for n, length in enumerate(self.lengths.tolist()):
            place = torch.arange(length, dtype=torch.int64, device=self.table.device)
            slots = self.table[n].long()[place // 16] * 16 + place % 16
            k, v = (t.float()[slots].double().transpose(0, 1).unsqueeze(0) * scale for t in (self.pool.k, self.pool.v))
            q = self.q[n].double().view(1, 1, 8, -1).transpose(1, 2)
            scores = q @ k.repeat_interleave(4, 1).transpose(2, 3) * 0.2
            if "softcap" in options:
                scores = options["softcap"] * torch.tanh(scores / options["softcap"])
            if "window" in options:
                scores[..., : max(length - options["window"], 0)] = -torch.inf
            weights = scores.exp()
            total = weights.sum(-1, keepdim=True)
            if "sinks" in options:
                total = total + options["sinks"].double().exp().view(1, 8, 1, 1)
            outs.append((weights / total @ v.repeat_interleave(4, 1)).reshape(-1))
        return torch.stack(outs)
