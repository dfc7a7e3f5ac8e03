"""A run in the formats of other tools: Perfetto, speedscope."""
