"""Cost of a step: bytes, FLOPs and seconds from a model's shape and a device's limits, with prices fitted to measured
steps."""
