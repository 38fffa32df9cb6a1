"""The kernels in the stacks that serve models; each module is imported by name and says what it was tested with."""
