"""A device that only takes time: the same engine over modelled steps, its workloads, its figures, and how a device is
calibrated."""
