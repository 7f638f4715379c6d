"""A rehearsal at full size (`make rehearsal`): the real service of a recipe, with scripted engines and ranks, under a fast clock."""
