"""Rewriting traces without anything that identifies their owners."""
