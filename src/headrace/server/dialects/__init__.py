"""The APIs that clients speak, a file each: what a body may hold, the conversation it means, and how the answer reads.

What they share is in body.py (a decoded body becomes a checked struct, or an error that names the field) and
body.py (how fields map to SamplingParams), so that there is one validator for all of them. What may not live here:
HTTP, the bounds of sampling parameters (request.py checks them once for every route).
"""
