"""Deliver the actor's weights to inference servers after every step. Both ends of the wire are here.

sync.py             push through files, shared memory or CUDA IPC
broadcast.py        push through process groups
meeting.py          how ranks and servers agree on such a group
broadcast_group.py  the group, and the formats of its messages
relay.py            copies of the buckets on each machine of the ranks
stores.py           buckets that wait until an engine has read them
delta.py            which parameters changed since the last push
buckets.py          the weights in buckets of limited size
ipc.py              memory that several processes of a machine map
receiver/           the other end, which runs inside the servers
"""
