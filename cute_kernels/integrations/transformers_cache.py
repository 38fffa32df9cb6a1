"""`CuteInt8Cache` of transformers.py: keys and values of a model in INT8, half the bytes of bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from cute_kernels.gqa.append_op import kv_int8_append
from cute_kernels.gqa.op import MAX_S_Q

NAME = "cute"
"""What `attn_implementation` and `set_attn_implementation` call the attention that reads these codes."""
LAYER = "_cute_int8_layer"
"""Attribute of the keys that `CuteInt8Layer.update` returns: the layer, which has their scales."""
FIRST_CAPACITY = 256  # tokens


class _Positions:
    """Slots of new tokens and lengths of sequences, which all layers of a cache share: made once a step."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, torch.Tensor]] = {}

    def slots(self, batch: int, start: int, tokens: int, capacity: int, device: torch.device) -> torch.Tensor:
        """(batch * tokens,) int64: where tokens `start` to `start + tokens` of each sequence lie."""

        def make() -> torch.Tensor:
            first = torch.arange(batch, dtype=torch.int64, device=device).unsqueeze(1) * capacity + start
            return (first + torch.arange(tokens, dtype=torch.int64, device=device)).flatten()

        return self._once("slots", (batch, start, tokens, capacity, device), make)

    def lengths(self, batch: int, length: int, device: torch.device) -> torch.Tensor:
        """(batch,) int32."""

        def make() -> torch.Tensor:
            return torch.full((batch,), length, dtype=torch.int32, device=device)

        return self._once("lengths", (batch, length, device), make)

    def _once(self, name: str, key: Any, make: Any) -> torch.Tensor:
        known = self._known.get(name)
        if known is None or known[0] != key:
            known = self._known[name] = (key, make())
        return known[1]


class CuteInt8Layer(CacheLayerMixin):
    """The INT8 keys and values of a layer, (batch, kv_heads, capacity, d), and a scale for each token and head.

    Layers with a window keep all tokens; the kernel reads only those in the window.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(
        self,
        config: Any,
        positions: _Positions,
        max_length: int | None = None,
        scale_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self._config, self._positions = config, positions
        self.max_length, self.scale_dtype = max_length, scale_dtype
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates for keys and values like these."""
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads, _, d = key_states.shape
        shape = (batch, heads, self.max_length or 0, d)
        self.keys, self.values = (torch.zeros(shape, dtype=torch.int8, device=self.device) for _ in range(2))
        self.key_scales, self.value_scales = (
            torch.ones(shape[:3], dtype=self.scale_dtype, device=self.device) for _ in range(2)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantizes and stores new tokens.

        Args:
            key_states: (batch, kv_heads, tokens, d) bfloat16 or float16.
            value_states: likewise.
            args: not read.
            kwargs: not read.

        Returns:
            What the attention function gets: of a prompt the tokens as they came; INT8 codes, which "cute" knows, for
            up to 8 tokens more; else all tokens, dequantized.

        Raises:
            ValueError: the cache is full, has tokens of another batch, or `kv_int8_append` refuses the tokens.
        """
        batch, heads, tokens, d = key_states.shape
        start = self.length
        if not self.is_initialized or (start == 0 and self._batch_and_device() != (batch, key_states.device)):
            self.lazy_initialization(key_states, value_states)
        if self._batch_and_device()[0] != batch:  # an append would skip the slots that the cache does not have
            raise ValueError(
                f"key_states: got a batch of {batch}; needs {self.keys.shape[0]} sequences, of which the cache has"
                " tokens, or reset() before"
            )
        self._reserve(start + tokens)
        slots = self._positions.slots(batch, start, tokens, self.keys.shape[2], self.device)
        k, v = (t.transpose(1, 2).reshape(batch * tokens, heads, d) for t in (key_states, value_states))
        kv_int8_append(k, v, self.keys, self.values, self.key_scales, self.value_scales, slots, layout="BNSH")
        self.length += tokens
        if start == 0:
            return key_states, value_states
        if tokens > MAX_S_Q or self._config._attn_implementation != NAME:
            return self.dense_keys(key_states.dtype), self.dense_values(key_states.dtype)
        codes = self.keys[:, :, : self.length]
        setattr(codes, LAYER, self)
        return codes, self.values[:, :, : self.length]

    def _batch_and_device(self) -> tuple[int, torch.device]:
        return self.keys.shape[0], self.keys.device

    def _reserve(self, length: int) -> None:
        """Makes room for so many tokens: twice as much as there was, which seldom plans the kernels anew."""
        capacity = self.keys.shape[2]
        if length <= capacity:
            return
        if self.max_length is not None:
            raise ValueError(f"max_length: got {self.max_length}; needs {length}, the tokens that come")
        while capacity < length:
            capacity = max(2 * capacity, FIRST_CAPACITY)
        for name in ("keys", "values", "key_scales", "value_scales"):
            old = getattr(self, name)
            unwritten = 0 if old.dtype is torch.int8 else 1
            shape = (*old.shape[:2], capacity, *old.shape[3:])
            more = torch.full(shape, unwritten, dtype=old.dtype, device=old.device)
            more[:, :, : self.length] = old[:, :, : self.length]
            setattr(self, name, more)

    def lengths(self) -> torch.Tensor:
        """(batch,) int32, tokens of each sequence."""
        return self._positions.lengths(self.keys.shape[0], self.length, self.keys.device)

    def dense_keys(self, dtype: torch.dtype) -> torch.Tensor:
        """All keys, dequantized: (batch, kv_heads, tokens, d)."""
        return (self.keys[:, :, : self.length] * self.key_scales[:, :, : self.length, None].float()).to(dtype)

    def dense_values(self, dtype: torch.dtype) -> torch.Tensor:
        """All values, dequantized: (batch, kv_heads, tokens, d)."""
        return (self.values[:, :, : self.length] * self.value_scales[:, :, : self.length, None].float()).to(dtype)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that the next call of so many queries sees."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens of a sequence."""
        return self.length

    def get_max_length(self) -> int:
        """Tokens that it can hold; -1 where it grows."""
        return -1 if self.max_length is None else self.max_length

    def reset(self) -> None:
        """Forgets all tokens. The memory is kept, for another batch of as many sequences."""
        self.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens, `tokens_to_remove` at most 0 of them, as transformers counts."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: got {tokens_to_remove}; needs minus the number of tokens")
        self.length = max(self.length + int(tokens_to_remove), 0)  # 5.17 passes a tensor

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Gives each sequence the tokens of another, for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each sequence."""
        if self.is_initialized:
            indices = torch.arange(self.keys.shape[0], dtype=torch.int64, device=self.keys.device)
            self.batch_select_indices(indices.repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps some sequences."""
        if self.is_initialized:
            for name in ("keys", "values", "key_scales", "value_scales"):
                old = getattr(self, name)
                setattr(self, name, old[indices.to(old.device)])


class CuteInt8Cache(Cache):
    """An INT8 cache of half the bytes for `model.generate(past_key_values=...)`, with a scale per token and head."""

    def __init__(self, config: Any, *, max_length: int | None = None, scale_dtype: torch.dtype = torch.float32) -> None:
        """A cache for one batch of sequences of equal length.

        Args:
            config: of the model. With another attention than "cute" its layers get dequantized tokens.
            max_length: tokens of a sequence, allocated at once; default: it grows by doubling.
            scale_dtype: float32 or float16.

        Raises:
            ValueError: a layer has neither full attention nor a window, or another argument does not fit.
        """
        config = config.get_text_config(decoder=True)
        known = ("full_attention", "sliding_attention")
        others = sorted({*(getattr(config, "layer_types", None) or ())} - {*known})
        if others or getattr(config, "kv_sharing_modes", None):
            raise ValueError(f"config: got layers of {others or 'shared keys'}; needs {' and '.join(known)} alone")
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length: got {max_length}; needs None or at least 1")
        if scale_dtype not in (torch.float32, torch.float16):
            raise ValueError(f"scale_dtype: got {scale_dtype}; needs torch.float32 or torch.float16")
        positions = _Positions()
        layers = [CuteInt8Layer(config, positions, max_length, scale_dtype) for _ in range(config.num_hidden_layers)]
        super().__init__(layers=layers)
