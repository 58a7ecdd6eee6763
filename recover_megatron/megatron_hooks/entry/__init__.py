"""Start of a training program: versions, flags, script, and the installation of all hooks."""
