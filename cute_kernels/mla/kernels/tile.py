"""Sizes of a key tile and of a token, which all MLA kernels take from here."""

from cute_kernels.mla.spec import TOKENS_PER_TILE
from fp8_mla.formats import V3_2

NOPE, ROPE = V3_2.nope_dim, V3_2.rope_dim
QK = V3_2.d_qk
QUANT_TILE = V3_2.quant_tile  # codes of a token that share a scale
QUANT_TILES = V3_2.num_scales  # scales of a token
TILE_BYTES = TOKENS_PER_TILE * V3_2.token_bytes
BLOCK_COLUMNS = 64  # columns of 16 bits, so 128 bytes: what the swizzle permutes
