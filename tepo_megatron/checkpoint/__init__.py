"""Save and load the checkpoints of a run. A checkpoint is complete or absent, and loads on any parallel layout.

It is written while training goes on. Modules import only modules below them in this list:

    checkpoints.py   the interface of the training loop: save, poll, wait, newest, load
    saving.py        one save in flight: this rank's file, the agreement of all ranks, the commit
    restoring.py     find the newest valid checkpoint, and restore the actor from it
    planning.py      the save plans of all ranks, and the folder to write to
    shard_cache.py   a cache of the state's shard slices, kept from one save to the next
    folder.py        names, retention and locks of the checkpoint folders
    files.py         files with checksums, and manifests
    reading.py       read shard slices out of a checkpoint, on any layout
    tensors.py       Megatron's distributed format: host copies, and which file holds which tensor
    rng_state.py     the RNG states of one rank
    state.py         the state of an actor as shard slices (rectangular parts of global tensors)
    optimizer.py     the optimizer's part of that state
    shard_slices.py  split a range of a flattened array into shard slices
"""
