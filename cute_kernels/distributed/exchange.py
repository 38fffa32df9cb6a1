"""The exchange between ranks: rows of a partial output and its log-sum-exp, in one collective, merged in rank order.

A row is the d values of an output, its float32 log-sum-exp, and three copies of a word that follows from the call. If
ranks send rows of different calls, a GPU turns them into NaN; on CPUs ranks compare their calls before. Rows travel as
bytes, since gloo and NCCL both carry uint8. The decode writes into the buffer that is sent and `merge_states` reads the
received one, so nothing is packed or unpacked. States are merged in the order of ranks: the same bits on every rank,
and in every call.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from cute_kernels.merge.op import merge_request
from cute_kernels.merge.request import MERGE
from cute_kernels.runtime.checks import check_tensor, fail, require
from cute_kernels.runtime.overlap import check_written

HEADS = ("gather", "scatter")
LSE_BYTES = 16
"""Bytes of a row after its output: the log-sum-exp and three words, so that rows are at multiples of 16 bytes."""


CALL_BYTES = 2048
"""Bytes of the summary of a call that ranks compare."""
SAMPLES = 32
"""Numbers of q in the summary."""


class Member(NamedTuple):
    """This process in a group."""

    group: dist.ProcessGroup | None
    rank: int
    world_size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Member:
        """Returns this process's place in `group`; None is the default group.

        Raises:
            ValueError: the group does not exist, or this process is not in it.
        """
        if not (dist.is_available() and dist.is_initialized()):
            fail("group", group, "a torch.distributed group: call torch.distributed.init_process_group first")
        rank = dist.get_rank(group)
        require(rank >= 0, "group", "one without this process", "a group that this process belongs to")
        return cls(group, rank, dist.get_world_size(group))

    def exchange(
        self, what: str, collective: Callable[..., object], received: torch.Tensor, sent: torch.Tensor
    ) -> None:
        """Runs a collective over bytes, received and sent contiguous, on the current stream.

        Raises:
            RuntimeError: another rank has failed, or has not called within the group's timeout. With NCCL the group's
                watchdog reports that instead, and ends the process.
        """
        if not sent.numel():
            return
        try:
            collective(received.view(-1), sent.view(-1), group=self.group)
        except RuntimeError as error:
            message = (
                f"{what}: rank {self.rank} of {self.world_size} waited for the others in vain; one of them has failed, "
                f"or has not made this call within the group's timeout: {error}"
            )
            raise RuntimeError(message) from error

    def require_same_call(
        self, what: str, arguments: Mapping[str, object], device: torch.device, q: torch.Tensor | None = None
    ) -> None:
        """Raises on all CPU ranks of a group unless all make this call: otherwise sizes of collectives would differ.

        It costs a small collective. GPUs, which would have to wait for it, and compiled calls do without.

        Args:
            what: name of the function that is called.
            arguments: arguments that must be equal on all ranks, by name.
            device: device of the tensors.
            q: queries, if they must be the same on all ranks: a sample of them is compared up to rounding.

        Raises:
            ValueError: names the first argument that differs, what two ranks got, and what it needs.
        """
        if device.type != "cpu" or self.world_size == 1 or torch.compiler.is_compiling():
            return
        sample = [] if q is None else q.flatten()[:: max(1, q.numel() // SAMPLES)][:SAMPLES].float().tolist()
        words = {"function": what, **{name: _in_words(value) for name, value in arguments.items()}}
        text = json.dumps([words, sample]).encode()
        sent = torch.zeros(CALL_BYTES, dtype=torch.uint8, device="cpu")
        sent[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        received = sent.new_empty((self.world_size, CALL_BYTES))
        self.exchange(what, all_gather(), received, sent)
        (first, values), *others = (json.loads(bytes(row.tolist()).rstrip(b"\0")) for row in received)
        needs = "the same on all ranks, which make one call together"
        for rank, (other, other_values) in enumerate(others, start=1):
            for name in {**first, **other}:
                one, two = first.get(name, "none"), other.get(name, "none")
                require(one == two, name, f"{one} on rank 0 and {two} on rank {rank}", needs)
            apart = math.dist(values, other_values)
            require(
                not apart > math.hypot(*values, *other_values) / 2,
                "q",
                f"other values on rank {rank} than on rank 0",
                f"{needs}: calls come in the same order on all ranks",
            )


def _in_words(value: object) -> str:
    """Returns a short text of an argument's value; integer tensors with different contents give different texts."""
    if isinstance(value, torch.Tensor):
        words = f"{value.dtype} of shape {tuple(value.shape)}"
        if value.dtype in (torch.int32, torch.int64):
            contents = json.dumps(value.tolist()).encode()
            words += f" with contents {hashlib.sha256(contents).hexdigest()[:8]}"
        return words
    return repr(value)[:64]


class Rows(NamedTuple):
    """Rows of partial results.

    bytes  (..., row_bytes) uint8, contiguous
    out    (..., d), a view: the outputs
    lse    (...) float32, a view: the log-sum-exps of these outputs
    """

    bytes: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def view(cls, rows: torch.Tensor, d: int, dtype: torch.dtype) -> Rows:
        """Views a buffer (..., row_bytes) as rows."""
        width = d * dtype.itemsize
        lse = rows[..., width : width + 4].view(torch.float32).squeeze(-1)
        return cls(rows, rows[..., :width].view(dtype), lse)

    @classmethod
    def empty(
        cls, shape: tuple[int, ...], d: int, dtype: torch.dtype, device: torch.device, call: tuple[int, ...] = ()
    ) -> Rows:
        """Allocates rows, whose outputs and log-sum-exps are to be written.

        Args:
            shape: (..., heads).
            d: values of a row.
            dtype: dtype of the values.
            device: device of the rows.
            call: other facts that ranks must agree on, as numbers.
        """
        rows = torch.empty((*shape, d * dtype.itemsize + LSE_BYTES), dtype=torch.uint8, device=device)
        word = 0
        # arithmetic that torch.compile can trace
        for number in (*shape, d, dtype.itemsize, dtype is torch.float16, *call):
            word = (word * 1_000_003 + number + 1) % (2**31 - 1)
        rows[..., -12:].view(torch.int32).fill_(word)
        return cls.view(rows, d, dtype)


class Target(NamedTuple):
    """The target of merged results.

    heads  "gather": all heads on every rank; "scatter": each rank its own heads
    s_aux  (heads,) float32 sinks of the merged heads, or None
    out    (..., heads, d), or None to allocate
    lse    (..., heads) float32, or None to allocate
    """

    heads: str
    s_aux: torch.Tensor | None
    out: torch.Tensor | None
    lse: torch.Tensor | None

    @classmethod
    def of(
        cls,
        heads: str,
        member: Member,
        shape: tuple[int, ...],
        d: int,
        dtype: torch.dtype,
        device: torch.device,
        s_aux: torch.Tensor | None,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> Target:
        """Checks the arguments; `shape` is (..., all heads). Of sinks for all heads it keeps this rank's."""
        require(heads in HEADS, "heads", repr(heads), " or ".join(map(repr, HEADS)))
        all_heads = own = shape[-1]
        if heads == "scatter":
            own = all_heads // member.world_size
            needs = f"a multiple of {member.world_size} for heads='scatter', the number of ranks"
            require(own * member.world_size == all_heads, "q", f"{all_heads} heads", needs)
        if s_aux is not None:
            check_tensor("s_aux", s_aux, dtype=torch.float32, ndim=1, device=device)
            known = s_aux.shape[0] in (own, all_heads)
            require(known, "s_aux", f"shape {tuple(s_aux.shape)}", f"({all_heads},), or ({own},) of the heads returned")
            if s_aux.shape[0] != own:
                s_aux = s_aux[member.rank * own : (member.rank + 1) * own]
        if out is not None:
            result = (*shape[:-1], own, d)
            check_tensor("out", out, dtype=dtype, shape=result, device=device, align=16, unit_last_stride=True)
        if lse is not None:
            check_tensor("lse", lse, dtype=torch.float32, shape=(*shape[:-1], own), device=device)
        check_written({"out": out, "lse": lse}, {"s_aux": s_aux})
        return cls(heads, s_aux, out, lse)


def combine(what: str, rows: Rows, member: Member, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    """Sends this rank's rows (..., heads) and merges all ranks' rows: one collective, one launch.

    "gather" is an all-gather of all rows. "scatter" is an all-to-all in which each rank gets the rows of its own heads;
    it moves world_size times fewer bytes.
    """
    world_size, sent = member.world_size, rows.bytes
    if target.heads == "gather":
        received = sent.new_empty((world_size, *sent.shape))
        member.exchange(what, all_gather(), received, sent)
    else:
        sent = heads_first(sent, world_size)
        received = torch.empty_like(sent)
        member.exchange(what, dist.all_to_all_single, received, sent)
    states = Rows.view(received, rows.out.shape[-1], rows.out.dtype)
    states_and_target = {"s_aux": target.s_aux, "out": target.out, "lse": target.lse}
    return merge_request(MERGE.request(outs=states.out, lses=states.lse, **states_and_target, headers=True))


def all_gather() -> Callable[..., object]:
    """Returns torch's all-gather into one tensor: torch 2.13 renames it and warns about the older name."""
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def heads_first(rows: torch.Tensor, world_size: int) -> torch.Tensor:
    """Returns (..., heads, row_bytes) as (world_size, ..., heads / world_size, row_bytes), contiguous.

    It is a view if there is one query, else one copy, of 8 bytes at a time.
    """
    *leading, heads, width = rows.shape
    split = rows.view(torch.int64).view(*leading, world_size, heads // world_size, width // 8)
    return split.movedim(-3, 0).contiguous().view(torch.uint8)


def gather_heads(what: str, q: torch.Tensor, member: Member) -> torch.Tensor:
    """Gathers queries (..., own heads, d) of every rank to (..., all heads, d).

    It takes one collective, and a copy if there are several queries.
    """
    sent = q.contiguous().view(torch.uint8)
    received = sent.new_empty((member.world_size, *sent.shape))
    member.exchange(what, all_gather(), received, sent)
    return received.movedim(0, -3).flatten(-3, -2).view(q.dtype)
