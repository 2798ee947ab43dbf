"""What a scrape asks the database. ``{schema}`` is the quoted schema; ``limit`` bounds what is counted row by row.

Every statement runs alone in a short reading transaction. Depths are differences of positions, never counts of
deliveries, so that they cost the same with ten events waiting as with ten million.
"""

from __future__ import annotations

from typing import Final

BEGIN: Final = """
    SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY;
    SET LOCAL statement_timeout = {milliseconds};
    SET LOCAL lock_timeout = {milliseconds};
    SET LOCAL search_path = pg_catalog, pg_temp;
    SET LOCAL enable_seqscan = off;
    SET LOCAL jit = off
"""

PRESENT: Final = "SELECT to_regclass('{schema}.' || %(relation)s) IS NOT NULL"

CLOCK: Final = "SELECT EXTRACT(EPOCH FROM pg_catalog.clock_timestamp())::double precision"

QUEUES: Final = """
    WITH off_path AS MATERIALIZED (
        SELECT x.queue_id, x.lane,
               coalesce(sum(coalesce(x.range_hi, x.seq) - x.seq + 1) FILTER (WHERE x.fresh), 0) AS waiting,
               count(*) FILTER (WHERE x.state = 'claimed') AS running,
               count(*) FILTER (WHERE x.state = 'waiting' AND NOT x.fresh) AS retrying,
               count(*) FILTER (WHERE x.state = 'parked') AS parked,
               min(x.outbox_id) FILTER (WHERE x.state <> 'claimed') AS first_event,
               min(x.seq) FILTER (WHERE x.fresh AND x.range_hi IS NOT NULL) AS first_seq
        FROM (SELECT e.*, e.state = 'waiting' AND e.attempts = 0 AND e.crashes = 0 AS fresh
              FROM {schema}.exceptions e) x
        GROUP BY x.queue_id, x.lane
    ), held AS MATERIALIZED (
        SELECT c.queue_id, c.lane,
               sum(c.hi - c.lo + 1 - (SELECT count(*) FROM {schema}.progress p WHERE p.claim_id = c.id)) AS running
        FROM {schema}.workers w
        CROSS JOIN LATERAL (
            SELECT c.id, c.queue_id, c.lane, c.lo, c.hi FROM {schema}.claims c
            WHERE c.worker_id = w.id AND c.id >= w.open_from
              AND NOT EXISTS (SELECT 1 FROM {schema}.settlements s WHERE s.claim_id = c.id) OFFSET 0) c
        WHERE w.state = 'live'
        GROUP BY c.queue_id, c.lane
    ), lanes AS MATERIALIZED (
        SELECT y.queue_id, n.lane,
               coalesce((SELECT d.seq FROM {schema}.deliveries d WHERE d.queue_id = y.queue_id AND d.lane = n.lane
                         ORDER BY d.seq DESC LIMIT 1), 0) AS newest,
               coalesce((SELECT c.hi FROM {schema}.claims c WHERE c.queue_id = y.queue_id AND c.lane = n.lane
                         ORDER BY c.lo DESC LIMIT 1), 0) AS position
        FROM {schema}.layouts y
        CROSS JOIN LATERAL generate_series(y.lane_from, y.lane_from + y.lanes - 1) AS n (lane)
    )
    SELECT q.name AS queue,
           sum(greatest(l.newest - l.position, 0) + coalesce(x.waiting, 0))::double precision AS waiting,
           sum(coalesce(h.running, 0) + coalesce(x.running, 0))::double precision AS running,
           sum(coalesce(x.retrying, 0))::double precision AS retrying,
           sum(coalesce(x.parked, 0))::double precision AS parked,
           coalesce(greatest(EXTRACT(EPOCH FROM clock_timestamp() - min(o.published_at)), 0), 0)::double precision
               AS oldest_age
    FROM {schema}.queues q
    JOIN lanes l ON l.queue_id = q.id
    LEFT JOIN off_path x ON x.queue_id = l.queue_id AND x.lane = l.lane
    LEFT JOIN held h ON h.queue_id = l.queue_id AND h.lane = l.lane
    LEFT JOIN LATERAL (
        SELECT min(o.published_at) AS published_at FROM {schema}.outbox o WHERE o.id IN (
            x.first_event,
            (SELECT d.outbox_id FROM {schema}.deliveries d
             WHERE d.queue_id = l.queue_id AND d.lane = l.lane AND d.seq = x.first_seq),
            (SELECT d.outbox_id FROM {schema}.deliveries d
             WHERE d.queue_id = l.queue_id AND d.lane = l.lane AND d.seq > l.position ORDER BY d.seq LIMIT 1))
    ) o ON true
    GROUP BY q.name ORDER BY q.name
"""

DEAD_LETTERS: Final = """
    SELECT q.name AS queue, count(l.one) AS dead
    FROM {schema}.queues q
    LEFT JOIN LATERAL (
        SELECT 1 AS one FROM {schema}.dead_letters l WHERE l.queue_id = q.id LIMIT %(limit)s) l ON true
    GROUP BY q.name ORDER BY q.name
"""

PAUSES: Final = """
    SELECT q.name AS queue, p.source, 1 AS paused,
           EXTRACT(EPOCH FROM clock_timestamp() - p.since)::double precision AS seconds
    FROM {schema}.pauses p JOIN {schema}.queues q ON q.id = p.queue_id
    ORDER BY q.name, p.source
"""

CIRCUIT_BREAKERS: Final = """
    SELECT b.queue, s.state, (b.state = s.state)::integer AS it_is, b.trips
    FROM {schema}.circuit_breaker_states b
    CROSS JOIN (VALUES ('closed'), ('open'), ('ready'), ('probing')) AS s (state)
    ORDER BY b.queue, s.state
"""

OUTBOX: Final = """
    WITH t AS MATERIALIZED (
        SELECT k.* FROM {schema}.ticks k ORDER BY k.id DESC LIMIT 1
    ), unseen AS (
        (SELECT o.published_at FROM t CROSS JOIN LATERAL (
            SELECT o.id, o.xid, o.published_at FROM {schema}.outbox o WHERE o.id > t.ids_upto ORDER BY o.id OFFSET 0) o
         WHERE NOT coalesce(o.id <= t.last_id AND pg_visible_in_snapshot(o.xid, t.window_snapshot), false)
         LIMIT %(limit)s)
        UNION ALL
        (SELECT o.published_at FROM t CROSS JOIN LATERAL (
            SELECT o.id, o.xid, o.published_at FROM {schema}.outbox o
            WHERE o.xid >= pg_snapshot_xmin(t.snapshot) AND o.xid <= t.next_xid AND o.id <= t.ids_upto
            ORDER BY o.xid, o.id OFFSET 0) o
         WHERE NOT pg_visible_in_snapshot(o.xid, t.snapshot)
           AND NOT coalesce(o.id <= t.last_id AND pg_visible_in_snapshot(o.xid, t.window_snapshot), false)
         LIMIT %(limit)s)
    )
    SELECT least(count(*), %(limit)s) AS events,
           coalesce(greatest(EXTRACT(EPOCH FROM clock_timestamp() - min(u.published_at)), 0), 0)::double precision
               AS oldest_age
    FROM unseen u
"""

RELAY: Final = """
    SELECT CASE WHEN k.events > 0 AND k.created_at > clock_timestamp() - interval '1 minute'
                THEN coalesce(greatest(EXTRACT(EPOCH FROM k.created_at - o.published_at), 0), 0)
                ELSE 0 END::double precision AS delay
    FROM (SELECT k.* FROM {schema}.ticks k ORDER BY k.id DESC LIMIT 1) k
    LEFT JOIN {schema}.ticks b ON b.id = k.id - 1
    LEFT JOIN LATERAL (
        SELECT o.published_at FROM {schema}.outbox o
        WHERE o.id > greatest(b.ids_upto, b.last_id) ORDER BY o.id LIMIT 1) o ON true
"""

SCHEDULED: Final = """
    SELECT count(*) AS events,
           coalesce(greatest(EXTRACT(EPOCH FROM clock_timestamp() - min(s.due_at)), 0), 0)::double precision AS overdue
    FROM (SELECT s.due_at FROM {schema}.scheduled s ORDER BY s.due_at, s.id LIMIT %(limit)s) s
"""

BUS: Final = "SELECT (b.state = 'paused')::integer AS paused FROM {schema}.bus b"

WORKERS: Final = """
    SELECT s.state, count(w.id) AS workers
    FROM (VALUES ('alive'), ('silent')) AS s (state)
    LEFT JOIN {schema}.workers w ON w.state = 'live' AND isfinite(w.heartbeat_at)
        AND (w.heartbeat_at < clock_timestamp() - make_interval(secs => %(lease)s)) = (s.state = 'silent')
    GROUP BY s.state ORDER BY s.state
"""

TABLES: Final = """
    SELECT s.relname AS "table", s.n_live_tup AS live, s.n_dead_tup AS dead, pg_total_relation_size(s.relid) AS bytes
    FROM pg_stat_user_tables s
    WHERE s.schemaname = %(name)s
    ORDER BY s.relname
"""

TRANSACTIONS: Final = """
    SELECT coalesce(max(EXTRACT(EPOCH FROM clock_timestamp() - t.since)), 0)::double precision AS oldest,
           coalesce(max(age(t.xmin)), 0) AS snapshot
    FROM (
        SELECT a.xact_start AS since, a.backend_xmin AS xmin FROM pg_stat_activity a
        WHERE a.pid <> pg_backend_pid() AND a.backend_type <> 'autovacuum worker'
          AND (a.datname = current_database() OR a.backend_type = 'walsender')
        UNION ALL
        SELECT p.prepared, p.transaction FROM pg_prepared_xacts p WHERE p.database = current_database()
        UNION ALL
        SELECT NULL, r.xmin FROM pg_replication_slots r
    ) t
"""
