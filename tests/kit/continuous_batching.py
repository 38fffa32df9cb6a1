"""Continuous batching of transformers over the copy of this package for the kernels hub; run as a program.

    python -m tests.kit.continuous_batching llama cpu HUB_NAME

`LOCAL_KERNELS` says where the copy is. Prints a line of JSON: "wrong", the tokens of each request that are not those
that the model has learned, by the length of its prompt; and "calls" of FlashAttention's functions, each "pages" or
"packed". It fails where a request was not answered: transformers has logged why.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.kit import tiny_models

ROOT = Path(__file__).resolve().parents[2]
NAMES = {"llama": "cute-kernels/flash-attn3", "gpt_oss": "kernels-community/vllm-flash-attn3"}
"""Names on the kernels hub. Transformers accepts only this one for gpt-oss."""
LENGTHS = (5, 12, 30, 40, 3, 25)
NEW = 24


def serve(model_name: str, device: str, hub_name: str) -> dict[str, Any]:
    """Runs the requests and reports what came out. On a CPU, steps are padded and decoded over pages as on a GPU."""
    import torch
    import transformers.modeling_flash_attention_utils as flash
    from transformers import ContinuousBatchingConfig, GenerationConfig

    if device == "cpu":
        _take_steps_of_a_gpu()
    else:
        _order_inputs()
    model = tiny_models.trained(model_name).to(torch.bfloat16).to(device)
    model.set_attn_implementation(f"paged|{hub_name}", allow_all_kernels=True)
    calls: Counter[str] = Counter()

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return call

    flash._flash_varlen_fn = counted("packed", flash._flash_varlen_fn)
    flash._flash_with_kvcache_fn = counted("pages", flash._flash_with_kvcache_fn)
    prompts = [tiny_models.sequences(50 + n, 1, n)[0].tolist() for n in LENGTHS]
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # the default cache takes most of the memory, and the first steps would read all of it
    batching = ContinuousBatchingConfig(block_size=16, num_blocks=64, max_batch_tokens=128)
    found = model.generate_batch(
        prompts, generation_config=config, continuous_batching_config=batching, progress_bar=False
    )
    errors = [repr(output.error) for output in found.values() if output.error is not None]
    if errors or len(found) < len(prompts):
        raise RuntimeError(f"transformers answered {len(found) - len(errors)} of {len(prompts)} requests: {errors}")
    got = {tuple(output.prompt_ids): list(output.generated_tokens) for output in found.values()}
    answers = {tuple(prompt): got.get(tuple(prompt)) for prompt in prompts}
    wrong = {
        len(prompt): tokens for prompt, tokens in answers.items() if tokens != tiny_models.counted_on(list(prompt), NEW)
    }
    return {"wrong": wrong, "calls": dict(calls)}


def _order_inputs() -> None:
    """Makes transformers wait until its inputs are cleared before it copies the first ones.

    5.17 to 5.24 clear them on the default stream and copy on another. A GPU that also runs three other programs cleared
    the copies: 45 of 57 runs gave wrong tokens with attention in plain torch, none of 22 without asynchronous batching.
    """
    import torch
    from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs

    reset: Any = ContinuousBatchingIOs.reset

    def reset_and_wait(self: Any) -> None:
        reset(self)
        torch.cuda.synchronize()

    ContinuousBatchingIOs.reset = reset_and_wait


def _take_steps_of_a_gpu() -> None:
    from transformers.generation.continuous_batching import initialization, model_runner

    runner: Any = model_runner.ModelRunner
    make = runner.__init__

    def make_padding(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.pad_inputs = True

    def allow_pages(config: Any, batching: Any, asked: bool) -> None:
        batching.max_blocks_per_request = batching.max_blocks_per_request or 8

    runner.__init__ = make_padding
    initialization.ensure_decode_fast_path_is_available = allow_pages


def needs_kernels() -> pytest.MarkDecorator:
    """The mark of tests for which transformers must load kernels by a hub name."""
    if not find_spec("kernels") or not find_spec("transformers"):
        return pytest.mark.skip("needs transformers, and Hugging Face's kernels: make test-vllm")
    from transformers.utils import is_kernels_available

    reason = "needs the version of Hugging Face's kernels that transformers takes"
    return pytest.mark.skipif(not is_kernels_available(), reason=reason)


def served(model_name: str, device: str, folder: Path) -> dict[str, Any]:
    """Runs `serve` in a process of its own, with the kernel copy in `folder` / "kernel"."""
    name = NAMES[model_name]
    local = {"LOCAL_KERNELS": f"{name}={folder / 'kernel'}", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder)}
    command = [sys.executable, "-m", __name__, model_name, device, name]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **local}, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        raise AssertionError(done.stderr[-4000:])
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


if __name__ == "__main__":
    print(json.dumps(serve(*sys.argv[1:])))
