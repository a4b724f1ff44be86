"""Benchmarks: commands that measure throughput, latency, start-up, kernels and techniques, measured or simulated."""
