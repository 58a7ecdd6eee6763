"""The meeting of workers after a death and its result: the rendezvous, its plan, places, and spares.

`rendezvous` calls the others: `planner` joins the epoch and computes its `plan` from the `standing` of each worker; an
`assignment` is this worker's place in it.  `orphan` is a worker without a complete replica, `spare` a worker without a
place.
"""
