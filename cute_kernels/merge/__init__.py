"""Merging attention states of disjoint key sets: splits, cascades, context parallelism."""
