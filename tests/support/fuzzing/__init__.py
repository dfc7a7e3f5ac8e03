"""Generated damages of all formats, and every verb tried on them; `make fuzz` runs it."""
