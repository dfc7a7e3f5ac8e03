"""Analyses across the captures of a fleet."""
