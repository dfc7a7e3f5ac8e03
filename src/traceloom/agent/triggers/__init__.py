"""The host's triggers."""
