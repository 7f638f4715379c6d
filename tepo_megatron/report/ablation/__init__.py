"""`tepo ablate`: several objectives with several seeds from one base model, compared with their noise."""
