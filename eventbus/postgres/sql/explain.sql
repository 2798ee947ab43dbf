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
-- Every delivery of the event, with all that the tables of the line say about it. What left the happy path may have
-- moved to another lane since, with its queue's layout, so that its own row decides where it is. front: the event that a
-- parked one waits for first; blocker: the dead letter.
WITH places AS MATERIALIZED (
    SELECT DISTINCT ON (u.queue_id, u.outbox_id, u.replay_id) u.* FROM (
        SELECT d.queue_id, d.lane, d.seq, d.outbox_id, d.replay_id, 2 AS rank
        FROM {schema}.deliveries d WHERE d.outbox_id = ANY (%(outbox)s)
        UNION ALL
        SELECT e.queue_id, e.lane, e.seq, e.outbox_id, e.replay_id, 0
        FROM {schema}.exceptions e WHERE e.outbox_id = ANY (%(outbox)s)
        UNION ALL
        SELECT l.queue_id, l.lane, l.seq, l.outbox_id, l.replay_id, 1
        FROM {schema}.dead_letters l WHERE l.event_id = %(event)s AND l.outbox_id = ANY (%(outbox)s)
    ) u
    ORDER BY u.queue_id, u.outbox_id, u.replay_id, u.rank, u.seq
)
SELECT q.name AS queue, p.lane, p.seq, p.outbox_id, p.replay_id,
       coalesce((SELECT c.hi FROM {schema}.claims c WHERE c.queue_id = p.queue_id AND c.lane = p.lane
                 ORDER BY c.lo DESC LIMIT 1), 0) AS position,
       c.claimed_at, c.started, s.kind AS settled, s.settled_at, g.outcome AS recorded,
       e.id AS exception, e.state, e.attempts, e.crashes, e.due_at,
       EXTRACT(EPOCH FROM e.due_at - clock_timestamp())::double precision AS due_in, e.last_error,
       coalesce(e.redriven_from, l.redriven_from) AS redriven_from, e.key,
       f.state AS front_state, f.attempts AS front_attempts, f.crashes AS front_crashes, f.event_id AS front_event,
       EXTRACT(EPOCH FROM f.due_at - clock_timestamp())::double precision AS front_due_in,
       b.id AS blocker, b.reason AS blocker_reason, b.event_id AS blocker_event,
       x.event_id IS NOT NULL AS executed, x.completed_at, x.claimed_at AS begun_at, x.owner,
       l.id AS letter, l.reason, l.died_at, l.attempts AS letter_attempts, l.crashes AS letter_crashes,
       l.last_error AS letter_error, l.blocks AS letter_blocks,
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
      AND coalesce(e.outbox_id, p.outbox_id) = p.outbox_id
    ORDER BY e.id DESC LIMIT 1) e ON true
LEFT JOIN LATERAL (
    SELECT f.state, f.attempts, f.crashes, f.due_at, o.event_id
    FROM {schema}.exceptions f LEFT JOIN {schema}.outbox o ON o.id = f.outbox_id
    WHERE e.state = 'parked' AND f.queue_id = e.queue_id AND f.lane = e.lane AND f.key = e.key AND f.state <> 'parked'
    ORDER BY f.seq LIMIT 1) f ON true
LEFT JOIN LATERAL (
    SELECT b.id, b.reason, b.event_id FROM {schema}.dead_letters b
    WHERE e.state = 'parked' AND b.queue_id = e.queue_id AND b.lane = e.lane AND b.key = e.key AND b.blocks
    ORDER BY b.seq, b.id LIMIT 1) b ON true
LEFT JOIN LATERAL (
    SELECT l.* FROM {schema}.dead_letters l
    WHERE l.event_id = %(event)s AND l.queue_id = p.queue_id AND l.outbox_id = p.outbox_id AND l.replay_id = p.replay_id
    ORDER BY l.id DESC LIMIT 1) l ON e.id IS NULL
LEFT JOIN {schema}.processed_events x
    ON x.queue_id = p.queue_id AND x.event_id = %(event)s AND x.replay_id = p.replay_id
LEFT JOIN {schema}.workers w ON w.id = coalesce(e.worker_id, c.worker_id)
ORDER BY q.name, p.replay_id, p.seq

-- name: consumers
-- For each queue, who claimed from it last, of all its lanes; and how far it is, from 0 to 1, while it is filling.
SELECT q.name AS queue, w.host, w.pid, w.state AS worker_state,
       CASE WHEN isfinite(w.heartbeat_at) THEN greatest(EXTRACT(EPOCH FROM clock_timestamp() - w.heartbeat_at), 0)
            END::double precision AS heartbeat_age,
       c.claimed_at, f.filled
FROM {schema}.queues q
LEFT JOIN LATERAL (
    SELECT c.worker_id, c.claimed_at FROM {schema}.layouts y
    CROSS JOIN LATERAL generate_series(y.lane_from, y.lane_from + y.lanes - 1) AS g (lane)
    CROSS JOIN LATERAL (
        SELECT c.worker_id, c.claimed_at FROM {schema}.claims c WHERE c.queue_id = q.id AND c.lane = g.lane
        ORDER BY c.lo DESC LIMIT 1) c
    WHERE y.queue_id = q.id AND c.worker_id <> '00000000-0000-0000-0000-000000000000'
    ORDER BY c.claimed_at DESC LIMIT 1) c ON true
LEFT JOIN LATERAL (
    SELECT least(1, greatest(f.ids_upto, f.last_id)::double precision
                    / greatest(1, t.ids_upto, coalesce(t.last_id, 0))) AS filled
    FROM {schema}.fillings f
    CROSS JOIN (SELECT k.* FROM {schema}.ticks k ORDER BY k.id DESC LIMIT 1) t WHERE f.queue_id = q.id) f ON true
LEFT JOIN {schema}.workers w ON w.id = c.worker_id
ORDER BY q.name
