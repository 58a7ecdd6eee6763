"""How workers meet after a death, and what they decide there: the rendezvous, its plan, places, and spares.

`rendezvous` calls the others: `planner` joins the epoch and works out its `plan` from each worker's `standing`; an
`assignment` is the place that this worker has by it.  `orphan` is a worker without a complete replica, `spare` one
without a place.
"""
