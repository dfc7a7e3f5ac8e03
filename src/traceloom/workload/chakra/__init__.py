"""Chakra workloads: reading, writing, conversion, generation and validation."""
