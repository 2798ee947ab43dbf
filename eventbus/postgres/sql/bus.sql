-- The bus as a whole: how the command line looks at it, and what it changes about it.

-- name: look
-- Starts a reading transaction: one snapshot for all its statements, nothing of the role's own settings.
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY;
SET LOCAL search_path = pg_catalog, pg_temp;
SET LOCAL enable_seqscan = off;
SET LOCAL jit = off;

-- name: change
-- Starts a writing transaction.
SET TRANSACTION ISOLATION LEVEL READ COMMITTED READ WRITE;
SET LOCAL search_path = pg_catalog, pg_temp;
SET LOCAL enable_seqscan = off;
SET LOCAL jit = off;

-- name: lock_tick
-- Keeps every relay and everybody else who appends deliveries out until the end of the transaction.
SELECT pg_advisory_xact_lock({schema}.lock_key('tick'))

-- name: state
-- Whether the bus runs, and how old the relay's newest position is.
SELECT b.state, b.reason, {schema}.is_foreign() AS foreign,
       greatest(EXTRACT(EPOCH FROM clock_timestamp() - t.created_at), 0)::double precision AS tick_age
FROM {schema}.bus b
CROSS JOIN (SELECT k.created_at FROM {schema}.ticks k ORDER BY k.id DESC LIMIT 1) t

-- name: backlog
-- How many committed events before a given one (or at all) the relay has not seen, counted up to a limit.
WITH t AS MATERIALIZED (
    SELECT k.* FROM {schema}.ticks k ORDER BY k.id DESC LIMIT 1
), unseen AS (
    (SELECT o.id, o.published_at FROM t CROSS JOIN LATERAL (
        SELECT o.id, o.xid, o.published_at FROM {schema}.outbox o
        WHERE o.id > t.ids_upto AND o.id < coalesce(%(before)s, 9223372036854775807)
        ORDER BY o.id OFFSET 0) o
     WHERE NOT coalesce(o.id <= t.last_id AND pg_visible_in_snapshot(o.xid, t.window_snapshot), false)
     LIMIT %(limit)s)
    UNION ALL
    (SELECT o.id, o.published_at FROM t CROSS JOIN LATERAL (
        SELECT o.id, o.xid, o.published_at FROM {schema}.outbox o
        WHERE o.xid >= pg_snapshot_xmin(t.snapshot) AND o.xid <= t.next_xid AND o.id <= t.ids_upto
          AND o.id < coalesce(%(before)s, 9223372036854775807)
        ORDER BY o.xid, o.id OFFSET 0) o
     WHERE NOT pg_visible_in_snapshot(o.xid, t.snapshot)
       AND NOT coalesce(o.id <= t.last_id AND pg_visible_in_snapshot(o.xid, t.window_snapshot), false)
     LIMIT %(limit)s)
)
SELECT least(count(*), %(limit)s)::integer AS events,
       CASE WHEN count(*) > 0 THEN greatest(EXTRACT(EPOCH FROM clock_timestamp() - min(u.published_at)), 0)
            END::double precision AS oldest_age
FROM unseen u

-- name: workers
-- The workers that are registered and not taken over.
SELECT w.id, w.host, w.pid, w.started_at,
       CASE WHEN isfinite(w.heartbeat_at) THEN greatest(EXTRACT(EPOCH FROM clock_timestamp() - w.heartbeat_at), 0)
            END::double precision AS heartbeat_age
FROM {schema}.workers w WHERE w.state = 'live' ORDER BY w.started_at, w.id

-- name: scheduled
-- How many delayed events wait, counted up to a limit, and when the next one is due.
SELECT count(*)::integer AS events, min(s.due_at) AS next_due_at
FROM (SELECT s.due_at FROM {schema}.scheduled s ORDER BY s.due_at, s.id LIMIT %(limit)s) s

-- name: is_foreign
-- Whether this database is a copy that was restored elsewhere and that no worker has attached yet.
SELECT {schema}.is_foreign()

-- name: begin_attach
-- Starts the transaction of attach.
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ WRITE

-- name: lock_for_attach
-- The first statement of attach: locking takes no snapshot, so the snapshot comes after the waiting.
LOCK TABLE {schema}.outbox, {schema}.ticks IN SHARE ROW EXCLUSIVE MODE

-- name: attach
-- Takes a new position in this database.
SELECT {schema}.attach(true)

-- name: resume
-- Lets a paused bus run again, and wakes whoever waits.
WITH resumed AS (
    UPDATE {schema}.bus SET state = 'running', reason = NULL, changed_at = clock_timestamp()
    WHERE state = 'paused' RETURNING 1
)
SELECT pg_notify('{name}.relay', ''), pg_notify('{name}.work', '*') FROM resumed

-- name: topics
-- Every topic that the relay has seen.
SELECT t.topic, t.first_seen_at, t.unrouted FROM {schema}.topics t ORDER BY t.topic

-- name: retained
-- How many events of each topic are kept; reads the whole outbox.
SELECT o.topic, count(*) AS events FROM {schema}.outbox o GROUP BY o.topic

-- name: bindings
-- Which queue wants which topics.
SELECT q.name, b.pattern FROM {schema}.queues q JOIN {schema}.bindings b ON b.queue_id = q.id ORDER BY q.name, b.pattern
