"""Context parallelism: one context on several GPUs, over a torch.distributed group.

    from cute_kernels.distributed import context_parallel_decode      # a decode op over all ranks' keys
    from cute_kernels.distributed import context_parallel_prefill     # sink_attention, earlier tokens split over ranks
    from cute_kernels.distributed import context_parallel_sink_attention  # training: each rank has a part of a sequence
    from cute_kernels.distributed import shard_lengths, shard_slots, shard_block_table, shard_indices  # who keeps what

Nothing else in the package imports this one: a program that runs on one GPU never loads it.
"""

from cute_kernels.distributed.decode import context_parallel_decode
from cute_kernels.distributed.prefill import context_parallel_prefill
from cute_kernels.distributed.shards import shard_block_table, shard_indices, shard_lengths, shard_slots
from cute_kernels.distributed.training import context_parallel_sink_attention

__all__ = [
    "context_parallel_decode",
    "context_parallel_prefill",
    "context_parallel_sink_attention",
    "shard_block_table",
    "shard_indices",
    "shard_lengths",
    "shard_slots",
]
