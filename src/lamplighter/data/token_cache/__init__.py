"""The token cache being made: bytes of text in units, each turned into shards by a worker."""
