"""Deliver the actor's weights to the servers after every step. The other end is in `wire/receiver`.

push.py       one push for all transports, and the choice of the transport; lists the modules that a weight passes
buckets.py    the weights in buckets of limited size, and which of them changed since the last push
stores.py     transports `shm` and `ipc`: buckets that wait until an engine has read them
relay.py      transport `shm` on several machines: copies of the buckets on each
broadcast.py  transport `group`: buckets that are broadcast
"""
