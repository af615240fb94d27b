"""The OpenAI-compatible HTTP API and the control API."""
