"""FP8 multi-head latent attention: decoding over the 656-byte token format, and appending to it."""
