"""Experiment trackers: a process beside each run follows its folder and tells TensorBoard, W&B, trackio, MLflow or a CSV file."""
