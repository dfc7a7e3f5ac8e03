"""Accelerators of a host."""
