"""The KV cache: block pools, the prefix tree over them, and the manager, which is their only interface."""
