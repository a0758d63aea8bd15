"""A loss becomes a better model: machine, optimizer, checkpoints, guard, and the only training loop."""
