"""Chakra files: read, write, decode, encode."""
