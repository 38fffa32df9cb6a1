"""The arguments of `merge_states`, each said once; see `cute_kernels.runtime.ops`."""

from __future__ import annotations

from typing import Annotated, TypedDict

import torch

from cute_kernels.runtime.ops import Operator, Option, Output


class Inputs(TypedDict):
    """Positional arguments of `merge_states`.

    outs: (n, ..., d) float32, bfloat16 or float16, n >= 1, d a multiple of 8 up to 512; often
        (n, batch, s_q, heads, d). Rows are contiguous and start at multiples of 16 bytes.
    lses: (n, ...) float32. -inf marks a pair without keys, and so does +inf, which FlashMLA and its adapter here
        write: the output of such a pair is not read and may hold anything.
    """

    outs: torch.Tensor
    lses: torch.Tensor


class Options(TypedDict, total=False):
    """Keyword arguments of `merge_states`.

    s_aux: (heads,) float32, where heads is the last of the dimensions "...": sink logits that join the denominator
        once. The pairs must not contain them already. -inf is no sink, +inf makes the output 0.
    out: (..., d) float32, bfloat16 or float16: where to write the output, rows as those of `outs`.
    lse: (...) float32: where to write the log-sum-exp. Neither `out` nor `lse` shares memory with another
        argument: a row's lse may be written while other threads still read `lses`.
    """

    s_aux: torch.Tensor | None
    out: Output
    lse: Output


class Request(Inputs, Options, total=False):
    """All arguments of a `merge_states` call, hidden ones included.

    headers  a 32-bit word of the call follows each log-sum-exp in memory; a row whose states differ in it becomes NaN
    """

    headers: Annotated[bool, Option(False, fact=bool, hidden=True, later=True)]


MERGE = Operator("merge_states", Inputs, Options, Request)
