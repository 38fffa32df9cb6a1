"""What tests and benchmarks share: the tolerance rule, adversarial inputs, timers and the record of a run."""
