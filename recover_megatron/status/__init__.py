"""``recover-status``: a live view of a running job, asked of its coordinator.

    addresses --watch: ask--> view (JSON) --model: read--> Status --screen: render--> terminal, or JSON

docs/status.md has the command. Looking changes nothing: an observer is no member of the run (``membership.view``).
"""
