"""The model room: numbers become a loss, or the next token.

In:  token ids (torch tensors) and a Shape.
Out: logits, a loss, the tensors to store, sampled ids.

`shape` is arithmetic without torch; `transformer` is the network, `cpu` has faster kernels for it, `generate` samples. Nothing is
imported here, because the parent process reads `lamplighter.model.shape` and must never pay for torch.
"""
