"""A toy task on which a model of 0.6 M parameters learns by reinforcement in minutes, without a GPU."""
