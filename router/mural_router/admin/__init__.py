"""The router's own port: metrics, health, and pages that explain what it does."""
