"""Profilers of processes on demand."""
