"""Models: one decoder for all families, and their configs, weights and vocabularies in the forms in which they are
published."""
