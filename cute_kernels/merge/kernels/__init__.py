"""Device code that merges attention states."""
