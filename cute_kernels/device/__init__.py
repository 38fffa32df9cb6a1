"""Device primitives (`@cute.jit`) that the kernels of all packages share. They never import torch."""
