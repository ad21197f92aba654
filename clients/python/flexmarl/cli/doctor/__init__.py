"""Probes of a host and its network; what they mean is judged in core."""
