"""Sums over ranks, by a kernel of our own."""
