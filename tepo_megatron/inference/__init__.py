"""Inference engines: their interface, the adapters for vLLM and SGLang, and the servers that a run starts or finds.

engines.py     build the engine that `rollout.engine` names
engine.py      protocols of an engine: sampling, weight updates, sleeping, life
engine_api.py  protocol of an adapter: what differs between engines
vllm.py        adapter for vLLM's server
sglang.py      adapter for SGLang's server
partial.py     responses that were aborted and go on under new weights
samples.py     turn answers into rollouts
loop.py        an event loop in a thread of its own
servers/       start, watch, restart and end server processes
"""
