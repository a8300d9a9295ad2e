"""The trackers of a run: TensorBoard, Weights & Biases, MLflow, trackio. Each is a `Tracker` in a thread of its own.

`Trackers` is a `t2g.runs.log.Sink` that fails never and waits never; it imports the packages where it needs them.
"""
