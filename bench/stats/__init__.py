"""Is a difference one? Intervals, adjustments and the verdict of a comparison."""
