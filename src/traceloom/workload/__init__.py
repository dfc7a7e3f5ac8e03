"""Workloads: Chakra traces, simulation, replay and anonymization."""
