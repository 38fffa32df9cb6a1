"""The indexer of sparse attention: append index keys, and choose the positions with the highest logits."""
