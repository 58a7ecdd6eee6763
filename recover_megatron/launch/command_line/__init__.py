"""What the user asks for: the launcher's options, the environment, the script's flags, and the plan made of them."""
