"""Tasks. A task is a model with its data, and tells a run what it needs to know of both."""
