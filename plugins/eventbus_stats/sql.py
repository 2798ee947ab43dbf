"""The statements of the plugin; its tables and functions are made by ``migrations``."""

from __future__ import annotations

from typing import Final

NOW: Final = "SELECT extract(epoch FROM clock_timestamp())::float8"
"""The database's clock in seconds since 1970."""

ADD: Final = "SELECT {schema}.stats_add(%s::jsonb)"
"""Adds what was counted to the present minute."""

PURGE: Final = "SELECT {schema}.stats_purge(%s, %s)"
"""Removes minutes that are older than so many seconds, at most so many; how many it were."""

RANGE: Final = """
SELECT r.now, date_trunc('minute', coalesce(%(moment)s::timestamptz, r.now - %(age)s::interval), 'UTC') AS since,
       (SELECT max(m.minute) FROM {schema}.stats_minutes m
        WHERE %(queue)s::text IS NULL OR m.queue = %(queue)s) AS newest
FROM (SELECT clock_timestamp() AS now) r
"""
"""Which minutes are asked for, by the database's clock, and which is the newest that there is."""

NAMES: Final = """
SELECT q.name FROM {schema}.queues q UNION SELECT m.queue FROM {schema}.stats_minutes m ORDER BY 1
"""
"""The queues that there are or were."""

QUEUES: Final = """
WITH chosen AS MATERIALIZED (
    SELECT m.minute, m.queue, m.published, m.handled, m.failed, m.retried, m.dead, m.duplicates, m.discarded,
           m.deferred, m.released, m.lost_leases, m.seconds_sum, m.seconds_max, m.waited_sum, m.waited_max,
           m.seconds_buckets, m.waited_buckets
    FROM {schema}.stats_minutes m
    WHERE m.minute >= %(since)s AND (%(queue)s::text IS NULL OR m.queue = %(queue)s)
), seconds AS (
    SELECT s.queue, array_agg(s.number ORDER BY s.n) AS buckets
    FROM (SELECT c.queue, b.n, sum(b.number)::bigint AS number
          FROM chosen c CROSS JOIN unnest(c.seconds_buckets) WITH ORDINALITY AS b (number, n) GROUP BY c.queue, b.n) s
    GROUP BY s.queue
), waited AS (
    SELECT s.queue, array_agg(s.number ORDER BY s.n) AS buckets
    FROM (SELECT c.queue, b.n, sum(b.number)::bigint AS number
          FROM chosen c CROSS JOIN unnest(c.waited_buckets) WITH ORDINALITY AS b (number, n) GROUP BY c.queue, b.n) s
    GROUP BY s.queue
), chart AS (
    SELECT s.queue, jsonb_object_agg(s.step, s.handled) AS steps
    FROM (SELECT c.queue, floor(extract(epoch FROM c.minute - %(since)s) / %(step)s)::int AS step,
                 sum(c.handled)::bigint AS handled
          FROM chosen c GROUP BY 1, 2) s
    GROUP BY s.queue
)
SELECT t.queue, t.first, t.recent, t.published, t.handled, t.failed, t.retried, t.dead, t.duplicates, t.discarded,
       t.deferred, t.released, t.lost_leases, t.seconds_sum, t.seconds_max, t.waited_sum, t.waited_max,
       coalesce(s.buckets, '{}') AS seconds_buckets, coalesce(w.buckets, '{}') AS waited_buckets, k.steps
FROM (
    SELECT c.queue, min(c.minute) AS first,
           (sum(c.handled) FILTER (WHERE c.minute >= %(recent)s))::bigint AS recent,
           sum(c.published)::bigint AS published, sum(c.handled)::bigint AS handled, sum(c.failed)::bigint AS failed,
           sum(c.retried)::bigint AS retried, sum(c.dead)::bigint AS dead, sum(c.duplicates)::bigint AS duplicates,
           sum(c.discarded)::bigint AS discarded, sum(c.deferred)::bigint AS deferred,
           sum(c.released)::bigint AS released, sum(c.lost_leases)::bigint AS lost_leases,
           sum(c.seconds_sum) AS seconds_sum, max(c.seconds_max) AS seconds_max,
           sum(c.waited_sum) AS waited_sum, max(c.waited_max) AS waited_max
    FROM chosen c GROUP BY c.queue) t
LEFT JOIN seconds s ON s.queue = t.queue
LEFT JOIN waited w ON w.queue = t.queue
JOIN chart k ON k.queue = t.queue
"""
"""The sums of these minutes for each queue; ``recent`` counts what was handled since that minute."""
