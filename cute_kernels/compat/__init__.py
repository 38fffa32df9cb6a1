"""Other projects' entry points, translated to this package's own."""
