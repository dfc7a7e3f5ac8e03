"""Publication of the snapshot as OpenMetrics over HTTP, and as OTLP."""
