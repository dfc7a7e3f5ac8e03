"""Pages that are drawn by hand."""
