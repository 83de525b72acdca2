"""Pipeline stages: what a stage computes, apart from how its tensors move and in which order."""
