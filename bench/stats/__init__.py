"""Statistics of an A/B comparison: outlier handling, intervals and the verdict."""
