"""Prompts and answers on replicas apart: keys and values are handed from the one to the other."""
