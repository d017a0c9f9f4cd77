"""Trained blocks on several hosts: one traversal of the block stack decides one byte, a chunk, or a whole output."""
