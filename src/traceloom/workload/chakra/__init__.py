"""Chakra workloads: convert, generate, validate."""
