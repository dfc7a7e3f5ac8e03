"""What is published: OpenMetrics, OTLP, JSON lines, Parquet; each renders the board."""
