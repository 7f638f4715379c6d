"""Deliver the actor's weights to inference servers after every step. Both ends of the wire are here.

sync.py             one push for all transports, and the choice of the transport; lists the modules that a weight passes
transport.py        the two interfaces of a push: `WeightTransport`, and `WeightReceiver`, which the engine implements
buckets.py          the weights in buckets of limited size, and which of them changed since the last push
stores.py           transports `shm` and `ipc`: buckets that wait until an engine has read them
relay.py            transport `shm` on several machines: copies of the buckets on each
broadcast.py        transport `group`: buckets that are broadcast
broadcast_group.py  a process group, and where its members meet
bucket_format.py    the formats of a round
ipc.py              memory that several processes of a machine map
receiver/           the other end, which runs inside the servers
"""
