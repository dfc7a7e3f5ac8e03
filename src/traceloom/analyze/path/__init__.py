"""What the analysis of the critical path is made of: its window, its pieces, their classes, and the slack beside it."""
