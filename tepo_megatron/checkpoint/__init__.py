"""Checkpoints of a run: complete or absent, written beside the training, and loadable on another layout.

Imports point down only:

    checkpoints.py   what the training loop calls: save, poll, wait, newest, load
    background.py    one save under way: this rank's file, the agreement of all ranks, the commit
    folder.py        names, retention, locks: which folders there are and which may go
    files.py         bytes on disk: summed while they are written, manifests
    tensors.py       Megatron's distributed format: plans, host copies, reading on any layout
    state.py         what the state of an actor is, as boxes of whole tensors
    boxes.py         the geometry of that
"""
