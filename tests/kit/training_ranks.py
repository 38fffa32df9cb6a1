"""Tasks of ranks that train together; `tests.kit.context_workers` runs them in processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.kit import packed_training


def fully_sharded(rank: int) -> list[tuple[str, Any]]:
    """By parameter, what FSDP2's gradient of a small gpt-oss is off by, relative to one process with all batches.

    Each rank has a batch of another kind, so that packing is found on each rank by itself.
    """
    from torch.distributed.fsdp import fully_shard

    import cute_kernels.integrations.transformers  # noqa: F401  registers "cute"

    world_size, kinds = dist.get_world_size(), ("positions", "right", "kwargs", "left")
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    whole, sharded = (packed_training.model("gpt_oss").to(device) for _ in range(2))
    for model in (whole, sharded):
        model.set_attn_implementation("cute")
    expected: dict[str, torch.Tensor] = {}
    for kind in kinds[:world_size]:
        found = packed_training.gradients(whole, packed_training.batch(kind, device)).of
        expected = {name: expected.get(name, 0) + gradient / world_size for name, gradient in found.items()}
    for layer in sharded.model.layers:
        fully_shard(layer)
    fully_shard(sharded)
    batch = packed_training.batch(kinds[rank], device)
    logits = sharded(**batch.inputs, use_cache=False).logits
    packed_training.loss_of(logits, batch).backward()
    off = {}
    for name, parameter in sharded.named_parameters():
        gradient = parameter.grad.full_tensor().float()
        off[name] = ((gradient - expected[name]).norm() / expected[name].norm()).item()
    return [("off", off)]
