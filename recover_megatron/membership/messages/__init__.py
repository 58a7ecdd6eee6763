"""Messages of the control plane as types: what members send (``to_coordinator``), and what they receive."""
