"""The kernels in the stacks that serve models. Each module is imported by name and says what it was tested with."""
