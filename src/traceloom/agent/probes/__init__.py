"""Probes by eBPF."""
