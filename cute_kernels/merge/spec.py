"""Compile-time facts of the merge kernel, and which variant serves which launch."""

from dataclasses import dataclass
from typing import Any, ClassVar

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
MAX_D = 512

VECTOR_BYTES = 16  # bytes of a load
BLOCK_SCALE_VALUES = 64  # neighbours that share a block scale, if states have block scales
LOADS_IN_FLIGHT = 8  # 16-byte loads of a thread: 32 registers
MIN_THREADS = 128
MAX_LANES = 128
MAX_GROUPS = 8
WARP = 32

MANY_ROWS = 1024  # 7.8 for each of 132 SMs


def _power_of_two_at_least(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _sum_alike(lanes: int, fewer: int, num_states: int) -> bool:
    """Whether a row's weights are added up in the same order with `lanes` and with `fewer` threads across a row.

    With a warp's worth of lanes or more, the same 32 lanes add. With fewer lanes than states each adds several.
    """
    return min(lanes, WARP) == min(fewer, WARP) or num_states <= fewer


@dataclass(frozen=True)
class MergeSpec:
    """Compile-time facts of `kernels.merge.MergeKernel`: constructor argument and cache key.

    d          values of a row, a multiple of 8 up to 512
    in_dtype   dtype of the states; out_dtype of the result: "float32", "bfloat16" or "float16"
    has_sink   an `s_aux` joins the denominator
    has_lse    the merged log-sum-exp is wanted
    lanes      threads across a row; a power of two up to 128
    groups     groups of such threads among which the states of a row are divided; a power of two
    loads      16-byte loads that a thread has in flight
    block_scales  a float32 divides each 64 neighbouring values of a state, so that float16 holds them
    eager      states are read before their log-sum-exps have arrived, empty states as well
    inf_if_empty  the merged log-sum-exp of empty states is +inf instead of -inf
    headers    a word follows each log-sum-exp; a row whose states differ in it becomes NaN
    """

    d: int
    in_dtype: str
    out_dtype: str
    has_sink: bool
    has_lse: bool
    lanes: int
    groups: int = 1
    loads: int = LOADS_IN_FLIGHT
    block_scales: bool = False
    eager: bool = False
    inf_if_empty: bool = False
    headers: bool = False

    kernel: ClassVar[str] = "cute_kernels.merge.kernels.merge:MergeKernel"

    @classmethod
    def for_launch(
        cls,
        *,
        rows: int,
        num_states: int,
        d: int,
        in_dtype: str,
        out_dtype: str,
        has_sink: bool = False,
        has_lse: bool = True,
        headers: bool = False,
    ) -> "MergeSpec":
        """Chooses the variant for `rows` rows of `num_states` states each.

        Many rows of few or small states: a thread takes two vectors or more, so that an SM holds more rows. This
        happens only if it changes no bit: a row's bits depend on its states, not on the rows beside it. So one group of
        threads adds states in order, though two would gain with few rows of many states.

        Microseconds on an H200, for 512 float32 into bfloat16:

        | rows | states | lanes x groups              |
        |------|--------|-----------------------------|
        | 128  | 16     | 128x2 2.90, 128x4 3.09      |
        | 128  | 64     | 128x2 4.49, 128x4 4.67      |
        | 256  | 16     | 128x1 3.51, 128x4 4.90      |
        | 512  | 64     | 128x1 18.8, 128x4 22.8      |
        | 1024 | 8      | 32x1 4.41, next best 4.94   |
        | 2048 | 8      | 32x1 6.37, next best 8.04   |

        At 100,000 rows all are equal from 8 states on. Many bfloat16 rows: 32x1 is best for d 512, 8x1 for d 128.
        """
        vectors = d * ITEMSIZE[in_dtype] // VECTOR_BYTES
        lanes = _power_of_two_at_least(vectors)
        if rows >= MANY_ROWS and (num_states <= 2 * LOADS_IN_FLIGHT or vectors <= MAX_LANES // 2):
            fewer = min(_power_of_two_at_least(-(-vectors // 2)), WARP)
            if _sum_alike(lanes, fewer, num_states):
                lanes = fewer
        return cls(d, in_dtype, out_dtype, has_sink, has_lse, lanes, headers=headers)

    def can_implement(self) -> list[str]:
        reasons = []
        if self.d % 8 or not 8 <= self.d <= MAX_D:
            reasons.append(f"d is {self.d}; a row is a multiple of 8 up to {MAX_D}")
        for name, dtype in (("in_dtype", self.in_dtype), ("out_dtype", self.out_dtype)):
            if dtype not in ITEMSIZE:
                reasons.append(f"{name} is {dtype}; known are {', '.join(ITEMSIZE)}")
        for name, value, limit in (("lanes", self.lanes, MAX_LANES), ("groups", self.groups, MAX_GROUPS)):
            if not 1 <= value <= limit or value & (value - 1):
                reasons.append(f"{name} is {value}; it is a power of two up to {limit}")
        if self.block_scales and self.d % (4 * BLOCK_SCALE_VALUES):
            reasons.append(f"d is {self.d}; with block scales it is a multiple of {4 * BLOCK_SCALE_VALUES}")
        if not reasons and self.vectors > self.loads:
            reasons.append(f"{self.lanes} lanes leave {self.vectors} vectors to each; {self.loads} are in flight")
        return reasons

    @property
    def vector(self) -> int:
        """Values of a 16-byte load."""
        return VECTOR_BYTES // ITEMSIZE[self.in_dtype]

    @property
    def vectors(self) -> int:
        """16-byte vectors of a row that one thread holds."""
        return -(-self.d // (self.vector * self.lanes))

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return max(MIN_THREADS, self.lanes * self.groups)

    @property
    def rows_per_cta(self) -> int:
        """Rows that a CTA merges."""
        return self.threads // (self.lanes * self.groups)

    @property
    def weight_lanes(self) -> int:
        """Threads among which the weights of a row are distributed: its own threads, a warp at most."""
        return min(WARP, self.lanes * self.groups)

    @property
    def round(self) -> int:
        """States that a row's threads load at once."""
        return self.unroll * self.groups

    @property
    def chunk(self) -> int:
        """States whose weights are made at once: a round, and at least one for each weight lane."""
        return max(self.weight_lanes, self.round)

    @property
    def weights(self) -> int:
        """Weights of a chunk that a thread makes."""
        return self.chunk // self.weight_lanes

    @property
    def sum_shape(self) -> tuple[int, int, int, int]:
        """Shape of the sums of a row that its groups leave for the first group, float32 in shared memory."""
        return self.vector, self.lanes, self.vectors, self.groups - 1

    @property
    def unroll(self) -> int:
        """States that a thread loads at a time: a power of two, as `weight_lanes` is."""
        return 1 << max(1, self.loads // self.vectors).bit_length() - 1

    @property
    def expected(self) -> dict[str, Any]:
        sums = self.vector * self.vectors
        return {"registers": 4 * self.loads + sums + 56, "instructions": ("LDG.E.128", "MUFU.EX2")}


def shipped_specs() -> list[MergeSpec]:
    """Returns float32 partials into bfloat16, and a cross-section of the other variants of `merge_states`."""
    split = MergeSpec.for_launch(
        rows=128, num_states=64, d=512, in_dtype="float32", out_dtype="bfloat16", has_sink=True
    )
    states = [
        MergeSpec.for_launch(rows=rows, num_states=n, d=d, in_dtype=dtype, out_dtype=dtype, has_sink=sink)
        for d, dtype, rows, n, sink in (
            (512, "bfloat16", 4096, 2, False),
            (512, "float32", 4096, 2, True),
            (128, "bfloat16", 64, 2, False),
            (128, "float16", 64, 16, True),
            (64, "float32", 64, 4, False),
            (72, "bfloat16", 64, 4, True),
            (8, "float16", 64, 4, False),
        )
    ]
    received = MergeSpec.for_launch(
        rows=128, num_states=4, d=512, in_dtype="bfloat16", out_dtype="bfloat16", headers=True
    )
    return [split, *states, received]
