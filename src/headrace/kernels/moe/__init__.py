"""Sparse feed-forward networks.

What lives here: the twins (reference.py), their candidates, what those were measured to be best at. What may not:
layers, models.
"""
