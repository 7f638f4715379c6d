"""Inference engines: their interface, the adapters for vLLM and SGLang, and the servers that a run starts or finds.

engines.py     build the engine that `rollout.engine` names
engine.py      protocols of an engine: sampling, weight updates, sleeping, start and end; aborted responses go on
engine_api.py  protocol of an adapter for one kind of engine
vllm.py        adapter for vLLM's server
sglang.py      adapter for SGLang's server
torch_engine.py  adapter for our own server
samples.py     turn answers into rollouts
servers/       start, watch, restart and end server processes
"""
