"""The process groups of a run: the device mesh of the ranks, and the stores through which ranks and servers meet.

parallel.py       `ParallelDims`, the device mesh; the only wrapper of Megatron-Core's `parallel_state`
rendezvous_store.py  stores for the groups of ranks and servers with `sync.transport=group`
own_peers.py      the check that all members of a gloo group are processes of the same user
"""
