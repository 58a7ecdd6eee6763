"""What carries the messages of a ring: TCP, shared memory, NCCL; how neighbours find and trust each other."""
