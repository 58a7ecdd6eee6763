"""``recover-status``: a live view of a running job, from its coordinator.

    source   ask the coordinator for a view (a JSON object)
    model    turn the view into a ``RunStatus``
    screen   show the ``RunStatus`` on a terminal

docs/monitoring.md describes the command.  A view does not change the run: the command is an observer, not a member.
"""
