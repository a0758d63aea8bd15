"""A dataset whose labels come from a server; for one item the server accepts the question and never answers."""

import socket

import torch
from torch.utils.data import Dataset

BAD_ITEM = 341


class Reviews(Dataset):
    """Made-up reviews: a vector each, and whether the reader liked the book."""

    def __init__(self, server):
        self.server = server

    def __len__(self):
        return 2000

    def __getitem__(self, index):
        x = torch.randn(64, generator=torch.Generator().manual_seed(index))
        if index == BAD_ITEM:
            return x, self.ask(index)
        return x, int(x.sum() > 0)

    def ask(self, index):
        with socket.create_connection(self.server) as link:
            link.sendall(b"label of review %d?\n" % index)
            return int(link.recv(16))
