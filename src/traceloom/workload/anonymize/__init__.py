"""Traces without the names of their owners."""
