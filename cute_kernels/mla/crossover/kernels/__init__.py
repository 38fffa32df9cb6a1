"""Device code of the crossover: its warp roles and what they share."""
