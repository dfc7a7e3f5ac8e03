"""A synthetic fleet for demonstrations."""
