"""vLLM's engine on a CPU without its compiled extension: `python -m tests.kit.vllm_engine JOB RESULT`.

The platform below chooses attention backends as on an SM90 GPU; the few compiled operators that a CPU worker calls are
plain torch. JOB is a list of engines, RESULT a list of what each request of each of them generated.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
    VLLM_USE_V2_MODEL_RUNNER="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_HOST_IP="127.0.0.1",
    VLLM_LOOPBACK_IP="127.0.0.1",
    HF_HUB_OFFLINE="1",
)

import torch
import vllm.platforms
import vllm.utils.torch_utils
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from cute_kernels.integrations import vllm as cute_vllm


class Sm90OnCpu(CpuPlatform):
    """A CPU for which vLLM chooses the backends of an H100."""

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None) -> str:
        backend = (selected_backend or AttentionBackendEnum.CUSTOM).get_class()
        wrong = backend.validate_configuration(
            device_capability=DeviceCapability(9, 0), **attn_selector_config._asdict()
        )
        if wrong:
            raise ValueError("; ".join(wrong))
        return f"{backend.__module__}.{backend.__qualname__}"

    @classmethod
    def import_kernels(cls) -> None:
        """There are no kernels to import."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        super().check_and_update_config(vllm_config)
        vllm_config.parallel_config.worker_cls = f"{define_operators.__module__}.PlainWorker"
        vllm_config.parallel_config.distributed_executor_backend = "uni"


vllm.platforms._current_platform = Sm90OnCpu()
vllm.utils.torch_utils.PIN_MEMORY = False

_LIBRARY = torch.library.Library("_C", "FRAGMENT")


def slots(starts: Any, positions: Any, table: Any, out: torch.Tensor, block_size: int) -> None:
    """The slot of each token; -1 for padding."""
    out.fill_(-1)
    ends = starts.tolist()
    for request, (first, last) in enumerate(zip(ends, ends[1:], strict=False)):
        position = positions[first:last].long()
        page = table[request][position // block_size].to(out.dtype)
        out[first:last] = page * block_size + position % block_size


def accept_greedily(
    out: torch.Tensor, ends: Any, drafts: Any, best: Any, bonus: Any, is_greedy: Any, most: int
) -> None:
    """Accepts drafts of speculation: the best tokens up to the first wrong draft, and one more token."""
    first, flat = 0, out.view(-1, most + 1)
    for request, last in enumerate(ends.tolist()):
        row = flat[request]
        right = (drafts[first:last] == best[first:last]).int().cumprod(0).sum().item()
        kept = min(right + 1, last - first)
        row[:kept] = best[first : first + kept]
        if right == last - first:
            row[kept] = bonus.view(-1)[request]
        first = last


def expand(out: torch.Tensor, value: Any, ends: Any, replace_from: int, replace_to: int) -> None:
    """Repeats each request's value for each of its tokens."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    out.copy_(torch.where(value == replace_from, replace_to, value).repeat_interleave(counts))


def define_operators() -> None:
    """Defines the compiled operators that a worker on a CPU calls. Those of layers exist but are not called."""
    operators: dict[str, tuple[str, Any]] = {
        "init_cpu_memory_env": ("(int[] nodes) -> ()", lambda nodes: None),
        "compute_slot_mapping_kernel_impl": (
            "(Tensor starts, Tensor positions, Tensor table, Tensor! out, int block_size) -> ()",
            slots,
        ),
        "rejection_greedy_sample_kernel_impl": (
            "(Tensor! out, Tensor ends, Tensor drafts, Tensor best, Tensor bonus, Tensor? greedy, int most) -> ()",
            accept_greedily,
        ),
        "expand_kernel_impl": ("(Tensor! out, Tensor value, Tensor ends, int replace_from, int to) -> ()", expand),
        # vLLM samples at random where it measures memory; greedy requests do not
        "rejection_random_sample_kernel_impl": (
            "(Tensor! out, Tensor ends, Tensor drafts, Tensor? p, Tensor q, Tensor bonus, Tensor recovered, Tensor u, "
            "Tensor? greedy, int most, int vocabulary, bool no_p) -> ()",
            lambda *arguments: None,
        ),
        "sample_recovered_tokens_kernel_impl": (
            "(Tensor! out, Tensor ends, Tensor drafts, Tensor? p, Tensor q, Tensor u, int vocabulary, bool no_p) -> ()",
            lambda *arguments: None,
        ),
        "greedy_argmax": ("(Tensor logits) -> Tensor", lambda logits: logits.argmax(-1)),  # 0.33
        "silu_and_mul": ("(Tensor! out, Tensor x) -> ()", None),
        "rms_norm": ("(Tensor! out, Tensor x, Tensor w, float eps) -> ()", None),
        "fused_add_rms_norm": ("(Tensor! x, Tensor! r, Tensor w, float eps) -> ()", None),
        "rotary_embedding": ("(Tensor p, Tensor! q, Tensor? k, int size, Tensor c, bool neox) -> ()", None),
    }
    for name, (schema, function) in operators.items():
        _LIBRARY.define(name + schema)
        if function is not None:
            _LIBRARY.impl(name, function, "CompositeExplicitAutograd")


define_operators()

from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: E402 - it looks for operators when it is imported

from cute_kernels.integrations.vllm import gqa, prompts  # noqa: E402
from tests.kit.flash_stand_in import FlashStandIn  # noqa: E402


class PlainWorker(CPUWorker):
    """Named by the platform, so that this module is imported in the process of the worker."""


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Runs an engine. A job has its options, rounds of prompts as lists of tokens, and how many tokens to generate.

    With "flash" prompts run as on a GPU, with plain torch in the place of FlashAttention.
    """
    with mock.patch.object(gqa, "_flash_attention", lambda *a: FlashStandIn() if job.get("flash") else None):
        with mock.patch.object(prompts, "FEW", 6):  # these prompts have small chunks
            return _run(job)


def _run(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    options = {
        "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 512, "block_size": 16, "seed": 0,
        "max_num_batched_tokens": 64, "compilation_config": {"custom_ops": ["none"]}, "max_logprobs": -1,
        "attention_config": {"backend": "CUSTOM"},
    }  # fmt: skip
    llm = LLM(**{**options, **job["options"]})
    sampling = SamplingParams(
        max_tokens=job["tokens"], temperature=0, ignore_eos=True, detokenize=False, logprobs=job["logprobs"]
    )
    requests: list[dict[str, Any]] = []
    for round_of_prompts in job["rounds"]:
        for output in llm.generate([{"prompt_token_ids": p} for p in round_of_prompts], sampling, use_tqdm=False):
            done = output.outputs[0]
            scores = [{str(t): e.logprob for t, e in step.items()} for step in done.logprobs or []]
            requests.append(
                {"tokens": list(done.token_ids), "logprobs": scores, "cached": output.num_cached_tokens}
            )  # fmt: skip
    found = {"requests": requests, "calls": dict(CALLS), "query_tokens": dict(QUERY_TOKENS)}
    CALLS.clear()
    QUERY_TOKENS.clear()
    del llm
    cleanup_dist_env_and_memory()
    return found


CALLS: dict[str, int] = {}
"""Number of calls of each method of `GqaCalls` by the layers."""
QUERY_TOKENS: dict[str, int] = {}
"""Number of calls of `GqaCalls.decode` by query tokens per request."""


def count_calls() -> None:
    from cute_kernels.integrations.vllm.calls import GqaCalls

    def counted(name: str, method: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            CALLS[name] = CALLS.get(name, 0) + 1
            if name == "decode":
                query, _, seq_lens = args[:3]
                tokens = str(query.shape[0] // seq_lens.shape[0])
                QUERY_TOKENS[tokens] = QUERY_TOKENS.get(tokens, 0) + 1
            return method(self, *args, **kwargs)

        return call

    for name in ("append_scaled", "append_plain", "decode", "flash_attend", "prefill_fresh", "prefill_in_pieces"):
        setattr(GqaCalls, name, counted(name, getattr(GqaCalls, name)))


def main() -> None:
    torch.set_num_threads(1)
    cute_vllm.register()
    count_calls()
    jobs = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([run(job) for job in jobs]))


if __name__ == "__main__":
    main()
