"""Kernels for the CPU: C compiled at first use, and a library's.

What lives here: one file a source or library. What may not: model knowledge, tensor allocation policy.
"""
