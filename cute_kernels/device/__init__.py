"""Device primitives (`@cute.jit`) that the rooms' kernels share. No torch here."""
