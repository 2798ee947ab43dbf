-- Deliveries off the happy path: dead letters and retries.

-- name: list
-- The newest dead letters that a selection takes; all its parts are optional.
SELECT l.id, q.name AS queue, l.topic, l.event_id, l.key, l.died_at, l.published_at, l.attempts, l.crashes, l.reason,
       l.first_error, l.last_error, l.payload::text AS payload, l.headers::text AS headers
FROM {schema}.dead_letters l JOIN {schema}.queues q ON q.id = l.queue_id
WHERE (%(ids)s::bigint[] IS NULL OR l.id = ANY (%(ids)s)) AND (%(queue)s::integer IS NULL OR l.queue_id = %(queue)s)
  AND (%(topics)s::text[] IS NULL OR l.topic = ANY (%(topics)s))
ORDER BY l.id DESC LIMIT %(limit)s

-- name: count
-- How many dead letters a selection takes, and how many of them have lost their event.
SELECT count(*) AS letters, count(*) FILTER (WHERE l.event_id IS NULL) AS without_event
FROM {schema}.dead_letters l
WHERE (%(ids)s::bigint[] IS NULL OR l.id = ANY (%(ids)s)) AND (%(queue)s::integer IS NULL OR l.queue_id = %(queue)s)
  AND (%(topics)s::text[] IS NULL OR l.topic = ANY (%(topics)s))

-- name: topics
-- The topics that the relay has seen, and those of the dead letters.
SELECT t.topic FROM {schema}.topics t UNION SELECT l.topic FROM {schema}.dead_letters l WHERE l.topic IS NOT NULL
ORDER BY 1

-- name: newest
-- The newest dead letter.
SELECT l.id FROM {schema}.dead_letters l ORDER BY l.id DESC LIMIT 1

-- name: redrive
-- Moves the next dead letters of a selection back to their queues, each in one piece. An event that retention has
-- removed returns under its old id, with an xid that every snapshot sees, so that it is not relayed again. Under the
-- tick lock, so that neither retention nor the drop of a queue overlooks what returns.
WITH picked AS MATERIALIZED (
    SELECT l.* FROM {schema}.dead_letters l
    WHERE l.id > %(after)s AND l.id <= %(upto)s AND l.event_id IS NOT NULL
      AND (%(ids)s::bigint[] IS NULL OR l.id = ANY (%(ids)s)) AND (%(queue)s::integer IS NULL OR l.queue_id = %(queue)s)
      AND (%(topics)s::text[] IS NULL OR l.topic = ANY (%(topics)s))
    ORDER BY l.id LIMIT %(limit)s FOR UPDATE
), restored AS (
    INSERT INTO {schema}.outbox (id, xid, published_at, event_id, size, topic, key, payload, headers)
    OVERRIDING SYSTEM VALUE
    SELECT p.outbox_id, '2'::xid8, coalesce(p.published_at, p.died_at), p.event_id, octet_length(p.payload::text),
           p.topic, p.key, p.payload, p.headers
    FROM picked p ORDER BY p.outbox_id
    ON CONFLICT (id) DO NOTHING
), gone AS (
    DELETE FROM {schema}.dead_letters l USING picked p WHERE l.id = p.id RETURNING l.id
), queued AS (
    INSERT INTO {schema}.exceptions (due_at, seq, outbox_id, queue_id, lane, replay_id, key)
    SELECT clock_timestamp(), p.seq, p.outbox_id, p.queue_id, p.lane, p.replay_id, p.key
    FROM picked p JOIN gone g ON g.id = p.id ORDER BY p.id
)
SELECT g.id FROM gone g ORDER BY g.id

-- name: wake
-- Wakes the workers.
SELECT pg_notify('{name}.work', '*')

-- name: discard
-- Removes the next dead letters of a selection for good.
WITH picked AS MATERIALIZED (
    SELECT l.id FROM {schema}.dead_letters l
    WHERE l.id > %(after)s AND l.id <= %(upto)s
      AND (%(ids)s::bigint[] IS NULL OR l.id = ANY (%(ids)s)) AND (%(queue)s::integer IS NULL OR l.queue_id = %(queue)s)
      AND (%(topics)s::text[] IS NULL OR l.topic = ANY (%(topics)s))
    ORDER BY l.id LIMIT %(limit)s FOR UPDATE
), gone AS (
    DELETE FROM {schema}.dead_letters l USING picked p WHERE l.id = p.id RETURNING l.id
)
SELECT g.id FROM gone g ORDER BY g.id

-- name: retries
-- The deliveries that failed or crashed and will be tried again, the next ones first.
SELECT e.id, q.name AS queue, o.topic, o.event_id, o.key, e.state, e.attempts, e.crashes, e.due_at,
       EXTRACT(EPOCH FROM e.due_at - clock_timestamp())::double precision AS due_in,
       e.first_error, e.last_error, w.host, w.pid
FROM {schema}.exceptions e
JOIN {schema}.queues q ON q.id = e.queue_id
LEFT JOIN {schema}.outbox o ON o.id = e.outbox_id
LEFT JOIN {schema}.workers w ON w.id = e.worker_id
WHERE (e.attempts > 0 OR e.crashes > 0) AND (%(queue)s::integer IS NULL OR e.queue_id = %(queue)s)
ORDER BY e.due_at, e.id LIMIT %(limit)s
