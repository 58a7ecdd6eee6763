"""``recover-status``: a live view of a running job, from its coordinator.

    addresses --watch: ask--> view (JSON) --model: read--> Status --screen: render--> terminal, or JSON

docs/monitoring.md describes the command. A view changes nothing: an observer is no member of the run
(``membership.view``).
"""
