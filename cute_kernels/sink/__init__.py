"""Prefill and training attention with sinks and a sliding window, differentiable; short calls run the decode kernel."""
