"""Members' sides of the protocol: state machines of a worker and of a launcher that follow a coordinator. No I/O."""
