"""Runs on a cluster: `python -m launch`, in the environment of `make launch`, or for SkyPilot of `make launch-sky`.

How it is used: docs/launch.md. Of the training code it reads the config and the rules of the run's folder, neither of which
needs PyTorch.
"""
