"""The whole model, one engine configuration against another."""
