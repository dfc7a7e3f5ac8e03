"""ASTRA-sim's way of simulating."""
