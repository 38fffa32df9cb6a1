"""Prefill and training attention with sinks and a sliding window, differentiable, and the way to the decode kernel."""
