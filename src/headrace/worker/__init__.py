"""One process a device: rows, inputs, the model's forward, sampling, and the memory that they need."""
