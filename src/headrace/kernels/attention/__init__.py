"""Attention over paged keys and values, rotary embedding, the cache write.

What lives here: the twins (reference.py), their candidates, what those were measured to be best at. What may not:
layers, models.
"""
