"""What every room needs around its kernels: target, compilation, disk cache, checks, launching, torch registration.

Importing this package imports none of its modules.
"""
