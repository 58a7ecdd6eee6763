"""Start of a training program: checks of versions and flags, choice of the script, installation of all hooks."""
