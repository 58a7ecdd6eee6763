"""Control plane: coordinator, sessions, epochs, revoke, agree. Standard library only."""
