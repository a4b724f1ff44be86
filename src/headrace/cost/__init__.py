"""What a step costs: bytes, FLOPs and seconds from a model's shape and a device's limits, and how prices are fitted to
measured steps."""
