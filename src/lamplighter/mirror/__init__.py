"""Finished checkpoints to a store elsewhere (save.mirror) and back: copied beside the run, whole or not there, resumed from."""
