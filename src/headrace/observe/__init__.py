"""Observability of a running engine and of measurements: counters, traces, logs, progress, tables."""
