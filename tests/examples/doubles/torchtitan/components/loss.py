"""What labels that do not count are."""

IGNORE_INDEX = -100
