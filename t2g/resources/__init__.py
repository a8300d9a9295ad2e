"""What a job needs: memory and FLOPs from a model's shape and the config, and the checks before a job starts.

The package never contacts Ray. Jobs and actors import it, and `t2g.deploy`, which no run imports."""
