"""Device code of the indexer."""
