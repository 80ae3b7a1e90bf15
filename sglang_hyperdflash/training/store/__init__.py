"""The store: training samples with the target's states, in a folder of append-only shards.

Any number of processes write to a store and read from it at once, without a common lock:

========================  ===================================================================
``.hyperdflash.json``     whose states these are (:class:`~.manifest.Identity`)
``manifests/NAME.jsonl``  one writer's manifest: a line for every shard, only ever appended to
``shards/*.safetensors``  a shard: tokens and states of consecutive samples (:mod:`.shard`)
``verified/*``            a stamp for every copied shard whose checksum a reader has verified
``NAME.left_out.jsonl``   the rows of its data that a capture left out
``reader``, ``learner``   the one run that trains on a store with a budget, or learns from one
``used.json``             how far that training has used its data set, by digest
========================  ===================================================================

A shard is part of the store from the moment its manifest line is whole.
"""
