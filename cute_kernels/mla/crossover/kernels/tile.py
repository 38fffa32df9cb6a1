"""Sizes of a key tile in the crossover: its stages, and what the two CTAs of a cluster send each other."""

from cute_kernels.device import token_cache
from cute_kernels.mla.kernels.tile import BLOCK_COLUMNS, NOPE, ROPE
from cute_kernels.mla.spec import TOKENS_PER_TILE

STAGES = 2
THREADS = 128
WARP = 32
ROWS = token_cache.ROWS_PER_PASS
BLOCK = TOKENS_PER_TILE * BLOCK_COLUMNS  # elements of it
BLOCKS = NOPE // BLOCK_COLUMNS

# What a CTA of a cluster sends to the other one of every tile, in bytes: each thread's pieces of 32 rows, or the rows
# as wgmma reads them. The QK warpgroup of each CTA loads the scales itself.
HALF = TOKENS_PER_TILE // 2
CODES_BYTES = HALF // ROWS * THREADS * 16 * token_cache.PIECES
PASSES = HALF // ROWS  # of a CTA over its own rows of a tile
VALUES_BYTES = HALF * 2 * (NOPE + ROPE)
