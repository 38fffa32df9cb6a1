"""vLLM's classes of a saved model and its drafting layer on a CPU: `python -m tests.kit.vllm_load FOLDER STORE`.

The models are DeepSeek-V3.2 and GLM-5. Their classes are made and load the checkpoint's weights, as in an engine, and
nothing is computed. vLLM raises an error if a weight has no parameter, or a parameter no weight.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import vllm.v1.attention.backends.fa_utils as fa_utils

from tests.kit.vllm_engine import Sm90OnCpu

fa_utils.compile_flash_attn_varlen_func_from_specs = None  # names that a CPU lacks and the next import needs

import vllm.v1.attention.backends.mla.prefill.flash_attn as prefill  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.model_loader import get_model_loader  # noqa: E402
from vllm.model_executor.model_loader.utils import initialize_model  # noqa: E402
from vllm.v1.worker.workspace import init_workspace_manager  # noqa: E402


def _sparse(*args: Any, **kwargs: Any) -> str:
    return "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"


def main() -> None:
    Sm90OnCpu.get_attn_backend_cls = staticmethod(_sparse)  # type: ignore[method-assign]
    prefill.flash_attn_varlen_func = lambda *args, **kwargs: None
    folder, store = sys.argv[1:]
    config = EngineArgs(
        model=folder, skip_tokenizer_init=True, kv_cache_dtype="fp8", max_model_len=4096, block_size=64,
        dtype="bfloat16", enforce_eager=True, compilation_config={"custom_ops": ["none"]},
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
    ).create_engine_config()  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    init_workspace_manager(torch.device("cpu"))
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        initialize_model_parallel(1, 1)
        for model_config in (config.model_config, config.speculative_config.draft_model_config):
            model = initialize_model(config, model_config=model_config)
            get_model_loader(config.load_config).load_weights(model, model_config)
            print(f"loaded {type(model).__name__}")


if __name__ == "__main__":
    main()
