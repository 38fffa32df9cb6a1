"""GQA decoding over INT8, FP8 and 16-bit caches, in every layout, and the append that fills them."""
