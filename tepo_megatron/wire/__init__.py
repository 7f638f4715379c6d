"""Both ends of a weight update agree here: the formats of its rounds, and the receivers, which run inside the servers.

transport.py        the two interfaces of a push: `WeightTransport`, and `WeightReceiver`, which the engine implements
bucket_format.py    the formats of a round, and memory that several processes of a machine map
broadcast_group.py  a process group, and where its members meet
receiver/           the receivers: plug-ins for vLLM and SGLang, and our own server
"""
