"""vLLM's patch points, one file for each role of a layer."""
