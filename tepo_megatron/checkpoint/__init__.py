"""Save and load the checkpoints of a run. A checkpoint is complete or absent, and loads on any parallel layout.

It is written while training goes on. Modules import only modules below them in this list:

    checkpoints.py  the interface of the training loop: save, poll, wait, newest, load
    saving.py       one save in flight: this rank's file, the agreement of all ranks, the commit
    restoring.py    find the newest valid checkpoint, and restore the actor from it
    folder.py       names, retention and locks of the checkpoint folders; files with checksums, and manifests
    tensors.py      Megatron's distributed format: host copies, the save plans of all ranks, and which file holds which tensor
    rng_state.py    the RNG states of one rank
    state.py        the state of an actor as shard slices (rectangular parts of global tensors)
    optimizer.py    the optimizer's part of that state
"""
