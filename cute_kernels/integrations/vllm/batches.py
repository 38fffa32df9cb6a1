"""The composition of a step's batch, from vLLM's metadata. Imports no vLLM."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from cute_kernels.integrations.vllm.prompts import Prompts


def counted(common: Any, decodes: int, tokens: int) -> int:
    """Returns how many of the first `decodes` requests have tokens, all as many; 0 if an empty one lies among them.

    A batch padded for a graph ends with requests without tokens. If a request has at most one, the host's borders are
    not read: with `--kv-sharing-fast-prefill` the GPU may still be writing them.
    """
    if not decodes or common.max_query_len <= 1:
        return tokens
    starts = common.query_start_loc_cpu[: decodes + 1].tolist()
    each, last = max(starts[1], 1), starts[-1]
    return tokens // each if starts[last // each] == last else 0


def without_decodes(common: Any, requests: int, tokens: int) -> Any:
    """Returns the batch without its first requests and tokens; cuts only what the Triton backend's builder reads."""
    upper = getattr(common, "seq_lens_cpu_upper_bound", None)
    return common.replace(
        query_start_loc=common.query_start_loc[requests:] - tokens,
        query_start_loc_cpu=common.query_start_loc_cpu[requests:] - tokens,
        seq_lens=common.seq_lens[requests:],
        seq_lens_cpu_upper_bound=None if upper is None else upper[requests:],
        num_reqs=common.num_reqs - requests,
        num_actual_tokens=common.num_actual_tokens - tokens,
        block_table_tensor=common.block_table_tensor[requests:],
        slot_mapping=common.slot_mapping[tokens:],
    )


def prompts_of(common: Any, alone: bool = False) -> Prompts | None:
    """Returns the requests of a batch, each `alone` or not; None if the host does not know their lengths."""
    lengths = getattr(common, "seq_lens_cpu_upper_bound", None)
    if lengths is None:
        return None
    requests = common.num_reqs
    return Prompts(
        starts=common.query_start_loc[: requests + 1],
        lengths=common.seq_lens[:requests],
        block_table=common.block_table_tensor[:requests],
        starts_host=common.query_start_loc_cpu[: requests + 1].tolist(),
        lengths_host=lengths[:requests].tolist(),
        alone=alone,
    )


def are_fresh(prompts: Prompts | None, tokens: int) -> bool:
    """Whether no request has keys before its new tokens, and there are `tokens` new tokens, none of them padding."""
    if prompts is None or prompts.starts_host[-1] != tokens:
        return False
    return [end - begin for begin, end in pairwise(prompts.starts_host)] == prompts.lengths_host
