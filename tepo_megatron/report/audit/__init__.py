"""`tepo audit`: compute every number of each token's loss again in fp64, from a run's records, without the code of `losses`."""
