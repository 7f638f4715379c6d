"""The processes of a run as groups: the device mesh of the ranks, and the stores through which ranks and servers meet.

platform/         `activate`: Megatron-Core on a GPU, or on a CPU
parallel.py       `ParallelDims`, the device mesh; the only wrapper of Megatron-Core's `parallel_state`
objects.py        collectives of Python objects, with agreed errors and a deadline
rendezvous_store.py  stores for the groups of ranks and servers with `sync.transport=group`
own_peers.py      the check that all members of a gloo group are processes of the same user
"""
