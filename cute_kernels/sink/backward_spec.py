"""Compile-time facts of the kernels of the backward of sink attention.

All backwards start with `prepare`, which makes delta and the log-sum-exps with sinks. Two designs make gradients:
  fused     one key-stationary kernel: dk and dv in registers, dq added to float32 in global memory, which `finish`
            rounds. A tile takes 5 products. The additions have no fixed order, so dq is not deterministic
  separate  a key-stationary kernel without dq, and a query-stationary one for dq: both compute S and dP, 7 products a
            tile, and nothing passes through float32 in global memory. Deterministic

Bytes decide for small windows. With a window of 128, 64 heads and d 64, a block of 128 keys meets 4 tiles of 64
queries: the fused kernel adds 4 x 64 x 64 float32 to memory for 128 x 64 x 4 x 64 x 10 FLOP, 64 KB for 21 MFLOP. At
65,536 tokens that is 4.3 GB of additions, 1 GB to clear and 1 GB to read: some 2.5 ms of memory time. The separate
kernels do 7 / 5 of the products, 0.4 ms of the tensor core, and read q and do again, 1 GB, 0.25 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.sink.spec import ROWS, SMALL_WINDOW, SinkQuerySpec, SinkSpec, groups, variants

QUERIES = 64  # rows of a tile of Q and dO in the fused kernel
DS_STAGES = 2  # query tiles with dS in shared memory: one is stored while dQ of the previous one is made
PADDING = 192  # positions between two sequences in the statistics: see kernels/views.py


@dataclass(frozen=True)
class SinkBackwardSpec(SinkSpec):
    """Compile-time facts of :class:`cute_kernels.sink.kernels.backward.SinkBackwardKernel`, which is key-stationary.

    window  whether there is a left window
    fused   whether this kernel also adds up dq in global memory
    skips   d 64 with a window, not fused: each consumer warpgroup skips the query tiles that see none of its keys

    The other choices follow from these: `key_blocks`, `pair` and `queries`. Milliseconds of the kernel for 65,536
    tokens, the fastest first (docs/journal/sink_attention.md has all variants that were timed; slower ones are gone):

        64 and 8 heads of 64     s_k 16384, fused               key_blocks 2: 46.1; 192 keys a CTA: 46.7;
                                                                a warpgroup of its own for dq, 128 keys: 49.4
                                 s_k 16384, window 128          not fused, skips: 0.98; not fused: 1.27
        32 and 8 heads of 128    s_k 16384, fused               pair: 40.6; pair that multicasts Q and dO: 41.3;
                                                                one CTA: 43.9

    The whole backward of 64 heads on another H200, s_k 16384: fused, key_blocks 2 48.2, 128 queries a tile 51.0; not
    fused, 128 queries a tile 54.3, 64 queries 57.0.
    """

    window: bool = False
    fused: bool = True
    skips: bool = False

    kernel: ClassVar[str] = "cute_kernels.sink.kernels.backward:SinkBackwardKernel"
    warpgroups: ClassVar[int] = 2  # consumer warpgroups
    columns: ClassVar[int] = 64  # columns of dQ made together: 32 registers of a thread
    compile_options: ClassVar[str] = "--ptxas-options '--register-usage-level=0'"

    @classmethod
    def for_launch(
        cls, dtype: str, d: int, *, packed: bool, window: int | None, deterministic: bool
    ) -> SinkBackwardSpec:
        """Chooses the fastest variant for a call. Only variants that are not fused give the same bits in the same call.

        Small windows are not fused: when this was chosen, 64 and 8 heads of 64 with a window of 128 took 2664 us fused
        and 2337 us with two kernels. The fused kernel wins where each sum in memory takes more products: 473 against
        446 TFLOP/s with 32 and 8 heads of 128 and a window of 4096, 465 against 437 without a window. Windows between
        128 and 4096 have not been measured.

        Args:
            dtype: dtype of q, k and v, without "torch.".
            d: head dimension.
            packed: whether sequences are packed by cu_seqlens.
            window: the call's window, if it hides a key.
            deterministic: whether the same call has to give the same bits.
        """
        small = window is not None and window <= SMALL_WINDOW
        mask = (dtype, d, packed, window is not None)
        if deterministic or small:
            return cls(*mask, fused=False, skips=d == 64 and small)
        return cls(*mask)

    def can_implement(self) -> list[str]:
        reasons = super().can_implement()
        if self.skips and (self.fused or self.d != 64 or not self.window):
            reasons.append("tiles are skipped at d 64 with a window, where the kernel makes no dq")
        return reasons

    @property
    def key_blocks(self) -> int:
        """Blocks of 64 keys of a consumer warpgroup: two blocks halve the additions to dq at d 64."""
        return 2 if self.fused and self.d == 64 else 1

    @property
    def pair(self) -> bool:
        """Whether two CTAs of a cluster take neighbouring keys, which halves the additions to dq at d 128.

        Each CTA sends its dS to the other and makes half of the columns of dq, over the keys of both.
        """
        return self.fused and self.d == 128

    @property
    def adders(self) -> int:
        """Warps that have the copy engine add dq, one for each stage of dQ in shared memory: a pair has room for 1."""
        return (1 if self.pair else 2) if self.fused else 0

    @property
    def queries(self) -> int:
        """Queries of a tile. 128 halve the waits, but S and dP take twice the registers, and more is masked."""
        return 128 if self.d == 64 and not self.fused and not self.skips else QUERIES

    @property
    def keys_of_cta(self) -> int:
        """Keys of a CTA."""
        return ROWS * self.key_blocks * self.warpgroups

    @property
    def keys(self) -> int:
        """Keys of a work tile, which one CTA or a pair of them takes."""
        return self.keys_of_cta * (2 if self.pair else 1)

    @property
    def consumers(self) -> int:
        """Threads of the consumer warpgroups."""
        return 128 * self.warpgroups

    @property
    def threads(self) -> int:
        """Threads of a CTA: the load warpgroup and the consumer warpgroups."""
        return 128 + self.consumers

    @property
    def load_registers(self) -> int:
        """Registers of a thread of the load warpgroup."""
        return 40 if self.skips else 24

    @property
    def consumer_registers(self) -> int:
        """24 + 2 x 240 = 40 + 2 x 232 = 3 x 168 registers of 384 threads; ptxas spills or serializes with 232."""
        return 232 if self.skips else 240

    @property
    def bytes_of_keys(self) -> int:
        """Bytes of K and V of a CTA and, in a pair, of half of the columns of the other CTA's K."""
        return 2 * self.keys_of_cta * (2 * self.d + (self.columns if self.pair else 0))

    @property
    def reuses(self) -> bool:
        """Whether dK and dV are staged for their stores in the shared memory of K and V, because no other is left."""
        return self.fused

    @property
    def stages(self) -> int:
        """Tiles of Q and dO in flight: a power of two."""
        return 4 if self.d == 64 else 2

    @property
    def expected(self) -> dict[str, Any]:
        added = (("UBLKRED", "UBLKCP.S.S") if self.pair else ("UBLKRED",)) if self.fused else ()
        return {"registers": 168, "instructions": ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG", "MUFU.EX2", *added)}


@dataclass(frozen=True)
class SinkQueryGradSpec(SinkQuerySpec):
    """Compile-time facts of :class:`cute_kernels.sink.kernels.query_grad.SinkQueryGradKernel`: dq, query-stationary."""

    kernel: ClassVar[str] = "cute_kernels.sink.kernels.query_grad:SinkQueryGradKernel"
    row_operands: ClassVar[int] = 2  # Q and dO

    @classmethod
    def for_launch(cls, dtype: str, d: int, *, packed: bool, window: int | None, ratio: int) -> SinkQueryGradSpec:
        """Chooses the fastest variant for a call; arguments as in the forward.

        64 and 8 heads of 64 with a window of 128 take 0.71 ms grouped, 0.80 ms otherwise.
        """
        return cls(dtype, d, packed, window is not None, groups(d, window, ratio))


@dataclass(frozen=True)
class SinkPrepareSpec(SinkSpec):
    """Compile-time facts of :class:`cute_kernels.sink.kernels.prepare.SinkPrepareKernel`.

    fused   whether it sets the float32 sums of dq to 0
    given   whether the caller has delta
    """

    fused: bool = True
    given: bool = False

    kernel: ClassVar[str] = "cute_kernels.sink.kernels.prepare:SinkPrepareKernel"
    rows: ClassVar[int] = 2 * ROWS  # rows of a CTA

    @property
    def expected(self) -> dict[str, Any]:
        return {"registers": 64, "instructions": ("MUFU.EX2",) if self.given else ("LDG.E.128", "SHFL", "MUFU.EX2")}


@dataclass(frozen=True)
class SinkFinishSpec(SinkSpec):
    """Compile-time facts of :class:`cute_kernels.sink.kernels.finish.SinkFinishKernel`: after a fused backward."""

    kernel: ClassVar[str] = "cute_kernels.sink.kernels.finish:SinkFinishKernel"

    @property
    def expected(self) -> dict[str, Any]:
        return {"registers": 64, "instructions": ("LDG.E.128", "STG.E.128")}


def launched_specs(dtype: str) -> list[Any]:
    """Returns every variant that a backward can launch."""
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
    """Returns all variants of bfloat16 and one of float16; the others of float16 compile at their first call."""
    float16 = SinkBackwardSpec.for_launch("float16", 64, packed=False, window=None, deterministic=False)
    return [*launched_specs("bfloat16"), float16]
