"""Probes of functions in other processes, by eBPF."""
