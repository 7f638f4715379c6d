"""`tepo plan`: predict memory per rank and time per step of a config before any GPU is requested. Needs no torch."""
