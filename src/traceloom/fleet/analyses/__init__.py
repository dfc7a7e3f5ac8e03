"""Analyses over captures of a fleet."""
