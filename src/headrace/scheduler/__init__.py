"""Who goes, with how many tokens."""
