"""Blocks on several hosts: what a text passes through, from the client to the byte that is decided.

=====================  ================================================================================================
file                   what it owns
=====================  ================================================================================================
``client``             ``SweepClient.stream``: a text, its walks, and their repetition where a host is lost
``fleet``              a client's connections: who serves what, who waits for which answer
``block_server``       a host on TCP: whose turn it is, where a walk goes next
``block_host``         what a host computes: sessions, walks that run together
``errand``             a walk as it travels, with the state between two blocks
``link``, ``hello``    one connection, and how it begins
``completions``        ``POST /v1/completions``; ``completion_fields``, ``_text`` and ``_work`` belong to it
``plan``, ``machine``  memory, bytes and seconds of a shape beforehand, and how fast this machine is
=====================  ================================================================================================

Which walks a text takes, and how bytes are drawn, is ``models.generation``: the same for a model in one process.
"""
