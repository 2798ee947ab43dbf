-- Where one event stands.

-- name: published
-- The event in the outbox, and whether the relay's position has passed it; several rows if its id was published twice.
SELECT o.id AS outbox_id, o.event_id, o.topic, o.key, o.size, o.published_at,
       (o.id <= t.ids_upto AND pg_visible_in_snapshot(o.xid, t.snapshot))
       OR coalesce(o.id <= t.last_id AND pg_visible_in_snapshot(o.xid, t.window_snapshot), false) AS relayed,
       NULL::timestamptz AS due_at
FROM {schema}.outbox o
CROSS JOIN (SELECT k.* FROM {schema}.ticks k ORDER BY k.id DESC LIMIT 1) t
WHERE o.event_id = %(event)s ORDER BY o.id

-- name: scheduled
-- The event among the delayed ones.
SELECT s.topic, s.key, s.size, s.created_at AS published_at, s.due_at,
       EXTRACT(EPOCH FROM s.due_at - clock_timestamp())::double precision AS due_in
FROM {schema}.scheduled s WHERE s.event_id = %(event)s ORDER BY s.due_at, s.id

-- name: buried
-- The event in the dead letters, for when the outbox no longer has it.
SELECT l.outbox_id, l.event_id, l.topic, l.key, octet_length(l.payload::text) AS size,
       coalesce(l.published_at, l.died_at) AS published_at, true AS relayed, NULL::timestamptz AS due_at
FROM {schema}.dead_letters l WHERE l.event_id = %(event)s ORDER BY l.id LIMIT 1

-- name: copies
-- Every delivery of the event, with all that the tables of the line say about it.
WITH places AS MATERIALIZED (
    SELECT d.queue_id, d.lane, d.seq, d.outbox_id FROM {schema}.deliveries d WHERE d.outbox_id = ANY (%(outbox)s)
    UNION
    SELECT e.queue_id, e.lane, e.seq, e.outbox_id FROM {schema}.exceptions e WHERE e.outbox_id = ANY (%(outbox)s)
    UNION
    SELECT l.queue_id, l.lane, l.seq, l.outbox_id FROM {schema}.dead_letters l
    WHERE l.event_id = %(event)s AND l.outbox_id = ANY (%(outbox)s)
)
SELECT q.name AS queue, p.lane, p.seq, p.outbox_id,
       coalesce((SELECT c.hi FROM {schema}.claims c WHERE c.queue_id = p.queue_id AND c.lane = p.lane
                 ORDER BY c.lo DESC LIMIT 1), 0) AS position,
       c.claimed_at, c.started, s.kind AS settled, s.settled_at, g.outcome AS recorded,
       e.id AS exception, e.state, e.attempts, e.crashes, e.due_at,
       EXTRACT(EPOCH FROM e.due_at - clock_timestamp())::double precision AS due_in, e.last_error,
       l.id AS letter, l.reason, l.died_at, l.attempts AS letter_attempts, l.crashes AS letter_crashes,
       l.last_error AS letter_error,
       w.host, w.pid, w.state AS worker_state,
       CASE WHEN isfinite(w.heartbeat_at) THEN greatest(EXTRACT(EPOCH FROM clock_timestamp() - w.heartbeat_at), 0)
            END::double precision AS heartbeat_age
FROM places p
LEFT JOIN {schema}.queues q ON q.id = p.queue_id
LEFT JOIN LATERAL (
    SELECT c.id, c.hi, c.worker_id, c.claimed_at, p.seq <= coalesce((k.started ->> c.id::text)::bigint, 0) AS started
    FROM {schema}.claims c LEFT JOIN {schema}.workers k ON k.id = c.worker_id
    WHERE c.queue_id = p.queue_id AND c.lane = p.lane AND c.lo <= p.seq ORDER BY c.lo DESC LIMIT 1) c ON c.hi >= p.seq
LEFT JOIN {schema}.settlements s ON s.claim_id = c.id
LEFT JOIN {schema}.progress g ON g.claim_id = c.id AND g.seq = p.seq
LEFT JOIN LATERAL (
    SELECT e.* FROM {schema}.exceptions e
    WHERE e.queue_id = p.queue_id AND e.lane = p.lane AND p.seq BETWEEN e.seq AND coalesce(e.range_hi, e.seq)
    ORDER BY e.id DESC LIMIT 1) e ON true
LEFT JOIN LATERAL (
    SELECT l.* FROM {schema}.dead_letters l
    WHERE l.event_id = %(event)s AND l.queue_id = p.queue_id AND l.lane = p.lane AND l.seq = p.seq
    ORDER BY l.id DESC LIMIT 1) l ON true
LEFT JOIN {schema}.workers w ON w.id = coalesce(e.worker_id, c.worker_id)
ORDER BY q.name, p.seq

-- name: consumers
-- For each queue, who claimed from it last.
SELECT q.name AS queue, w.host, w.pid, w.state AS worker_state,
       CASE WHEN isfinite(w.heartbeat_at) THEN greatest(EXTRACT(EPOCH FROM clock_timestamp() - w.heartbeat_at), 0)
            END::double precision AS heartbeat_age,
       c.claimed_at
FROM {schema}.queues q
LEFT JOIN LATERAL (
    SELECT c.worker_id, c.claimed_at FROM {schema}.claims c WHERE c.queue_id = q.id AND c.lane = 0
    ORDER BY c.lo DESC LIMIT 1) c ON true
LEFT JOIN {schema}.workers w ON w.id = c.worker_id
ORDER BY q.name
