"""Outside the training process: looks, decides, speaks. Never imports torch."""
