"""Run programs that nobody has read: in namespaces without a network, with limits, leaving neither a process nor a file."""
