"""The grid of ranks (`dims`, pure arithmetic) and its process groups (`groups`)."""
