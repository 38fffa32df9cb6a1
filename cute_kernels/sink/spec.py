"""Compile-time facts of the forward kernel of sink attention, and in the kernel that lists its work."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

SMEM_PER_CTA = 232_448
ROWS = 64  # rows of a wgmma, and of a block of queries or keys
DTYPES = ("bfloat16", "float16")
WARPGROUPS = (2, 3, 4)
TILES = (64, 96, 128, 160, 192)
SMALL_WINDOW = 512  # up to this window most key tiles need a mask, and smaller tiles waste less
GROUPED_RATIO = 4  # query heads of a KV head from which on each of four warpgroups has one; measured with 8


@dataclass(frozen=True)
class SinkSpec:
    """Compile-time facts that kernels of sink attention share.

    dtype   dtype of q, k, v, out and their gradients: "bfloat16" or "float16"
    d       head dimension: 64 or 128
    packed  sequences of different lengths, concatenated; otherwise a batch of sequences of one length
    """

    dtype: str
    d: int
    packed: bool = False

    def can_implement(self) -> list[str]:
        reasons = []
        if self.dtype not in DTYPES:
            reasons.append(f"dtype is {self.dtype}; it is {' or '.join(DTYPES)}")
        if self.d not in (64, 128):
            reasons.append(f"d is {self.d}; it is 64 or 128")
        return reasons


@dataclass(frozen=True)
class SinkQuerySpec(SinkSpec):
    """Compile-time facts of the query-stationary kernels: the forward, and dq.

    window   whether there is a left window; without one its comparisons are not compiled
    grouped  whether a work tile is 64 rows of all query heads of a KV head, a warpgroup taking every warpgroups-th
             head, so that keys that fit into shared memory are loaded once; otherwise 64 rows a warpgroup of one head
    """

    window: bool = False
    grouped: bool = False

    row_operands: ClassVar[int]  # operands that are loaded once for the rows of a block
    # with the default (5) ptxas serializes the products of d 128 with a window: an arrival lands in a divergent branch
    compile_options: ClassVar[str] = "--ptxas-options '--register-usage-level=0'"

    def can_implement(self) -> list[str]:
        reasons = super().can_implement()
        if self.warpgroups not in WARPGROUPS:
            reasons.append(f"{self.warpgroups} warpgroups; there are 2 to 4")
        if self.tile not in TILES:
            reasons.append(f"tile is {self.tile}; known are {TILES}")
        if not reasons and self.stages < 2:
            reasons.append(f"{self.stages} stages in shared memory; two are needed")
        return reasons

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups, 64 rows each: three if shared memory and registers suffice."""
        return 3 if self.d == 64 else 2

    @property
    def tile(self) -> int:
        """Keys of a key tile."""
        return 64

    @property
    def rows(self) -> int:
        """Query rows of a work tile."""
        return ROWS if self.grouped else ROWS * self.warpgroups

    @property
    def q_stages(self) -> int:
        """Blocks of 64 rows of Q, and of dO, in shared memory."""
        return 2 * self.warpgroups if self.grouped and self.d == 64 else self.warpgroups

    @property
    def threads(self) -> int:
        """Threads of a CTA: the load warpgroup and the consumer warpgroups."""
        return 128 * (self.warpgroups + 1)

    @property
    def load_registers(self) -> int:
        """Registers of a thread of the load warpgroup."""
        return {2: 40, 3: 32, 4: 24}[self.warpgroups]

    @property
    def consumer_registers(self) -> int:
        """Consumer registers: 40 + 2 x 232 = 3 x 168 of 384 threads; 32 + 3 x 160 = 4 x 128; 24 + 4 x 112 < 5 x 96."""
        return {2: 232, 3: 160, 4: 112}[self.warpgroups]

    @property
    def stages(self) -> int:
        """Tiles of K, and as many of V, in flight: a power of two, at most 128 KB together."""
        blocks = self.row_operands * self.q_stages + self.warpgroups
        room = min(SMEM_PER_CTA - blocks * ROWS * self.d * 2 - 1024, 131_072)
        fit = room // (4 * self.tile * self.d)
        return 1 << (fit.bit_length() - 1) if fit else 0

    @property
    def expected(self) -> dict[str, Any]:
        registers = {2: 168, 3: 128, 4: 96}[self.warpgroups]
        return {"registers": registers, "instructions": ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG", "MUFU.EX2")}


@dataclass(frozen=True)
class SinkForwardSpec(SinkQuerySpec):
    """Compile-time facts of :class:`cute_kernels.sink.kernels.forward.SinkForwardKernel`; constructor argument and key.

    warpgroups  consumer warpgroups of a CTA, 64 rows each: 2 to 4
    tile        keys of a key tile
    turns       whether the warpgroups issue products in turns, so that one's softmax overlaps with another's products
    """

    warpgroups: int = 2
    tile: int = 128
    turns: bool = True

    kernel: ClassVar[str] = "cute_kernels.sink.kernels.forward:SinkForwardKernel"
    row_operands: ClassVar[int] = 1  # Q

    @classmethod
    def for_launch(cls, dtype: str, d: int, *, packed: bool, window: int | None, ratio: int) -> SinkForwardSpec:
        """Chooses the fastest variant: 64 and 8 heads of 64 with a window of 128 take 625 us grouped, 763 otherwise.

        Args:
            dtype: dtype of q, k and v, without "torch.".
            d: head dimension.
            packed: whether sequences are packed by cu_seqlens.
            window: the call's window, if it hides a key.
            ratio: query heads of a KV head.
        """
        if groups(d, window, ratio):
            return cls(dtype, d, packed, window=True, grouped=True, warpgroups=4, tile=64, turns=False)
        is_small = window is not None and window <= SMALL_WINDOW
        tile, warpgroups = 64 if is_small else 128, 3 if d == 64 else 2
        return cls(dtype, d, packed, window is not None, warpgroups=warpgroups, tile=tile, turns=not is_small)

    def can_implement(self) -> list[str]:
        reasons = super().can_implement()
        if not reasons and self.accumulators > self.consumer_registers - 24:
            reasons.append(f"{self.accumulators} values in registers; a consumer has {self.consumer_registers}")
        if self.grouped and self.turns:
            reasons.append("warpgroups with heads of their own take no turns")
        return reasons

    @property
    def accumulators(self) -> int:
        """Registers of a consumer for O, S and P."""
        return self.d // 2 + self.tile // 2 + self.tile // 4


@dataclass(frozen=True)
class SinkWorkListSpec:
    """Compile-time facts of :class:`cute_kernels.sink.kernels.work_list.SinkWorkListKernel`.

    keys  whether it lists blocks of keys, for the key-stationary backward; otherwise blocks of queries
    """

    keys: bool = False

    kernel: ClassVar[str] = "cute_kernels.sink.kernels.work_list:SinkWorkListKernel"

    def can_implement(self) -> list[str]:
        return []

    @property
    def expected(self) -> dict[str, Any]:
        return {"registers": 64, "instructions": ("ATOMS", "SHFL", "STG")}


def groups(d: int, window: int | None, ratio: int) -> bool:
    """Whether query-stationary kernels take the query heads of a KV head together; see `SinkQuerySpec`."""
    return d == 64 and window is not None and window <= SMALL_WINDOW and ratio >= GROUPED_RATIO


def variants(dtype: str) -> Iterator[dict[str, Any]]:
    """Yields arguments of `for_launch`: one call of each kind that it distinguishes."""
    for d, packed, window in itertools.product((64, 128), (False, True), (None, SMALL_WINDOW, SMALL_WINDOW + 1)):
        for ratio in (1, GROUPED_RATIO):
            yield {"dtype": dtype, "d": d, "packed": packed, "window": window, "ratio": ratio}


def launched_specs(dtype: str) -> list[SinkForwardSpec]:
    """Returns every variant that `for_launch` can name."""
    return list(dict.fromkeys(SinkForwardSpec.for_launch(**sizes) for sizes in variants(dtype)))


def shipped_specs() -> list[SinkForwardSpec | SinkWorkListSpec]:
    """Returns all variants of bfloat16 and one of float16; the others of float16 compile at their first call."""
    float16 = SinkForwardSpec.for_launch("float16", 64, packed=False, window=None, ratio=1)
    return [*launched_specs("bfloat16"), float16, SinkWorkListSpec(), SinkWorkListSpec(keys=True)]
