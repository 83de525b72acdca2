"""A model over several ranks: `schedule` decides, or `message_driven` by what has arrived,
`transport` moves, `stage` computes; `runner` has the three take a batch through. `timeline` plays
it on paper."""
