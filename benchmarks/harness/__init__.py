"""How a contest is run: `contest` drives, `worker` obeys in its own process, `workloads` is the data."""
