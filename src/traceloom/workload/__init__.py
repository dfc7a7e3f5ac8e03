"""Workloads: Chakra, simulation, replay, anonymizing."""
