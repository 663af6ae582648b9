"""transformers' patch points, a file or a few for each role of a layer."""
