"""Names and shapes of KV caches and of their scales: what an argument means follows from its shape alone.

Pure Python over tuples of sizes, so that the kernels' host side, the references and the tests share one understanding.
Axes: b sequences, p pages, h heads of the cache, s tokens of a sequence, t tokens of a page, d head dimension, c chunks
of x values (16 bytes), g groups of d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

HEAD_DIMS: Final = (64, 128, 256)
GROUP_SIZES: Final = (32, 64)
CHUNK_BYTES: Final = 16
"""paged_vllm packs the keys of a page in chunks of so many bytes of each token."""
VLLM_PAGE_SIZES: Final = (8, 16, 32)
GRANULARITIES: Final = ("per_tensor", "per_head", "per_token", "per_token_head", "per_group")


@dataclass(frozen=True)
class CacheLayout:
    """One way to store a cache.

    name    as callers spell it
    key     the axes of k_cache, outermost first
    value   those of v_cache
    """

    name: str
    key: str
    value: str

    @property
    def paged(self) -> bool:
        """Whether a block table says where a sequence's tokens are."""
        return "p" in self.key

    @property
    def token_axes(self) -> str:
        """Axes of a per_token_head scale: those of the cache without d, tokens innermost where d was split."""
        return "pht" if self.name == "paged_vllm" else self.key.replace("d", "")

    @property
    def group_axes(self) -> str:
        """Axes of a per_group scale: g stands where d does; in paged_vllm that is before the tokens."""
        return "phgt" if self.name == "paged_vllm" else self.key.replace("d", "g")


LAYOUTS: Final = {
    layout.name: layout
    for layout in (
        CacheLayout("BNSH", "bhsd", "bhsd"),
        CacheLayout("BSNH", "bshd", "bshd"),
        CacheLayout("paged_NHD", "pthd", "pthd"),
        CacheLayout("paged_HND", "phtd", "phtd"),
        CacheLayout("paged_vllm", "phctx", "phdt"),
    )
}


class CacheSizes(NamedTuple):
    """Sizes of a cache: `outer` sequences or pages of `rows` tokens each."""

    outer: int
    rows: int
    h_kv: int
    d: int


class ScaleKind(NamedTuple):
    """What a scale tensor means. `group_size` is 0 unless the granularity is per_group."""

    granularity: str
    group_size: int = 0


def cache_sizes(layout: CacheLayout, k_shape: tuple[int, ...], v_shape: tuple[int, ...], itemsize: int) -> CacheSizes:
    """The sizes that both caches agree on.

    Raises:
        ValueError: a shape that the layout does not have; the message names the argument.
    """
    for name, shape, axes in (("k_cache", k_shape, layout.key), ("v_cache", v_shape, layout.value)):
        if len(shape) != len(axes):
            raise ValueError(f"{name}: got shape {tuple(shape)}; layout {layout.name!r} needs {len(axes)} axes, {axes}")
    key, value = dict(zip(layout.key, k_shape, strict=True)), dict(zip(layout.value, v_shape, strict=True))
    if "x" in key:
        x = CHUNK_BYTES // itemsize
        if key["x"] != x:
            raise ValueError(f"k_cache: got x = {key['x']} in shape {tuple(k_shape)}; needs {x}, {CHUNK_BYTES} bytes")
        key["d"] = key["c"] * x
    if any(key[axis] != size for axis, size in value.items()):
        raise ValueError(f"v_cache: got shape {tuple(v_shape)}; needs the sizes of k_cache, {tuple(k_shape)}")
    outer, rows = ("p", "t") if layout.paged else ("b", "s")
    sizes = CacheSizes(key[outer], key[rows], key["h"], key["d"])
    if sizes.d not in HEAD_DIMS:
        raise ValueError(f"k_cache: got head dimension {sizes.d}; needs one of {HEAD_DIMS}")
    if layout.paged:
        known = VLLM_PAGE_SIZES if layout.name == "paged_vllm" else None
        if (known and sizes.rows not in known) or sizes.rows < 1 or sizes.rows & (sizes.rows - 1):
            needs = f"one of {known}" if known else "a power of two"
            raise ValueError(f"k_cache: got page size {sizes.rows}; layout {layout.name!r} needs {needs}")
    return sizes


def scale_shapes(layout: CacheLayout, sizes: CacheSizes) -> dict[ScaleKind, tuple[int, ...]]:
    """The shape of each kind of scale for a cache. per_tensor may also be ()."""
    outer, rows = ("p", "t") if layout.paged else ("b", "s")
    size = {outer: sizes.outer, rows: sizes.rows, "h": sizes.h_kv}

    def shape(axes: str, groups: int = 0) -> tuple[int, ...]:
        return tuple(groups if axis == "g" else size[axis] for axis in axes)

    shapes = {
        ScaleKind("per_tensor"): (1,),
        ScaleKind("per_head"): shape("h"),
        ScaleKind("per_token"): shape(layout.token_axes.replace("h", "")),
        ScaleKind("per_token_head"): shape(layout.token_axes),
    }
    for group_size in GROUP_SIZES:
        shapes[ScaleKind("per_group", group_size)] = shape(layout.group_axes, sizes.d // group_size)
    return shapes


def scale_kind(name: str, shape: tuple[int, ...], layout: CacheLayout, sizes: CacheSizes) -> ScaleKind:
    """What a scale of this shape means.

    A scale of one element is per_tensor, which a cache of one head does not distinguish from per_head.

    Raises:
        ValueError: no granularity has this shape, or several do (BNSH, per_token against per_head, cannot be: their
            ranks differ; a rank-4 shape fits one group size only).
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
