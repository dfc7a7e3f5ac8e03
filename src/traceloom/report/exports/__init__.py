"""Files for other viewers."""
