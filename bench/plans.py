"""A snapshot of what is launched for which shapes: specifications, splits, CTAs. JSON, so that commits can be compared.

Every plan is named by its shapes. One that is refused is there with the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, is_dataclass
from typing import Any

NUM_SMS = (132, 78)  # of an H200, and of a card with fewer
BATCHES = (1, 2, 3, 7, 16, 64, 132, 257, 1025)


UNREADABLE = "cannot be listed"
"""Ends the name of what stands for the plans of a room whose functions are not those that this module calls."""


def snapshot() -> dict[str, Any]:
    """Plans of all rooms over a grid of shapes, by room and shapes."""
    plans: dict[str, Any] = {}
    for room, plan, grid in (
        ("mla", _mla, _mla_shapes()),
        ("gqa", _gqa, _gqa_shapes()),
        ("sink route", _sink_route, _sink_routes()),
        ("sink order", _sink_order, _sink_orders()),
    ):
        try:
            plans.update((f"{room} {_words(shapes)}", _outcome(plan, shapes)) for shapes in grid)
        except (ImportError, AttributeError, TypeError) as error:
            plans[f"{room} {UNREADABLE}"] = f"{type(error).__name__}: {error}"
    return plans


def _grid(**values: Any) -> Iterator[dict[str, Any]]:
    for chosen in itertools.product(*values.values()):
        yield dict(zip(values, chosen, strict=True))


def _mla_shapes() -> Iterator[dict[str, Any]]:
    heads = (1, 8, 16, 24, 64, 128)
    keys = (1, 64, 2048, 8192, 131_072)
    yield from _grid(sparse=(True,), batch=BATCHES, s_q=(1, 2), h_q=heads, max_keys=keys[:4], ragged=(False, True))
    yield from _grid(sparse=(False,), batch=BATCHES, s_q=(1, 8), h_q=heads, max_keys=keys, ragged=(False, True))
    yield from _grid(sparse=(True, False), batch=(1, 64), s_q=(1,), h_q=heads, max_keys=keys, num_splits=(1, 7, 256))


def _mla(**shapes: Any) -> Any:
    from cute_kernels.mla.plan import plan_decode

    return [plan_decode(**shapes, num_sms=num_sms) for num_sms in NUM_SMS]


def _gqa_shapes() -> Iterator[dict[str, Any]]:
    keys = (1, 128, 1024, 8192, 131_072)
    sizes = {"kv_dtype": ("int8", "bfloat16"), "d": (64, 128, 256), "h_kv": (1, 8), "rows": (1, 4, 9, 32)}
    yield from _grid(**sizes, batch=BATCHES, max_keys=keys)
    yield from _grid(**sizes, batch=(1, 64), max_keys=keys, num_splits=(1, 7, 256))


def _gqa(
    *, kv_dtype: str, d: int, h_kv: int, rows: int, batch: int, max_keys: int, num_splits: int | None = None
) -> Any:
    from cute_kernels.gqa.plan import cluster_for, columns_for, plan_decode, warps_for
    from cute_kernels.gqa.spec import ITEMSIZE, GqaDecodeSpec

    plans = []
    for num_sms in NUM_SMS:
        warps = warps_for(d, ITEMSIZE[kv_dtype])
        cluster = 1 if num_splits else cluster_for(batch, h_kv, rows, d, max_keys, num_sms, warps)
        spec = GqaDecodeSpec("bfloat16", kv_dtype, d, columns_for(rows, d), warps=warps, cluster=cluster)
        shapes = {"batch": batch, "h_kv": h_kv, "rows": rows, "max_keys": max_keys, "num_splits": num_splits}
        plans.append({"spec": repr(spec), "plan": plan_decode(spec, num_sms=num_sms, **shapes)})
    return plans


def _sink_routes() -> Iterator[dict[str, Any]]:
    yield from _grid(
        s_q=(1, 8, 9), h_q=(8, 64), h_kv=(8,), d=(64, 128), packed=(False, True), differentiable=(False, True)
    )


def _sink_route(**shapes: Any) -> Any:
    from cute_kernels.sink.plan import route

    return route(**shapes, dtype="bfloat16")


def _sink_orders() -> Iterator[dict[str, Any]]:
    yield from _grid(batch=(1, 4, 32), s_k=(128, 4096, 16384), h_q=(64,), h_kv=(4, 8), d=(64, 128), window=(None, 128))


def _sink_order(*, h_q: int, **shapes: Any) -> Any:
    from cute_kernels.sink.plan import backward_section, forward_section

    return {"forward": forward_section(h_q=h_q, **shapes), "backward": backward_section(**shapes)}


def _outcome(plan: Callable[..., Any], shapes: dict[str, Any]) -> Any:
    try:
        return _plain(plan(**shapes))
    except ValueError as error:
        return f"refused: {error}"


def _plain(value: Any) -> Any:
    """As JSON has it; a specification inside of a plan by its repr."""
    if is_dataclass(value) and not isinstance(value, type):
        return {k: repr(getattr(value, k)) if is_dataclass(getattr(value, k)) else v for k, v in asdict(value).items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return value


def _words(shapes: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in shapes.items())
