"""The fleet's service: pipeline, trace requests, webhooks and the HTTP application."""
