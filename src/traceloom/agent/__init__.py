"""The host agent."""
