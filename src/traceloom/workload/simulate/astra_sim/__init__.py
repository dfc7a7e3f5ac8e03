"""Simulation with ASTRA-sim's semantics."""
