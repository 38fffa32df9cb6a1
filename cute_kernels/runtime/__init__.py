"""What every operator needs around its kernels: target, compilation, disk cache, checks, launching, registration.

Importing this package imports none of its modules.
"""
