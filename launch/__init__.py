"""Launch runs on a cluster: `python -m launch`, in the environment of `make launch`.

docs/launch.md explains its use. Of the training code it uses the config and the rules of the run's folder; neither needs
PyTorch.
"""
