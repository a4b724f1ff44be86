"""Where keys and values live: block pools, the prefix tree over them, and the manager, their one face."""
