"""Jobs that make no steps any more."""
