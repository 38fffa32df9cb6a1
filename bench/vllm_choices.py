"""Records the keys that the indexer of DeepSeek-V3.2 or GLM-5 chose in an eager engine of vLLM, for another engine.

Two engines whose attention differs in rounding have slightly different index scores in later layers. If two keys near
the end of the top-k have almost the same score, they choose different keys, and a token may differ for that reason
alone. An engine that uses the other's choices has no such excuse.
"""

from __future__ import annotations

import importlib
import pathlib
import pickle
from collections.abc import Callable, Iterable
from typing import Any, Final

MODULES: Final = ("Indexer", "DeepseekV32Indexer")
"""Classes of vLLM's modules that fill a layer's `topk_indices_buffer`, rows of positions in a request, -1 behind them.

0.26 uses the first one, whose modules are called. In 0.33 the attention of `CALLER` calls `CHOOSES` instead.
"""
CALLER: Final = "vllm.models.deepseek_v32.attention"
CHOOSES: Final = "sparse_attn_indexer"
NAMED_BY: Final = 64
"""Number of first tokens of a prompt, which identify requests."""

Request = tuple[int, ...]
Steps = Callable[[], Iterable[tuple[Request, int, int, int]]]
"""For each request of a step: its name, the position of its first token, and its first and last row of the buffer."""
Chosen = dict[tuple[str, int, Request], Any]
"""By layer, position and request: the positions of the keys, ascending int32."""


def keep(worker: Any, beyond: int) -> None:
    """Makes a worker keep the last choices of all tokens at positions from `beyond` on, until they are settled.

    A request that is led continues after a token that the engine did not say, and the engine computes some tokens
    again, in a prompt: their scores differ in rounding from those that the engine's own token came from. They see the
    keys of the first time again, as they do in an engine that is given the choices.
    """
    found: Chosen = {}
    worker.chosen, worker.settled = found, {}

    def hook(module: Any, steps: Steps) -> None:
        for key, row in _rows(steps, module, beyond):
            if key[1] > worker.settled.get(key[2], -1):
                found[key] = row.sort().values.cpu()
            else:
                row.copy_(found[key])

    _hook(worker, hook)


def settle(worker: Any, prompt: list[int], last: int) -> None:
    """Settles the choices of a request up to position `last`: they do not change any more."""
    request = tuple(prompt[:NAMED_BY])
    worker.settled[request] = max(last, worker.settled.get(request, -1))


def take(worker: Any, file: str, beyond: int) -> None:
    """Makes all tokens at positions from `beyond` on see the keys that a file of `write` contains."""
    given: Chosen = pickle.loads(pathlib.Path(file).read_bytes())
    worker.taken = 0

    def hook(module: Any, steps: Steps) -> None:
        for key, row in _rows(steps, module, beyond):
            row.copy_(given[key])
            worker.taken += 1

    _hook(worker, hook)


def write(worker: Any, file: str) -> int:
    """Writes the choices of `keep`; returns their number."""
    pathlib.Path(file).write_bytes(pickle.dumps(worker.chosen))
    return len(worker.chosen)


def taken(worker: Any) -> int:
    """Returns how many choices of the file were used."""
    count: int = worker.taken
    return count


def _hook(worker: Any, hook: Callable[[Any, Steps], None]) -> None:
    """Calls `hook` after each choice of each layer, with the module and the step."""
    runner = worker.model_runner
    modules = [m for m in runner.get_model().modules() if type(m).__name__ in MODULES]
    if not modules:
        raise RuntimeError(f"the model has no {' or '.join(MODULES)}")
    if type(modules[0]).__name__ == MODULES[0]:
        for module in modules:
            module.register_forward_hook(lambda module, *_: hook(module, lambda: _steps_of_first_runner(runner)))
        return
    caches, steps = {module.k_cache.prefix: module for module in modules}, _steps_of_second_runner(runner)
    caller = importlib.import_module(CALLER)
    original = getattr(caller, CHOOSES)

    def choose(hidden: Any, prefix: str, *arguments: Any, **more: Any) -> Any:
        result = original(hidden, prefix, *arguments, **more)
        hook(caches[prefix], steps)
        return result

    setattr(caller, CHOOSES, choose)


def _steps_of_first_runner(runner: Any) -> Iterable[tuple[Request, int, int, int]]:
    batch, starts = runner.input_batch, runner.query_start_loc.np
    for i, name in enumerate(batch.req_ids):
        request = tuple(runner.requests[name].prompt_token_ids[:NAMED_BY])
        yield request, int(batch.num_computed_tokens_cpu[i]), int(starts[i]), int(starts[i + 1])


def _steps_of_second_runner(runner: Any) -> Steps:
    """Reads steps from the arguments that a runner passes between its methods, from now on."""
    add, prepare = runner.add_requests, runner.prepare_inputs
    requests, batches = dict[str, Request](), list[Any]()

    def add_requests(scheduled: Any) -> None:
        for new in scheduled.scheduled_new_reqs:
            requests[new.req_id] = tuple(new.prompt_token_ids[:NAMED_BY])
        add(scheduled)

    def prepare_inputs(*arguments: Any, **more: Any) -> Any:
        batches[:] = [prepare(*arguments, **more)]
        return batches[0]

    def steps() -> Iterable[tuple[Request, int, int, int]]:
        (batch,) = batches
        starts = batch.query_start_loc_np
        for i, name in enumerate(batch.req_ids):
            yield requests[name], int(batch.num_computed_tokens_np[i]), int(starts[i]), int(starts[i + 1])

    runner.add_requests, runner.prepare_inputs = add_requests, prepare_inputs
    return steps


def _rows(steps: Steps, module: Any, beyond: int) -> list[tuple[tuple[str, int, Request], Any]]:
    """Returns the key of `Chosen` and the row of the buffer of each token of a step at a position from `beyond` on."""
    found = []
    for request, first, begin, end in steps():
        for j in range(max(0, beyond - first), end - begin):
            found.append(((module.prefix, first + j, request), module.topk_indices_buffer[begin + j]))
    return found
