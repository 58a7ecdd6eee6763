"""How a training program starts: versions, flags, script, and the installation of all hooks."""
