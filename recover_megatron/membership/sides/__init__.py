"""Other sides of the coordinator's protocol: state machines of a worker and of a launcher that follow it. No I/O."""
