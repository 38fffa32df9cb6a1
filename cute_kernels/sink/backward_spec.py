"""What is fixed at compile time in the kernels of the backward of sink attention.

Two ways lead to the gradients, both after `prepare`, which makes delta and the log-sum-exps with sinks:
  fused     keys stay, queries stream past: dk and dv in registers, dq added to float32 in global memory, which
            `finish` rounds. 5 products of a tile. The order of the additions is free, so dq is not deterministic
  apart     the same without dq, and a kernel where queries stay and keys stream past: S and dP are computed twice, 7
            products of a tile, and nothing passes through float32 in global memory. Deterministic
Bytes decide for small windows. With a window of 128, 64 heads and d 64, a block of 128 keys meets 4 tiles of 64
queries: the fused way adds 4 x 64 x 64 float32 to memory for 128 x 64 x 4 x 64 x 10 FLOP, 64 KB for 21 MFLOP, which is
4.3 GB of additions at 65,536 tokens, and 1 GB each to clear and 1 GB to read them: some 2.5 ms of memory time. The two
kernels do 7 / 5 of the products, 0.4 ms of the tensor core, and read q and do once more, 1 GB, 0.25 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.sink.spec import DTYPES, ROWS, SMALL_WINDOW, SMEM_PER_CTA, groups, variants

QUERIES = 64  # rows of Q and dO of a tile in the kernel where keys stay
FUSED: dict[int, dict[str, Any]] = {64: {"blocks": 2}, 128: {"pair": True}}  # by d, the fastest that was timed
PADDING = 128  # positions between two sequences in the statistics: see prepare.py


def _reasons(dtype: str, d: int) -> list[str]:
    reasons = []
    if dtype not in DTYPES:
        reasons.append(f"dtype is {dtype}; it is {' or '.join(DTYPES)}")
    if d not in (64, 128):
        reasons.append(f"d is {d}; it is 64 or 128")
    return reasons


@dataclass(frozen=True)
class SinkBackwardSpec:
    """Compile-time facts of :class:`cute_kernels.sink.kernels.backward.SinkBackwardKernel`, where keys stay.

    dtype   "bfloat16" or "float16", of q, k, v, do, dk and dv
    d       head dimension: 64 or 128
    packed  sequences of different lengths lie one behind the other
    window  whether there is a left window
    fused   whether dq is added up in global memory as well, by copies from shared memory. But for a helper, warpgroups
            make it in turns, each that of the tile before, so that none waits for the dS of another
    helper  fused: whether a warpgroup of its own makes dq
    ahead   whether S of the next tile is issued before dK of this one is waited for
    skips   not fused: whether a warpgroup passes over tiles none of whose queries sees its keys
    warpgroups  that have keys: 2, or 3 at d 64 where they make dq in turns
    blocks      of 64 keys that each of them has: 1, or 2 at d 64, likewise
    pair        whether two CTAs of a cluster have neighbouring keys, at d 128 where warpgroups make dq in turns: each
                hands its dS to the other and makes half of the columns of dq, over the keys of both
    multicast   whether each of a pair loads half of every tile of Q and dO, for both
    """

    dtype: str
    d: int
    packed: bool = False
    window: bool = False
    fused: bool = True
    helper: bool = False
    ahead: bool = False
    skips: bool = False
    warpgroups: int = 2
    blocks: int = 1
    pair: bool = False
    multicast: bool = False

    kernel: ClassVar[str] = "cute_kernels.sink.kernels.backward:SinkBackwardKernel"
    columns: ClassVar[int] = 64  # of dQ that are made together: 32 registers
    compile_options: ClassVar[str] = "--ptxas-options '--register-usage-level=0'"

    @classmethod
    def for_launch(
        cls, dtype: str, d: int, *, packed: bool, window: int | None, deterministic: bool
    ) -> SinkBackwardSpec:
        """The fastest variant for a call; only those that are not fused give the same bits in the same call.

        Small windows are not fused: at first 64 and 8 heads of 64 with a window of 128 took 2664 us fused and 2337
        apart. The fused way is ahead where more is multiplied for each sum in memory: 473 / 446 TFLOP/s with 32 and 8
        heads of 128 and a window of 4096, 465 / 437 without a window. The border between is not measured.

        Milliseconds of the kernel, of 65,536 tokens; in turns: 128 keys and no helper.

            64 and 8 heads of 64     s_k 16384                 256 keys 46.1, 192 keys 46.7, helper and ahead 49.4
                                     s_k 16384, apart          ahead 32.3
                                     s_k 16384, window 128     apart, skips 0.98, apart 1.27
            32 and 8 heads of 128    s_k 16384                 pair 40.6, multicast 41.3, turns 43.9

        Args:
            dtype: of q, k and v, without "torch.".
            d: head dimension.
            packed: whether sequences are packed by cu_seqlens.
            window: of the call, where it hides a key.
            deterministic: whether the same bits are asked for.
        """
        small = window is not None and window <= SMALL_WINDOW
        mask = (dtype, d, packed, window is not None)
        if deterministic or small:
            return cls(*mask, fused=False, ahead=d == 64 and not small, skips=d == 64 and small)
        return cls(*mask, **FUSED[d])

    def can_implement(self) -> list[str]:
        """Reasons, in words, why this kernel cannot be built; empty when it can."""
        reasons = _reasons(self.dtype, self.d)
        if self.helper and not self.fused:
            reasons.append("a helper makes dq, which only the fused way does")
        if self.helper and self.d == 128:
            reasons.append("beside a helper, registers are left for d 64 only")
        if self.helper and not self.ahead:
            reasons.append("beside a helper, warpgroups look ahead")
        if self.ahead and self.warpgroups == 3:
            reasons.append("looking ahead leaves no registers for three warpgroups")
        if self.skips and (self.fused or self.ahead):
            reasons.append("tiles are passed over where no dq is made, and none is looked ahead to")
        if (self.warpgroups, self.blocks) not in ((2, 1), (3, 1), (2, 2)):
            reasons.append(f"{self.warpgroups} warpgroups of {self.blocks} blocks; known are 2 of 1 or 2, and 3 of 1")
        elif self.keys_of_cta > 128 and not (self.d == 64 and self.late):
            reasons.append("more than 128 keys are for d 64, where warpgroups make dq in turns")
        if self.pair and not (self.d == 128 and self.late):
            reasons.append("pairs of CTAs are for d 128, where warpgroups make dq in turns")
        if self.multicast and not self.pair:
            reasons.append("a pair of CTAs loads for both")
        return reasons

    @property
    def late(self) -> bool:
        """Whether warpgroups make dq in turns."""
        return self.fused and not self.helper

    @property
    def keys_of_cta(self) -> int:
        """Keys of a CTA."""
        return ROWS * self.blocks * self.warpgroups

    @property
    def keys(self) -> int:
        """Of an item: of a CTA, or of a pair of them."""
        return self.keys_of_cta * (2 if self.pair else 1)

    @property
    def consumers(self) -> int:
        """Threads of the warpgroups that have keys."""
        return 128 * self.warpgroups

    @property
    def threads(self) -> int:
        """Of a CTA: the producer's warpgroup, those that have keys, and the helper."""
        return 128 + self.consumers + (128 if self.helper else 0)

    @property
    def producer_registers(self) -> int:
        """Of a thread after the roles have parted.

        24 + 2 x 240 = 40 + 2 x 232 = 3 x 168 of 384 threads, 32 + 3 x 160 = 4 x 128 of 512.
        """
        if self.warpgroups == 3:
            return 32
        return 24 if self.fused or (self.ahead and self.d == 128) else 40

    @property
    def consumer_registers(self) -> int:
        """With 232 ptxas serializes the products of d 128, fused; with 24 the producer spills where not fused."""
        if self.helper:
            return 200
        if self.warpgroups == 3:
            return 160
        return 232 if self.producer_registers == 40 else 240

    @property
    def helper_registers(self) -> int:
        """What is left: 24 + 2 x 200 + 88 = 4 x 128 of 512 threads."""
        return 88

    @property
    def bytes_of_keys(self) -> int:
        """Of K and V of a CTA, and of a pair's other K."""
        return 2 * self.keys_of_cta * (2 * self.d + (self.columns if self.pair else 0))

    @property
    def reuses(self) -> bool:
        """Whether dK and dV leave through the place of K and V."""
        return self.fused and (self.d == 128 or self.keys_of_cta > 128)

    @property
    def stages(self) -> int:
        """Tiles of Q and dO in flight: a power of two."""
        return 4 if self.d == 64 else 2

    @property
    def expected(self) -> dict[str, Any]:
        """What the compiled kernel is held to."""
        added = (("UBLKRED", "UBLKCP.S.S") if self.pair else ("UBLKRED",)) if self.fused else ()
        registers = 128 if self.threads == 512 else 168
        return {
            "registers": registers,
            "instructions": ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG", "MUFU.EX2", *added),
        }


@dataclass(frozen=True)
class SinkQueryGradSpec:
    """Compile-time facts of :class:`cute_kernels.sink.kernels.query_grad.SinkQueryGradKernel`, where queries stay.

    dtype, d, packed, window  as above
    grouped  as in the forward
    """

    dtype: str
    d: int
    packed: bool = False
    window: bool = False
    grouped: bool = False

    kernel: ClassVar[str] = "cute_kernels.sink.kernels.query_grad:SinkQueryGradKernel"
    tile: ClassVar[int] = 64  # keys of a tile
    compile_options: ClassVar[str] = "--ptxas-options '--register-usage-level=0'"

    @classmethod
    def for_launch(cls, dtype: str, d: int, *, packed: bool, window: int | None, ratio: int) -> SinkQueryGradSpec:
        """The fastest variant for a call; arguments as in the forward.

        64 and 8 heads of 64 with a window of 128, grouped, take 0.71 ms, else 0.80.
        """
        return cls(dtype, d, packed, window is not None, grouped=groups(d, window, ratio))

    def can_implement(self) -> list[str]:
        """Reasons, in words, why this kernel cannot be built; empty when it can."""
        reasons = _reasons(self.dtype, self.d)
        if not reasons and self.stages < 2:
            reasons.append(f"{self.stages} stages in shared memory; two are needed")
        return reasons

    @property
    def warpgroups(self) -> int:
        """Of consumers: three where shared memory and registers allow it."""
        return 3 if self.d == 64 else 2

    @property
    def rows(self) -> int:
        """Query rows of an item."""
        return ROWS if self.grouped else ROWS * self.warpgroups

    @property
    def slots(self) -> int:
        """Blocks of 64 rows of Q, and of dO, in shared memory."""
        return 2 * self.warpgroups if self.grouped and self.d == 64 else self.warpgroups

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return 128 * (self.warpgroups + 1)

    @property
    def producer_registers(self) -> int:
        """Of a thread after the roles have parted."""
        return 40 if self.warpgroups == 2 else 32

    @property
    def consumer_registers(self) -> int:
        """40 + 2 x 232 = 3 x 168 of 384 threads; 32 + 3 x 160 = 4 x 128 of 512 threads."""
        return 232 if self.warpgroups == 2 else 160

    @property
    def stages(self) -> int:
        """Tiles of K, and as many of V, in flight: a power of two."""
        room = min(SMEM_PER_CTA - (2 * self.slots + self.warpgroups) * ROWS * self.d * 2 - 1024, 131_072)
        fit = room // (4 * self.tile * self.d)
        return 1 << (fit.bit_length() - 1) if fit else 0

    @property
    def expected(self) -> dict[str, Any]:
        """What the compiled kernel is held to."""
        registers = 168 if self.warpgroups == 2 else 128
        return {"registers": registers, "instructions": ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG", "MUFU.EX2")}


@dataclass(frozen=True)
class SinkPrepareSpec:
    """Compile-time facts of :class:`cute_kernels.sink.kernels.prepare.SinkPrepareKernel`.

    dtype, d, packed  as above
    fused   whether the float32 sums of dq are set to 0
    """

    dtype: str
    d: int
    packed: bool = False
    fused: bool = True

    kernel: ClassVar[str] = "cute_kernels.sink.kernels.prepare:SinkPrepareKernel"
    rows: ClassVar[int] = 2 * ROWS  # of a CTA

    def can_implement(self) -> list[str]:
        """Reasons, in words, why this kernel cannot be built; empty when it can."""
        return _reasons(self.dtype, self.d)

    @property
    def expected(self) -> dict[str, Any]:
        """What the compiled kernel is held to."""
        return {"registers": 64, "instructions": ("LDG.E.128", "SHFL", "MUFU.EX2")}


@dataclass(frozen=True)
class SinkFinishSpec:
    """Compile-time facts of :class:`cute_kernels.sink.kernels.prepare.SinkFinishKernel`, of the fused way.

    dtype, d, packed  as above
    """

    dtype: str
    d: int
    packed: bool = False

    kernel: ClassVar[str] = "cute_kernels.sink.kernels.prepare:SinkFinishKernel"

    def can_implement(self) -> list[str]:
        """Reasons, in words, why this kernel cannot be built; empty when it can."""
        return _reasons(self.dtype, self.d)

    @property
    def expected(self) -> dict[str, Any]:
        """What the compiled kernel is held to."""
        return {"registers": 64, "instructions": ("LDG.E.128", "STG.E.128")}


def candidate_specs() -> list[Any]:
    """Variants that no launch asks for: more keys that share an addition to dq. They compile as those that ship do."""
    layouts = [(packed, window) for packed in (False, True) for window in (False, True)]
    more: list[dict[str, Any]] = [{"warpgroups": 3}, {"blocks": 2}, {"blocks": 2, "ahead": True}]
    return [
        *[SinkBackwardSpec("bfloat16", 64, *layout, **keys) for keys in more for layout in layouts],
        *[
            SinkBackwardSpec("bfloat16", 128, *layout, ahead=ahead, pair=pair, multicast=multicast)
            for ahead, pair, multicast in (
                (True, False, False),
                (False, True, False),
                (True, True, False),
                (True, True, True),
            )
            for layout in layouts
        ],
    ]


def launched_specs(dtype: str) -> list[Any]:
    """Every variant that a backward can launch."""
    kinds = list(variants(dtype))
    keys = [
        SinkBackwardSpec.for_launch(
            dtype, kind["d"], packed=kind["packed"], window=kind["window"], deterministic=deterministic
        )
        for kind in kinds
        for deterministic in (True, False)
    ]
    sizes = [(d, packed) for d in (64, 128) for packed in (False, True)]
    return [
        *dict.fromkeys(keys),
        *dict.fromkeys(SinkQueryGradSpec.for_launch(**kind) for kind in kinds),
        *[SinkPrepareSpec(dtype, *size, fused=fused) for size in sizes for fused in (True, False)],
        *[SinkFinishSpec(dtype, *size) for size in sizes],
    ]


def shipped_specs() -> list[Any]:
    """Those of bfloat16 and one of float16, whose others are compiled when first asked for."""
    float16 = SinkBackwardSpec.for_launch("float16", 64, packed=False, window=None, deterministic=False)
    return [*launched_specs("bfloat16"), float16]
