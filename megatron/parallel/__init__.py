"""Where a rank stands in the grid (`dims`, pure arithmetic) and whom it talks to (`groups`)."""
