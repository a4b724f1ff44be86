"""Shared by the tests: tiny models from a seed, files outside the repository, fake services. No test lives here."""
