"""KV cache layouts: one frozen `CacheLayout` has everything that kernels, append, reference and ops know of each.

Pure Python over sizes and names of axes. To add a layout whose tokens are rows of d numbers, add it to `LAYOUTS`; see
docs/maintainers/extend.md.

Axes: b sequences, p pages, h heads of the cache, s tokens of a sequence, t tokens of a page, d head dimension, c chunks
of x values (16 bytes), g groups of d that share a scale. Kernels do not tell b from p, nor s from t: they call the
outer axis o and the tokens r (rows).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

HEAD_DIMS: Final = (64, 128, 256, 512)
ROTATED_DIMS: Final = (64, 128, 256)
"""Head dimensions of rotated vectors: `codes.FLIPPED` has a sign for each of 256 elements."""
GROUP_SIZES: Final = (32, 64)
CHUNK_BYTES: Final = 16
"""Bytes of the chunks into which a packed cache splits the head dimension of keys."""
ALIGNMENT: Final = 16
"""Base addresses and strides are multiples of it, in bytes, for TMA and the append kernel's 16-byte accesses."""

Which = Literal["k", "v"]

_KERNEL_NAMES: Final = {"ohrd": "heads_first", "orhd": "tokens_first"}
_X_PACKED_NAME: Final = "x_packed"
_TOKEN_MAJOR: Final = "bpsthcxdg"
"""The token-major order: sequences or pages, tokens, heads, the rest of d."""


class CacheSizes(NamedTuple):
    """Sizes of a cache: `outer` sequences or pages of `rows` tokens each."""

    outer: int
    rows: int
    h_kv: int
    d: int

    @property
    def num_slots(self) -> int:
        """Number of tokens that the cache has room for."""
        return self.outer * self.rows

    def place(self, slot: Any) -> tuple[Any, Any]:
        """Returns (outer, row) of a valid slot: ``page * page_size + offset``, or ``sequence * capacity + position``.

        `slot` is an int or a tensor of integers.
        """
        return slot // self.rows, slot % self.rows


class ScaleKind(NamedTuple):
    """The granularity of a scale tensor. `group_size` is 0 unless the granularity is per_group."""

    granularity: str
    group_size: int = 0

    @property
    def name(self) -> str:
        """Name in calls, specs and tables: the granularity, "per_group_32" or "per_group_64"."""
        return f"{self.granularity}_{self.group_size}" if self.group_size else self.granularity


@dataclass(frozen=True)
class CacheLayout:
    """A way to store a cache.

    name        name in calls
    key         axes of k_cache, outermost first
    value       axes of v_cache
    page_sizes  tokens of a page that the kernels accept; empty: every power of two. Unused without pages

    A *plain* layout stores d innermost in both caches; its other axes may have any order and any strides in multiples
    of 16 bytes. An *x-packed* layout splits the d of keys into chunks of x values, with tokens between the chunks, and
    stores values transposed, d before the tokens.
    """

    name: str
    key: str
    value: str
    page_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        outer_rows = "pt" if self.paged else "bs"
        if self.x_packed:
            known, needs = (self.key, self.value) == ("phctx", "phdt"), "phctx and phdt"
        else:
            known = self.key == self.value and sorted(self.key) == sorted(outer_rows + "hd") and self.key[-1] == "d"
            needs = f"{', '.join(outer_rows)} and h in any order, then d, the same for both caches"
        if not known:
            raise ValueError(f"layout {self.name!r}: got axes {self.key} and {self.value}; needs {needs}")

    # ---- what it is

    @property
    def paged(self) -> bool:
        """Whether a block table says where a sequence's tokens are."""
        return "p" in self.key

    @property
    def x_packed(self) -> bool:
        """Whether keys are chunks of 16 bytes, and values are transposed (d before the tokens)."""
        return "x" in self.key

    @property
    def outer(self) -> str:
        """The axis of sequences or pages."""
        return "p" if self.paged else "b"

    @property
    def rows(self) -> str:
        """The axis of the tokens of a sequence or page."""
        return "t" if self.paged else "s"

    @property
    def kernel_layout(self) -> str:
        """Name in `GqaDecodeSpec.layout`: a layout with pages and one without share it."""
        axes = self.kernel_words(self.key)
        return _X_PACKED_NAME if self.x_packed else _KERNEL_NAMES.get(axes, axes)

    # ---- axes and shapes

    def axes(self, which: Which) -> str:
        """Returns the axes of k_cache or v_cache."""
        return self.key if which == "k" else self.value

    def shape(self, which: Which, sizes: CacheSizes, itemsize: int) -> tuple[int, ...]:
        """Returns the shape of k_cache or v_cache."""
        x = CHUNK_BYTES // itemsize
        size = {
            self.outer: sizes.outer,
            self.rows: sizes.rows,
            "h": sizes.h_kv,
            "d": sizes.d,
            "c": sizes.d // x,
            "x": x,
        }
        return tuple(size[axis] for axis in self.axes(which))

    def scale_axes(self, granularity: str) -> str:
        """Returns the axes of a scale: those of v_cache less the ones that share the scale; g replaces d."""
        if granularity == "per_tensor":
            return ""
        shared = {"per_head": self.outer + self.rows + "d", "per_token": "hd", "per_token_head": "d", "per_group": ""}
        return "".join(axis for axis in self.value if axis not in shared[granularity]).replace("d", "g")

    def kernel_words(self, axes: str) -> str:
        """Translates `axes` to kernels' letters: o for sequences or pages, r for tokens."""
        return axes.replace(self.outer, "o").replace(self.rows, "r")

    @property
    def accepted_page_sizes(self) -> str:
        """The accepted page sizes in words."""
        return f"one of {self.page_sizes}" if self.page_sizes else "a power of two"

    def accepts_page_size(self, rows: int) -> bool:
        """Returns whether the kernels take pages of `rows` tokens."""
        power_of_two = rows >= 1 and rows & (rows - 1) == 0
        return power_of_two and (not self.page_sizes or rows in self.page_sizes)


LAYOUTS: Final = {
    layout.name: layout
    for layout in (
        CacheLayout("BNSH", "bhsd", "bhsd"),
        CacheLayout("BSNH", "bshd", "bshd"),
        CacheLayout("paged_NHD", "pthd", "pthd"),
        CacheLayout("paged_HND", "phtd", "phtd"),
        CacheLayout("paged_vllm", "phctx", "phdt", page_sizes=(8, 16, 32)),
    )
}
X_PACKED: Final = LAYOUTS["paged_vllm"]
"""The only packed layout: kernels for it take their axes from here."""


KERNEL_LAYOUTS: Final = ", ".join((*_KERNEL_NAMES.values(), _X_PACKED_NAME, "orders of o, r, h that end in d"))
"""Values of `GqaDecodeSpec.layout`, in words."""


def kernel_axes(kernel_layout: str) -> str:
    """Returns the axes of k_cache for a `GqaDecodeSpec.layout`, in kernels' letters: o, r, h, d (c, x if x-packed)."""
    if kernel_layout == _X_PACKED_NAME:
        return X_PACKED.kernel_words(X_PACKED.key)
    return {name: axes for axes, name in _KERNEL_NAMES.items()}.get(kernel_layout, kernel_layout)


def is_kernel_layout(kernel_layout: str) -> bool:
    """Returns whether a `CacheLayout` has this kernel_layout. An order that has a name goes only by the name."""
    axes = kernel_axes(kernel_layout)
    plain = sorted(axes) == sorted("ohrd") and axes[-1] == "d"
    return kernel_layout == _X_PACKED_NAME or (plain and _KERNEL_NAMES.get(axes, axes) == kernel_layout)


def token_major(axes: str) -> tuple[int, ...]:
    """Returns the permutation that orders axes as sequences or pages, tokens, heads, the rest of d."""
    return tuple(axes.index(axis) for axis in sorted(axes, key=_TOKEN_MAJOR.index))


def cache_sizes(
    layout: CacheLayout,
    k_shape: tuple[int, ...],
    v_shape: tuple[int, ...],
    itemsize: int,
    k_values: int = 1,
    v_values: int = 1,
) -> CacheSizes:
    """Returns the sizes that both caches agree on; their elements hold `k_values` and `v_values` numbers.

    Raises:
        ValueError: a shape does not fit the layout; the message names the argument.
    """
    if v_values > 1 and layout.x_packed:
        raise ValueError(f"layout: got {layout.name!r}; needs one whose tokens are rows, with 4-bit codes")
    for name, shape, axes in (("k_cache", k_shape, layout.key), ("v_cache", v_shape, layout.value)):
        if len(shape) != len(axes):
            raise ValueError(f"{name}: got shape {tuple(shape)}; layout {layout.name!r} needs {len(axes)} axes, {axes}")
    key, value = dict(zip(layout.key, k_shape, strict=True)), dict(zip(layout.value, v_shape, strict=True))
    if "x" in key:
        x = CHUNK_BYTES // itemsize
        if key["x"] != x:
            raise ValueError(f"k_cache: got x = {key['x']} in shape {tuple(k_shape)}; needs {x}, {CHUNK_BYTES} bytes")
        key["d"] = key["c"] * x
    key["d"] *= k_values
    value["d"] *= v_values
    if any(key[axis] != size for axis, size in value.items()):
        packed = f", with {v_values} values an element" if v_values > k_values else ""
        raise ValueError(f"v_cache: got shape {tuple(v_shape)}; needs the sizes of k_cache, {tuple(k_shape)}{packed}")
    sizes = CacheSizes(key[layout.outer], key[layout.rows], key["h"], key["d"])
    if sizes.d not in HEAD_DIMS:
        raise ValueError(f"k_cache: got head dimension {sizes.d}; needs one of {HEAD_DIMS}")
    if v_values > 1 and sizes.d not in ROTATED_DIMS:
        raise ValueError(f"v_cache: got head dimension {sizes.d}; needs one of {ROTATED_DIMS} with 4-bit values")
    if layout.paged and not layout.accepts_page_size(sizes.rows):
        needs = layout.accepted_page_sizes
        raise ValueError(f"k_cache: got page size {sizes.rows}; layout {layout.name!r} needs {needs}")
    return sizes


def scale_shapes(layout: CacheLayout, sizes: CacheSizes) -> dict[ScaleKind, tuple[int, ...]]:
    """Returns the shape of each kind of scale for a cache. per_tensor may also be ()."""
    size = {layout.outer: sizes.outer, layout.rows: sizes.rows, "h": sizes.h_kv}
    kinds = [ScaleKind(granularity) for granularity in ("per_head", "per_token", "per_token_head")]
    kinds += [ScaleKind("per_group", group_size) for group_size in GROUP_SIZES]
    shapes: dict[ScaleKind, tuple[int, ...]] = {ScaleKind("per_tensor"): (1,)}
    for kind in kinds:
        groups = {"g": sizes.d // kind.group_size} if kind.group_size else {}
        shapes[kind] = tuple({**size, **groups}[axis] for axis in layout.scale_axes(kind.granularity))
    return shapes


def scale_kind(name: str, shape: tuple[int, ...], layout: CacheLayout, sizes: CacheSizes) -> ScaleKind:
    """Returns the kind of a scale of this shape.

    A scale of one element is per_tensor: a cache of one head does not distinguish it from per_head.

    Raises:
        ValueError: no granularity has this shape, or several have it. In today's layouts only one can: ranks tell
            granularities apart, and a shape of rank 4 fits one group size.
    """
    if tuple(shape) in ((), (1,)):
        return ScaleKind("per_tensor")
    shapes = scale_shapes(layout, sizes)
    kinds = [kind for kind, known in shapes.items() if known == tuple(shape)]
    if len(kinds) != 1:
        names = (f"{kind.granularity} of {kind.group_size}" if kind.group_size else kind.granularity for kind in shapes)
        known = "; ".join(f"{label} {size}" for label, size in zip(names, shapes.values(), strict=True))
        trouble = "fits no granularity" if not kinds else "is ambiguous: " + ", ".join(k.granularity for k in kinds)
        raise ValueError(f"{name}: got shape {tuple(shape)}, which {trouble}; known are {known}")
    return kinds[0]
