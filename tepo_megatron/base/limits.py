"""Numbers that both the checks of a config, which import no torch, and the code of the ranks need."""

# Largest top-k for which engines are asked for the sampling mask of each token.
MOST_MASKED = 64
# Tokens that are looked at beyond top-k: those whose logits equal the last one's are kept too.
MASK_TIES = 8
# Largest number of ids in a recomputed mask. Each rank offers as many candidates.
MOST_CANDIDATES = 256
START_SECONDS = 3600.0  # not a limit itself: the default of parallel.start_seconds
