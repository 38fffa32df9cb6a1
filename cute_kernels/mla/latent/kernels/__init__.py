"""Device code of the latent decode kernel: what differs from `mla.kernels` by the format of keys."""
