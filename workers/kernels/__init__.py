"""Leaf kernels on addresses and numbers, compiled by Numba. They know nothing of requests, models or processes."""
