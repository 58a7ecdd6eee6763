"""The command ``recover-tools``."""
