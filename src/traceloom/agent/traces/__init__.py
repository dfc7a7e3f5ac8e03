"""Trace requests of a host."""
