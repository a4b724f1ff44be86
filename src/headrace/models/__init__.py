"""What is computed: one decoder for every family, and configs, weights and vocabularies in the forms they come in."""
