"""Evaluating a graph: new times from durations and delays."""
