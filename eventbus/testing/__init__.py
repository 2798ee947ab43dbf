"""For tests of what is built on the bus; nothing here is loaded by a program that runs.

``plugins`` is a bench for plugins, ``values`` makes what their hooks get, ``workers`` stands in for a worker.
``failpoints`` and ``wire`` let the database and the connections to it fail where a test wants it.
"""
