"""Testing by simulation: the whole control plane lives through drawn events, and everything is looked at after each.

    schedule.py    what happens, as data          drawing.py   … drawn from a seed
    life.py        an engine lives through it      device.py    its device, which judges every plan
    oracle.py      what must be answered           masks.py     its grammars
    answers.py     what was asked and told         books.py     blocks, rows, names and tokens
    order.py       whose turn it was               bounds.py    what policies promise
    shrinking.py   a failure, made small           exhaust.py   every interleaving of a small world
    defects.py     what must be found

What lives here: this list. What may not: code.
"""
