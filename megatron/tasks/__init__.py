"""What can be trained: a task brings a model, its data and the facts that a run needs of both."""
