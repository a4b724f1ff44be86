"""What is it worth: commands that measure throughput, latency, a start, kernels and techniques, here or simulated."""
