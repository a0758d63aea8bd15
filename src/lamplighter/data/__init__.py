"""Text becomes batches (numpy, no torch).

In:  files, a source of the user's own, or the embedded corpus.
Out: sources -> tokenizer -> tokens -> batches; each is a file of this room.
"""
