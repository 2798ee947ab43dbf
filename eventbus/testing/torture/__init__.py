"""What judges a run in which publishers and consumers were hurt on purpose; nothing here is loaded by a program that runs.

``facts`` is what is known at the end of a run, ``checker`` says which promises were broken, and shares no code with the
bus.
"""
