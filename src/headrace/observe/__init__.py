"""What is seen of a running engine and of a measurement: counts, traces, log lines, progress, tables."""
