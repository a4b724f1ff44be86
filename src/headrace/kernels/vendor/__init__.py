"""The vendor's matrix products, with more of a say in them than torch gives.

What lives here: cuBLASLt, the algorithms that were measured to be best, the layers' callables. What may not: kernels of our own.
"""
