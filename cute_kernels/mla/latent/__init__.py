"""MLA decoding over any latent cache format, of one cache or of two in one softmax."""
