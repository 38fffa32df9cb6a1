"""Device code of MLA decoding without an exchange (S^T = K Q^T), and of the append."""
