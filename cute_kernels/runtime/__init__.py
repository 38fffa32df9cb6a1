"""What every room needs around its kernels: target, compilation, disk cache, argument checks, torch registration.

Importing this package imports none of its modules.
"""
