"""Trace requests: their state, execution and files."""
