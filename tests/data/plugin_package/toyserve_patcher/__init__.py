"""What toyserve adds to patcher. Each module is named by an entry point in pyproject.toml."""
