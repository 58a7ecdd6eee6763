"""The other sides of the coordinator: state machines of those who follow it, a worker's and a launcher's.  No I/O."""
