"""What is asked and when, and the figures of how it was answered: shared by benchmarks and simulations."""
