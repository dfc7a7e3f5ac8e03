"""Replaying a recorded workload."""
