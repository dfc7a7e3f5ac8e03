"""Attaching to a running process."""
