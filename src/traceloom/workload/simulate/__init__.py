"""Simulation of a graph on another machine."""
