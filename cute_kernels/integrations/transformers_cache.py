"""`CuteInt8Cache` of transformers.py keeps keys and values of a model in INT8 or 4 bits.

`GrowingLayer` and `say_once` also serve transformers_mla.py.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from transformers.cache_utils import Cache, DynamicLayer

from cute_kernels.gqa.append_op import kv_append, stored_rows
from cute_kernels.gqa.gather_op import dense
from cute_kernels.gqa.plan import MAX_S_Q

NAME = "cute"
"""The name of the attention that reads these codes, for `attn_implementation` and `set_attn_implementation`."""
LAYER = "_cute_int8_layer"
"""Attribute of the keys that `CuteInt8Layer.update` returns; it is the layer, which has their scales."""
FIRST_CAPACITY = 256  # tokens
INT8 = "int8"
STORED = (INT8, "int8_k_int4_v", "int4")
"""Kinds of `kv_append` that a cache may use."""


@functools.cache
def say_once(name: str, reason: str) -> None:
    """Warns that an attention runs without kernels."""
    warnings.warn(f'"{name}" attention runs in plain torch for {reason}', UserWarning, stacklevel=4)


def check_max_length(max_length: int | None) -> None:
    """Raises for a cache that cannot hold a token."""
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length: got {max_length}; needs None or at least 1")


class Positions:
    """Slots of new tokens and lengths of sequences, made once a step and shared by all layers of a cache."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, torch.Tensor]] = {}

    def slots(self, batch: int, start: int, tokens: int, capacity: int, device: torch.device) -> torch.Tensor:
        """Returns the slots of tokens `start` to `start + tokens` of each sequence, (batch * tokens,) int64."""
        rows = functools.partial(torch.arange, batch, dtype=torch.int64, device=device)
        some = functools.partial(torch.arange, start, start + tokens, dtype=torch.int64, device=device)
        key = (batch, start, tokens, capacity, device)
        return self._once("slots", key, lambda: (rows().unsqueeze(1) * capacity + some()).flatten())

    def lengths(self, batch: int, length: int, device: torch.device) -> torch.Tensor:
        """Returns the lengths, (batch,) int32."""
        make = functools.partial(torch.full, (batch,), length, dtype=torch.int32, device=device)
        return self._once("lengths", (batch, length, device), make)

    def table(self, batch: int, pages: int, device: torch.device) -> torch.Tensor:
        """Returns the pages of each sequence, one sequence after the other: (batch, pages) int32."""
        every = functools.partial(torch.arange, batch * pages, dtype=torch.int32, device=device)
        return self._once("table", (batch, pages, device), lambda: every().view(batch, pages))

    def _once(self, name: str, key: Any, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        known = self._known.get(name)
        if known is None or known[0] != key:
            known = self._known[name] = (key, make())
        return known[1]


class GrowingLayer(DynamicLayer):
    """A layer's tokens, equally many of each sequence, in tensors that have room for more.

    It only knows where tokens lie; a subclass allocates the tensors in `lazy_initialization`.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    stored: ClassVar[tuple[str, ...]]
    """Attributes that hold tokens; sequences are their first dimension."""
    token_dim: ClassVar[int]
    """The dimension of each tensor that counts tokens."""

    def __init__(self, config: Any, positions: Positions, max_length: int | None = None) -> None:
        super().__init__()
        self._config, self._positions, self.max_length = config, positions, max_length
        self.length = 0

    def __getstate__(self) -> dict[str, Any]:
        """Pickles without the config: a copy's config would not notice when its model gets another attention."""
        return {**vars(self), "_config": None}

    def serves(self, name: str) -> bool:
        """Whether the model's attention has this name; False for a copy that no attention of ours has read yet."""
        return self._config is not None and self._config._attn_implementation == name

    def for_any_attention(self, keys: torch.Tensor, attribute: str) -> None:
        """Marks a copy's dequantized keys with this layer: our attentions may read its codes and set its config."""
        if self._config is None:
            setattr(keys, attribute, self)

    def read_by(self, module: Any) -> None:
        """Takes the config of the attention layer that reads, unless there is one."""
        if self._config is None:
            self._config = getattr(module, "config", None)

    @property
    def capacity(self) -> int:
        """Number of tokens of a sequence that memory is allocated for."""
        return self.keys.shape[self.token_dim]

    def new_slots(self, key_states: torch.Tensor, value_states: torch.Tensor) -> torch.Tensor:
        """Makes room for new tokens.

        Args:
            key_states: (batch, heads, tokens, d).
            value_states: likewise.

        Returns:
            (batch * tokens,) int64, the slots of the new tokens.

        Raises:
            ValueError: the cache is full, or has tokens of another batch.
        """
        batch, _, tokens, _ = key_states.shape
        wanted = batch, key_states.device
        if not self.is_initialized or (self.length == 0 and (self.keys.shape[0], self.keys.device) != wanted):
            self.lazy_initialization(key_states, value_states)
        if self.keys.shape[0] != batch:  # an append would skip slots that the cache does not have
            raise ValueError(
                f"key_states: got a batch of {batch}; needs {self.keys.shape[0]} sequences, of which the cache has"
                " tokens, or reset() before"
            )
        self._reserve(self.length + tokens)
        return self._positions.slots(batch, self.length, tokens, self.capacity, self.device)

    def _reserve(self, length: int) -> None:
        """Makes room for `length` tokens: twice as much as before, so that kernels are seldom planned anew."""
        capacity = self.capacity
        if length <= capacity:
            return
        if self.max_length is not None:
            raise ValueError(f"max_length: got {self.max_length}; needs {length}, the tokens that come")
        while capacity < length:
            capacity = max(2 * capacity, FIRST_CAPACITY)
        for name in self.stored:
            old = getattr(self, name)
            shape = list(old.shape)
            shape[self.token_dim] = capacity
            unwritten = 1 if old.is_floating_point() else 0
            more = torch.full(shape, unwritten, dtype=old.dtype, device=old.device)
            self._written(more).copy_(self._written(old))
            setattr(self, name, more)

    def _written(self, t: torch.Tensor) -> torch.Tensor:
        """Returns the part of a tensor that has tokens."""
        return t.narrow(self.token_dim, 0, self.length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns length and offset of the keys that the next call of `query_length` queries sees."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Returns the number of tokens of a sequence."""
        return self.length

    def get_max_length(self) -> int:
        """Returns how many tokens the layer can hold; -1 if it grows."""
        return -1 if self.max_length is None else self.max_length

    def reset(self) -> None:
        """Forgets all tokens. The memory is kept, for another batch of as many sequences."""
        self.length = 0

    def offload(self) -> None:
        """Moves all tokens to the CPU."""
        self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Moves all tokens back to the GPU."""
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        if self.is_initialized:
            for name in self.stored:
                setattr(self, name, getattr(self, name).to(device, non_blocking=True))

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens; `tokens_to_remove` is minus their number, or 0, as in transformers."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: got {tokens_to_remove}; needs minus the number of tokens")
        self.length = max(self.length + int(tokens_to_remove), 0)  # 5.17 passes a tensor

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Gives each sequence the tokens of another, for beam search."""
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each sequence."""
        if self.is_initialized:
            indices = torch.arange(self.keys.shape[0], dtype=torch.int64, device=self.keys.device)
            self._select(indices.repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps some sequences."""
        self._select(indices)

    def _select(self, indices: torch.Tensor) -> None:
        """Selects in these tensors only: upstream's layer with an indexer selects its keys in the methods above."""
        if self.is_initialized:
            for name in self.stored:
                old = getattr(self, name)
                setattr(self, name, old[indices.to(old.device)])


class CuteInt8Layer(GrowingLayer):
    """The INT8 keys and values of a layer, (batch, kv_heads, capacity, d), with a scale for each token and head.

    With kind "int8_k_int4_v" values are d / 2 bytes, as `kv_append` stores them; with "int4" keys are too.

    Layers with a window keep all tokens; the kernel only reads those in the window.
    """

    stored = ("keys", "values", "key_scales", "value_scales")
    token_dim = 2

    def __init__(
        self,
        config: Any,
        positions: Positions,
        max_length: int | None = None,
        scale_dtype: torch.dtype = torch.float32,
        kind: str = INT8,
    ) -> None:
        super().__init__(config, positions, max_length)
        self.scale_dtype, self.kind = scale_dtype, kind

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates tensors for keys and values of these shapes and dtypes."""
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads, _, d = key_states.shape
        shape = (batch, heads, self.max_length or 0)
        self.keys, self.values = (
            torch.zeros((*shape, size), dtype=dtype, device=self.device) for dtype, size in stored_rows(self.kind, d)
        )
        self.key_scales, self.value_scales = (
            torch.ones(shape, dtype=self.scale_dtype, device=self.device) for _ in range(2)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantizes and stores new tokens.

        Args:
            key_states: (batch, kv_heads, tokens, d) bfloat16 or float16.
            value_states: likewise.
            args: ignored.
            kwargs: ignored.

        Returns:
            The attention function's inputs: the given tokens for a prompt; codes, which "cute" reads, for up to 8 later
            tokens; else all tokens, dequantized.

        Raises:
            ValueError: the cache is full, has tokens of another batch, or `kv_append` refuses the tokens.
        """
        batch, heads, tokens, d = key_states.shape
        start = self.length
        slots = self.new_slots(key_states, value_states)
        k, v = (t.transpose(1, 2).reshape(batch * tokens, heads, d) for t in (key_states, value_states))
        caches = (self.keys, self.values, self.key_scales, self.value_scales)
        kv_append(k, v, *caches, slots, layout="BNSH", kind=self.kind)
        self.length += tokens
        if start == 0:
            return key_states, value_states
        if tokens > MAX_S_Q or not self.serves(NAME):
            k = self.dense_keys(key_states.dtype)
            if tokens <= MAX_S_Q:
                self.for_any_attention(k, LAYER)
            return k, self.dense_values(key_states.dtype)
        codes = self._written(self.keys)
        setattr(codes, LAYER, self)
        return codes, self._written(self.values)

    def lengths(self) -> torch.Tensor:
        """Returns the number of tokens of each sequence, (batch,) int32."""
        return self._positions.lengths(self.keys.shape[0], self.length, self.keys.device)

    def dense_keys(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns all keys, dequantized: (batch, kv_heads, tokens, d)."""
        return dense(self._written(self.keys), self._written(self.key_scales), dtype)

    def dense_values(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns all values, dequantized: (batch, kv_heads, tokens, d)."""
        return dense(self._written(self.values), self._written(self.value_scales), dtype)


class CuteInt8Cache(Cache):
    """An INT8 cache of half the bytes for `model.generate(past_key_values=...)`, with a scale per token and head."""

    def __init__(
        self,
        config: Any,
        *,
        max_length: int | None = None,
        scale_dtype: torch.dtype = torch.float32,
        kind: str = INT8,
    ) -> None:
        """Makes a cache for one batch of sequences of equal length.

        Args:
            config: the model's. Under another attention than "cute" its layers get dequantized tokens.
            max_length: tokens of a sequence, allocated at once; default: it grows by doubling.
            scale_dtype: float32 or float16.
            kind: "int8"; or with float32 scales "int8_k_int4_v", rotated 4-bit values: 0.39 of bfloat16's bytes with
                heads of 128; "int4", rotated 4-bit keys and values: 0.27.

        Raises:
            ValueError: a layer has neither full attention nor a window, or another argument does not fit.
        """
        config = config.get_text_config(decoder=True)
        known = ("full_attention", "sliding_attention")
        others = sorted({*(getattr(config, "layer_types", None) or ())} - {*known})
        if others or "reuse" in (getattr(config, "kv_sharing_modes", None) or ()):
            raise ValueError(f"config: got layers of {others or 'shared keys'}; needs {' and '.join(known)} alone")
        check_max_length(max_length)
        if scale_dtype not in (torch.float32, torch.float16):
            raise ValueError(f"scale_dtype: got {scale_dtype}; needs torch.float32 or torch.float16")
        if kind not in STORED:
            raise ValueError(f"kind: got {kind!r}; needs one of {', '.join(STORED)}")
        if kind != INT8 and scale_dtype is not torch.float32:
            raise ValueError(f"scale_dtype: got {scale_dtype}; needs torch.float32 with {kind!r}")
        positions, count = Positions(), config.num_hidden_layers
        layers = [CuteInt8Layer(config, positions, max_length, scale_dtype, kind) for _ in range(count)]
        super().__init__(layers=layers)
