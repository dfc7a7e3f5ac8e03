"""The fleet service."""
