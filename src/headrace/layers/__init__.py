"""What a decoder is made of: linear, attention, feed-forward and norms, each over the kernels that its facts chose."""
