"""Sizes of a key tile: the part that a CTA gathers, and the data that the two CTAs of a cluster exchange."""

from cute_kernels.device import token_cache
from cute_kernels.mla.kernels.tile import BLOCK_COLUMNS, NOPE, ROPE
from cute_kernels.mla.spec import TOKENS_PER_TILE

STAGES = 2
THREADS = 128  # threads of a warpgroup
WARP = 32

BLOCK = TOKENS_PER_TILE * BLOCK_COLUMNS  # elements of 64 columns of a key tile
BLOCKS = NOPE // BLOCK_COLUMNS

HALF = TOKENS_PER_TILE // 2  # rows that a CTA gathers
ROWS = token_cache.ROWS_PER_PASS
PASSES = HALF // ROWS  # passes of the load warpgroup over the rows that its CTA gathers

# Bytes of a key tile. Scales do not cross: the QK warpgroup of each CTA loads the scales of all 64 rows.
CODES_BYTES = PASSES * THREADS * 16 * token_cache.PIECES  # codes: each thread's pieces of 32 rows, as gathered
VALUES_BYTES = HALF * 2 * (NOPE + ROPE)  # values: 32 rows of 16-bit numbers, as wgmma reads them
