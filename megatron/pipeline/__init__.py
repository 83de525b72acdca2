"""A model over several ranks: `schedule` decides, `transport` moves, `stage` computes; `runner` has
the three take a batch through. `timeline` plays a schedule on paper."""
