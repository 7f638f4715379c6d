"""Inference engines: their interface, the adapters for vLLM and SGLang, and the servers that a run starts or finds.

engines.py   build the engine that `rollout.engine` names
vllm.py      adapter for vLLM's server
sglang.py    adapter for SGLang's server
engine.py    the interfaces that they implement
partial.py   responses that were aborted and go on under new weights
samples.py   turn answers into rollouts
loop.py      an event loop in a thread of its own
servers/     start, watch, restart and end server processes
"""
