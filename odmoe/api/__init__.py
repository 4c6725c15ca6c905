"""The Python interface: a model on a cluster, its answers as text."""
