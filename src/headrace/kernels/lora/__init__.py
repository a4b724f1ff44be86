"""Low-rank products of several adapters, added to a product's result."""
