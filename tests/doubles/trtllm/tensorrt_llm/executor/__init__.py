"""Part of the double; see ../../README.md."""
