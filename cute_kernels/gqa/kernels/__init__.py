"""Device code of GQA decoding and of the append."""
