"""One step at a time: the loop, the executors' protocol, text in and out, the engine in its own process."""
