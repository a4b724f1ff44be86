"""Several models behind one front end, which share a budget of memory: each has an engine of its own, and those that
are not used sleep.

    manager.py   one model and what it holds; whose turn it is to load, wake and sleep
    routes.py    the route table for several: by the ``model`` of a body or a query
    life.py      start, draining, end of all
"""
