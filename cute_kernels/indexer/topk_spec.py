"""Compile-time facts of the kernel that chooses the highest logits, and which variant a call gets."""

from dataclasses import dataclass
from typing import Any, ClassVar

WARP = 32
BINS = 2048
"""Bins of a histogram: one for exact zeros, 1023 for each sign."""
QUAD = 512
"""Logits that a warp loads at a time: four vectors of 16 bytes a lane."""
MAX_TOPK = 2048
CLUSTERS = (1, 2, 4, 8, 16)
PORTABLE = 8
"""CTAs of a cluster that every GPU can place. Launches ask for 16 if that takes at most half of the SMs."""
SHORT_QUADS, LONG_QUADS = 160, 1152
"""Quads of a CTA: 81,920 logits in 20 KB of marks, so that three CTAs share an SM; or 589,824 in 147 KB."""
CTA_LOGITS = 8192
"""Logits that a CTA takes before a row gets another one: one quad a warp."""


@dataclass(frozen=True)
class TopkSpec:
    """Compile-time facts of :class:`cute_kernels.indexer.kernels.select.TopkKernel`: constructor argument, cache key.

    cluster     CTAs that share a row
    quads       units of 512 logits that a CTA can mark, which limits the length of a row
    has_table   slots are wanted, through a block table; else positions
    has_starts  rows begin at positions of their own
    held        quads of a warp whose keys stay in registers from the first pass to the second
    """

    cluster: int
    quads: int = SHORT_QUADS
    has_table: bool = False
    has_starts: bool = False
    held: int = 0

    kernel: ClassVar[str] = "cute_kernels.indexer.kernels.select:TopkKernel"
    warps: ClassVar[int] = 16
    """Warps of a CTA."""
    list_size: ClassVar[int] = 2048
    """Logits of the crossing bin that the warps of a CTA keep beside their marks. A warp with more than its share of
    them reads its logits again."""

    @classmethod
    def for_launch(cls, rows: int, width: int, num_sms: int, *, has_table: bool, has_starts: bool) -> "TopkSpec":
        """Chooses the variant for `rows` rows of up to `width` logits.

        A row gets a CTA for each 8,192 logits, as long as there are SMs for all CTAs of the launch.
        """
        cluster = 1
        while cluster < PORTABLE and cluster * CTA_LOGITS < width and 2 * cluster * rows <= num_sms:
            cluster *= 2
        while cluster < PORTABLE and width > _most(cluster, LONG_QUADS):
            cluster *= 2
        if PORTABLE * CTA_LOGITS < width <= _most(2 * PORTABLE, SHORT_QUADS) and 4 * PORTABLE * rows <= num_sms:
            cluster = 2 * PORTABLE
        held = 2 if cluster > 1 else int(rows <= num_sms and not has_starts)
        return cls(cluster, quads_for(width, cluster), has_table, has_starts, held=held)

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return WARP * self.warps

    @property
    def mark_words(self) -> int:
        """32-bit words of marks of a warp, each of 16 logits."""
        return self.quads // self.warps * QUAD // 16

    @property
    def listed(self) -> int:
        """Logits in the list of a warp."""
        return self.list_size // self.warps

    def can_implement(self) -> list[str]:
        reasons = []
        if self.cluster not in CLUSTERS:
            reasons.append(f"cluster is {self.cluster}; a row has 1, 2, 4, 8 or 16 CTAs")
        if not 0 <= self.held <= 2:
            reasons.append(f"held is {self.held}; a warp has registers for 0 to 2 quads")
        if not 32 <= self.quads <= LONG_QUADS or self.quads % 32:
            reasons.append(f"quads is {self.quads}; a CTA marks a multiple of 32 up to {LONG_QUADS}")
        return reasons

    @property
    def expected(self) -> dict[str, Any]:
        """Limits of the compiled kernel: 64 registers let two CTAs of 512 threads share an SM.

        Keys stay in registers only if each CTA has an SM of its own.
        """
        registers = 128 if self.held else 64
        return {"registers": registers, "instructions": ("LDG.E.128", "ATOMS.POPC.INC.32")}


def quads_for(width: int, cluster: int) -> int:
    """Returns the quads of a CTA for rows of `width` logits, rounded to sizes that kernels are built for."""
    return SHORT_QUADS if width <= _most(cluster, SHORT_QUADS) else LONG_QUADS


def _most(cluster: int, quads: int) -> int:
    """Returns the longest row that a cluster can mark, wherever in 16 bytes it begins."""
    return cluster * quads * QUAD - 3


MAX_WIDTH = _most(PORTABLE, LONG_QUADS)
"""The longest row: 4.7 million logits."""


def shipped_specs() -> list[TopkSpec]:
    """Returns specs for slots with rows of every kind, and for positions as prompts ask for them."""
    slots = [TopkSpec(cluster, has_table=True, held=min(cluster, 2)) for cluster in CLUSTERS]
    long = [TopkSpec(1, LONG_QUADS, has_table=True), TopkSpec(8, LONG_QUADS, held=2)]
    return [*slots, TopkSpec(1, has_table=True), *long, TopkSpec(1, has_starts=True)]
