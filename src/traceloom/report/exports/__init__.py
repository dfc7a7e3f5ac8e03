"""Exports to the formats of other viewers."""
