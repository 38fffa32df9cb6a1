"""Services around every operator's kernels: target, compilation, disk cache, checks, launching, registration.

Importing this package imports none of its modules.
"""
