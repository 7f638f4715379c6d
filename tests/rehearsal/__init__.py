"""A rehearsal at full size (`make rehearsal`): a recipe's real service with scripted engines and ranks, under a fast clock."""
