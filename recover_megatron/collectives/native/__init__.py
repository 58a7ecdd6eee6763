"""The backend's own collectives (NCCL's): their interface, and the group that callers see."""
