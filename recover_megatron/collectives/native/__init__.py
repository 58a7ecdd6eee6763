"""The backend's own collectives (NCCL's, gloo's): their interface, and the group that callers see."""
