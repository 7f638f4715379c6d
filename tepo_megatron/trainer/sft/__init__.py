"""Supervised fine-tuning on conversations, with the actor, layouts, packing and checkpoints of RL training.

conversations.py    rows become token ids, and which of them are learned
settings.py         the config of the actor, and the order of the conversations over passes and updates
loop.py             the updates, held-out loss, checkpoints and export; every rank runs it
worker.py           the process of a rank
"""
