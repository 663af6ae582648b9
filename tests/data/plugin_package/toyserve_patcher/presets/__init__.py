"""Presets: every TOML file beside this one."""
