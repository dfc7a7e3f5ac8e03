"""Times as ASTRA-sim computes them, and its own configuration."""
