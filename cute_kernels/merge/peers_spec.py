"""Compile-time facts of the kernel that exchanges states with peers and merges them."""

from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.merge.spec import ITEMSIZE, MAX_D, MAX_LANES, VECTOR_BYTES, MergeSpec

CTAS = 128
"""CTAs of every launch, whatever its rows: each counts its own launches, and all their counts stay equal. Two fit on an
SM, so that all run at the same time on a card of 64 SMs or more."""
MAX_RANKS = 64
FLAG_BYTES = MAX_RANKS * CTAS * 4
"""Bytes at the beginning of a rank's buffer: a flag for each CTA of each rank."""


@dataclass(frozen=True)
class PeerMergeSpec:
    """Compile-time facts of `kernels.peers.PeerMergeKernel`: constructor argument and cache key.

    d         values of a row, a multiple of 8 up to 512
    dtype     dtype of states and result: "float32", "bfloat16" or "float16"
    has_sink  an `s_aux` joins the denominator
    """

    d: int
    dtype: str
    has_sink: bool

    kernel: ClassVar[str] = "cute_kernels.merge.kernels.peers:PeerMergeKernel"
    threads: ClassVar[int] = 256
    copies: ClassVar[int] = 4
    """16-byte loads that a thread has in flight while it stores to peers."""

    def can_implement(self) -> list[str]:
        if self.d % 8 or not 8 <= self.d <= MAX_D:
            return [f"d is {self.d}; a row is a multiple of 8 up to {MAX_D}"]
        if self.dtype not in ITEMSIZE:
            return [f"dtype is {self.dtype}; known are {', '.join(ITEMSIZE)}"]
        return self.merge.can_implement()

    @property
    def row_vectors(self) -> int:
        """16-byte vectors of a row: its values, then one that begins with its log-sum-exp."""
        return self.d * ITEMSIZE[self.dtype] // VECTOR_BYTES + 1

    @property
    def merge(self) -> MergeSpec:
        """The merge of a row: one vector for each lane, all ranks of a host in one round."""
        lanes = min(1 << (self.row_vectors - 2).bit_length(), MAX_LANES)
        return MergeSpec(self.d, self.dtype, self.dtype, self.has_sink, has_lse=True, lanes=lanes, headers=True)

    @property
    def expected(self) -> dict[str, Any]:
        """Limits of the compiled kernel: 128 registers let two CTAs share an SM.

        A release at system scope is a fence and a store, an acquire a load after which L1 is dropped. The second strong
        store is the report of an expired wait.
        """
        ordered = ("MEMBAR.ALL.SYS", "LDG.E.STRONG.SYS", "CCTL.IVALL")
        return {
            "registers": 128,
            "instructions": ("LDG.E.128", "STG.E.128", "MUFU.EX2", *ordered),
            "at_least": {"STG.E.STRONG.SYS": 2},
        }


def shipped_specs() -> list[PeerMergeSpec]:
    """Returns specs for MLA in bfloat16, for GQA, and for the widest row."""
    return [
        PeerMergeSpec(512, "bfloat16", has_sink=False),
        PeerMergeSpec(512, "bfloat16", has_sink=True),
        PeerMergeSpec(128, "bfloat16", has_sink=True),
        PeerMergeSpec(64, "float16", has_sink=False),
        PeerMergeSpec(512, "float32", has_sink=True),
    ]
