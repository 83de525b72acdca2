"""Tasks: a model with its data, and the facts of both that a run needs."""
