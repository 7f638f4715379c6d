"""Checkpoints of a run: complete or absent, written beside the training, and loadable on another layout.

Imports point down only:

    checkpoints.py   what the training loop calls: save, poll, wait, newest, load
    saving.py        one save under way: this rank's file, the agreement of all ranks, the commit
    restoring.py     which checkpoint a run goes on from, and going on from it
    planning.py      what all ranks write, and room for it
    views.py         the boxes of the state, kept from one save to the next
    folder.py        names, retention, locks: which folders there are and which may go
    files.py         bytes on disk: summed while they are written, manifests
    reading.py       boxes out of files, on any layout
    tensors.py       Megatron's distributed format: host copies, what is in which file
    generators.py    the state of a rank's random generators
    state.py         what the state of an actor is, as boxes of whole tensors
    optimizer.py     what the optimizer keeps of it
    boxes.py         the geometry of that
"""
