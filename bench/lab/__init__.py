"""Scripts that produce the tables of `bench/results`. They are not part of the wheel."""
