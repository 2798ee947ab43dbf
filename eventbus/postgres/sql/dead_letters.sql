-- Deliveries off the happy path: dead letters and retries. A moment that a program cannot hold, because it lies before
-- the year 1 or after the year 9999, is shown as the last one that it can.

-- name: list
-- The newest dead letters that a selection takes.
SELECT l.id, q.name AS queue, l.topic, l.event_id, l.key, {schema}.shown(l.died_at) AS died_at,
       {schema}.shown(l.published_at) AS published_at, l.attempts, l.crashes, l.blocks, l.redriven_from, l.reason,
       l.first_error, l.last_error, l.payload::text AS payload, l.headers::text AS headers
FROM {schema}.chosen_letters(%(ids)s, %(queue)s, %(topics)s, %(error)s, %(since)s, %(until)s) l
JOIN {schema}.queues q ON q.id = l.queue_id
ORDER BY l.id DESC LIMIT %(limit)s

-- name: count
-- How many dead letters a selection takes, and how many of them have lost their event.
SELECT count(*) AS letters, count(*) FILTER (WHERE l.event_id IS NULL) AS without_event
FROM {schema}.chosen_letters(%(ids)s, %(queue)s, %(topics)s, %(error)s, %(since)s, %(until)s) l

-- name: summary
-- How many dead letters of each queue, topic and reason a selection takes, and how many of them have lost their event.
SELECT q.name AS queue, l.topic, l.reason, count(*) AS letters,
       count(*) FILTER (WHERE l.event_id IS NULL) AS without_event
FROM {schema}.chosen_letters(%(ids)s, %(queue)s, %(topics)s, %(error)s, %(since)s, %(until)s) l
JOIN {schema}.queues q ON q.id = l.queue_id
GROUP BY q.name, l.topic, l.reason ORDER BY q.name, l.topic, count(*) DESC, l.reason

-- name: present
-- The numbers of a selection by number that are there.
SELECT l.id FROM {schema}.chosen_letters(%(ids)s, %(queue)s, %(topics)s, %(error)s, %(since)s, %(until)s) l

-- name: topics
-- The topics that the relay has seen, and those of the dead letters.
SELECT t.topic FROM {schema}.topics t UNION SELECT l.topic FROM {schema}.dead_letters l WHERE l.topic IS NOT NULL
ORDER BY 1

-- name: now
-- The database's clock.
SELECT clock_timestamp()

-- name: newest
-- The newest dead letter.
SELECT l.id FROM {schema}.dead_letters l ORDER BY l.id DESC LIMIT 1

-- name: pick
-- The next dead letters of a selection by number, and those of it that belong before them: earlier events of the same
-- keys, which may have died again later. The highest number of the former is where to go on.
WITH chosen AS NOT MATERIALIZED (
    SELECT l.id, l.queue_id, l.key, l.seq
    FROM {schema}.chosen_letters(%(ids)s, %(queue)s, %(topics)s, %(error)s, %(since)s, %(until)s) l
    WHERE l.id <= %(upto)s
), next AS MATERIALIZED (
    SELECT c.id, c.queue_id, c.key, c.seq FROM chosen c WHERE c.id > %(after)s ORDER BY c.id LIMIT %(limit)s
), keys AS MATERIALIZED (
    SELECT n.queue_id, n.key, max(n.seq) AS seq FROM next n
    WHERE n.key IS NOT NULL
      AND EXISTS (SELECT 1 FROM {schema}.layouts y WHERE y.queue_id = n.queue_id AND y.kind = 'ordered')
    GROUP BY n.queue_id, n.key
)
SELECT n.id, max(n.id) OVER () AS cursor FROM next n
UNION
SELECT c.id, (SELECT max(n.id) FROM next n)
FROM keys k JOIN chosen c ON c.queue_id = k.queue_id AND c.key = k.key AND c.seq < k.seq

-- name: redrive
-- Moves these dead letters back to their queues, each in one piece.
SELECT {schema}.redrive(%(letters)s::bigint[])

-- name: discard
-- Removes these dead letters for good.
SELECT {schema}.discard(%(letters)s::bigint[])

-- name: retries
-- The deliveries that failed or crashed and will be tried again, the next ones first.
SELECT e.id, q.name AS queue, o.topic, o.event_id, o.key, e.state, e.attempts, e.crashes,
       {schema}.shown(e.due_at) AS due_at,
       EXTRACT(EPOCH FROM e.due_at - clock_timestamp())::double precision AS due_in,
       e.redriven_from, e.first_error, e.last_error, w.host, w.pid
FROM {schema}.exceptions e
JOIN {schema}.queues q ON q.id = e.queue_id
LEFT JOIN {schema}.outbox o ON o.id = e.outbox_id
LEFT JOIN {schema}.workers w ON w.id = e.worker_id
WHERE (e.attempts > 0 OR e.crashes > 0) AND (%(queue)s::integer IS NULL OR e.queue_id = %(queue)s)
ORDER BY e.due_at, e.id LIMIT %(limit)s
