"""Rendezvous: the meeting of all live workers after a death, and its result (plan, places, and spares).

`rendezvous` calls the other modules: `planner` joins the epoch and computes the epoch's `plan` from the status of each
worker; `assignment` is this worker's place in the epoch.  `orphan` takes a worker out of its broken replica, and
`spare` joins epochs for a worker without a place.
"""
