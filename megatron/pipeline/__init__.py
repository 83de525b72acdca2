"""Pipeline parallelism, which splits the layers of a model over several ranks.

`schedule` or `message_driven` orders passes, `transport` moves tensors, `stage` computes, and
`runner` runs a batch with them. tools/planner/timeline.py simulates a batch.
"""
