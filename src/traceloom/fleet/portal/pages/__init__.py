"""Hand-written pages."""
