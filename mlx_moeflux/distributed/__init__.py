"""Experts spread over the ranks of ``mx.distributed``: placement, the step, and the heartbeat."""
