"""`tepo replay`: repeat the training of a run, and say where it comes out differently."""

from tepo_megatron.replay.command import Request, replay

__all__ = ["Request", "replay"]
