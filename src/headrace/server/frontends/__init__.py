"""Several HTTP processes that share one engine, and what they share: parent, children, what they say to each other,
counters."""
