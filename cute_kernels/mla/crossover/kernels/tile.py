"""Sizes of a key tile: what a CTA gathers of it, and what the two CTAs of a cluster hand to each other."""

from cute_kernels.device import token_cache
from cute_kernels.mla.kernels.tile import BLOCK_COLUMNS, NOPE, ROPE
from cute_kernels.mla.spec import TOKENS_PER_TILE

STAGES = 2
THREADS = 128  # of a warpgroup
WARP = 32

BLOCK = TOKENS_PER_TILE * BLOCK_COLUMNS  # elements of 64 columns of a key tile
BLOCKS = NOPE // BLOCK_COLUMNS

HALF = TOKENS_PER_TILE // 2  # rows that a CTA gathers
ROWS = token_cache.ROWS_PER_PASS
PASSES = HALF // ROWS  # of the load warpgroup over the rows that its CTA gathers

# Of a key tile, in bytes. Scales do not cross: the QK warpgroup of each CTA loads those of all 64 rows.
CODES_BYTES = PASSES * THREADS * 16 * token_cache.PIECES  # codes: each thread's pieces of 32 rows, as gathered
VALUES_BYTES = HALF * 2 * (NOPE + ROPE)  # values: 32 rows of 16-bit numbers, as wgmma reads them
