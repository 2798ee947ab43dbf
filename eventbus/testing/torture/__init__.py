"""``eventbus torture``: publishers and consumers in real processes, faults at random times, and a judge at the end.

``run`` is the whole story; ``publisher`` and ``handlers`` are what its processes execute, ``crew`` is what gets hurt.
``history`` and ``postgres`` collect what happened as ``facts``; ``checker`` judges them, shares no code with the bus.
"""
