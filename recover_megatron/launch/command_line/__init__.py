"""Input of a launch: the launcher's options, the environment, the script's flags, and the launch that they describe."""
