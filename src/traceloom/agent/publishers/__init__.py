"""What is published: OpenMetrics over HTTP, and OTLP; both render the board."""
