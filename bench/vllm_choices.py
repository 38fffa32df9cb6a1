"""Which keys the indexer of DeepSeek-V3.2 or GLM-5 chose in an eager engine of vLLM, kept and given to another engine.

Two engines whose attention differs in rounding have slightly different index scores in later layers. Where two keys
near the end of the top-k have almost the same score, they choose different keys, and a token may differ for that alone.
An engine that is given the choices of the other has no such excuse.
"""

from __future__ import annotations

import pathlib
import pickle
from typing import Any, Final

MODULE: Final = "Indexer"
"""Class of vLLM's module that fills a layer's `topk_indices_buffer`, rows of positions in a request, -1 behind them."""
NAMED_BY: Final = 64
"""The first tokens of a prompt, which tell requests apart."""

Chosen = dict[tuple[str, int, tuple[int, ...]], Any]
"""By layer, position and request: the positions of the keys, ascending int32."""


def keep(worker: Any, beyond: int) -> None:
    """From now on a worker keeps the last choices of all tokens at positions from `beyond` on, until they are settled.

    A request that is led goes on behind a token that the engine did not say, and the engine computes some tokens again,
    in a prompt: their scores differ in rounding from those that the engine's own token came from. They see the keys of
    the first time again, as they do in an engine that is given them.
    """
    found: Chosen = {}
    worker.chosen, worker.settled = found, {}

    def hook(module: Any, *_: Any) -> None:
        for key, row in _rows(worker.model_runner, module, beyond):
            if key[1] > worker.settled.get(key[2], -1):
                found[key] = row.sort().values.cpu()
            else:
                row.copy_(found[key])

    _hook(worker, hook)


def settle(worker: Any, prompt: list[int], last: int) -> None:
    """The choices of a request up to position `last` stay what they are."""
    request = tuple(prompt[:NAMED_BY])
    worker.settled[request] = max(last, worker.settled.get(request, -1))


def take(worker: Any, file: str, beyond: int) -> None:
    """From now on all tokens at positions from `beyond` on see the keys that are chosen in a file of `write`."""
    given: Chosen = pickle.loads(pathlib.Path(file).read_bytes())
    worker.taken = 0

    def hook(module: Any, *_: Any) -> None:
        for key, row in _rows(worker.model_runner, module, beyond):
            row.copy_(given[key])
            worker.taken += 1

    _hook(worker, hook)


def write(worker: Any, file: str) -> int:
    """Writes what `keep` has kept; how many choices."""
    pathlib.Path(file).write_bytes(pickle.dumps(worker.chosen))
    return len(worker.chosen)


def taken(worker: Any) -> int:
    """How many choices of the file were taken."""
    count: int = worker.taken
    return count


def _hook(worker: Any, hook: Any) -> None:
    modules = [m for m in worker.model_runner.get_model().modules() if type(m).__name__ == MODULE]
    if not modules:
        raise RuntimeError(f"the model has no {MODULE}")
    for module in modules:
        module.register_forward_hook(hook)


def _rows(runner: Any, module: Any, beyond: int) -> list[tuple[tuple[str, int, tuple[int, ...]], Any]]:
    """The key of `Chosen` and the row of the buffer of each token of a step at a position from `beyond` on."""
    batch, starts, found = runner.input_batch, runner.query_start_loc.np, []
    for i, name in enumerate(batch.req_ids):
        request = tuple(runner.requests[name].prompt_token_ids[:NAMED_BY])
        first, begin = int(batch.num_computed_tokens_cpu[i]), int(starts[i])
        for j in range(max(0, beyond - first), int(starts[i + 1]) - begin):
            found.append(((module.prefix, first + j, request), module.topk_indices_buffer[begin + j]))
    return found
