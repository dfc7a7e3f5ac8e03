"""Libkineto's daemon protocol."""
