"""The operations, and who carries each one out.

Every operation has a plain-torch twin (reference.py): the CPU fallback, the oracle in tests, the check in benchmarks.
Faster candidates stand before it in an ordered list; each accepts the static facts of a call site or declines with a reason.

What lives here: the registry. What may not: any kernel.
"""
