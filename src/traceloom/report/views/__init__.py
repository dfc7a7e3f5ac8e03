"""Views that draw any document."""
