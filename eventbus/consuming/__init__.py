"""From a claimed delivery to its outcome.

``subscriptions`` says who wants which topics, ``handlers`` makes each function callable with one event
(``parameters`` decides what its parameters get), ``results`` reads what came out of the call. The consumer stands
on these and drives them.
"""
