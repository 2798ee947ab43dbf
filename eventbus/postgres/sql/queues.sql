-- Queues: what is in them, and how one is dropped. Depths are differences of positions, never counts of deliveries.

-- name: list
-- Every queue with its patterns and what of it is still to do; running is what workers hold. Kind and lanes are those
-- of what is relayed; changing: older lanes are not empty yet. filled: how far a filling queue is, from 0 to 1.
WITH kept AS MATERIALIZED (
    SELECT e.queue_id, e.lane,
           coalesce(sum(coalesce(e.range_hi, e.seq) - e.seq + 1) FILTER (WHERE e.fresh), 0) AS waiting,
           count(*) FILTER (WHERE e.state = 'claimed') AS running,
           count(*) FILTER (WHERE e.state = 'waiting' AND NOT e.fresh) AS retrying,
           count(*) FILTER (WHERE e.state = 'parked') AS parked,
           min(e.outbox_id) FILTER (WHERE e.state <> 'claimed') AS oldest_single,
           min(e.seq) FILTER (WHERE e.fresh AND e.range_hi IS NOT NULL) AS oldest_range
    FROM (SELECT x.*, x.state = 'waiting' AND x.attempts = 0 AND x.crashes = 0 AS fresh
          FROM {schema}.exceptions x) e
    GROUP BY e.queue_id, e.lane
), held AS MATERIALIZED (
    SELECT c.queue_id, c.lane, sum(c.hi - c.lo + 1 - c.recorded) AS running
    FROM {schema}.workers w
    CROSS JOIN LATERAL (
        SELECT c.queue_id, c.lane, c.lo, c.hi,
               (SELECT count(*) FROM {schema}.progress p WHERE p.claim_id = c.id) AS recorded
        FROM {schema}.claims c
        WHERE c.worker_id = w.id AND c.id >= w.open_from
          AND NOT EXISTS (SELECT 1 FROM {schema}.settlements s WHERE s.claim_id = c.id) OFFSET 0) c
    WHERE w.state = 'live' GROUP BY c.queue_id, c.lane
), lanes AS MATERIALIZED (
    SELECT q.id AS queue_id, l.lane,
           coalesce((SELECT d.seq FROM {schema}.deliveries d WHERE d.queue_id = q.id AND d.lane = l.lane
                     ORDER BY d.seq DESC LIMIT 1), 0) AS newest,
           coalesce((SELECT c.hi FROM {schema}.claims c WHERE c.queue_id = q.id AND c.lane = l.lane
                     ORDER BY c.lo DESC LIMIT 1), 0) AS position
    FROM {schema}.queues q
    JOIN {schema}.layouts y ON y.queue_id = q.id
    CROSS JOIN LATERAL generate_series(y.lane_from, y.lane_from + y.lanes - 1) AS l (lane)
), sums AS MATERIALIZED (
    SELECT n.queue_id,
           sum(greatest(n.newest - n.position, 0) + coalesce(k.waiting, 0))::bigint AS waiting,
           sum(coalesce(h.running, 0) + coalesce(k.running, 0))::bigint AS running,
           sum(coalesce(k.retrying, 0))::bigint AS retrying,
           sum(coalesce(k.parked, 0))::bigint AS parked,
           min(o.published_at) AS oldest
    FROM lanes n
    LEFT JOIN kept k ON k.queue_id = n.queue_id AND k.lane = n.lane
    LEFT JOIN held h ON h.queue_id = n.queue_id AND h.lane = n.lane
    LEFT JOIN LATERAL (
        SELECT min(o.published_at) AS published_at FROM {schema}.outbox o WHERE o.id IN (k.oldest_single, (
            SELECT d.outbox_id FROM {schema}.deliveries d
            WHERE d.queue_id = n.queue_id AND d.lane = n.lane AND d.seq = k.oldest_range), (
            SELECT d.outbox_id FROM {schema}.deliveries d
            WHERE d.queue_id = n.queue_id AND d.lane = n.lane AND d.seq > n.position ORDER BY d.seq LIMIT 1))
    ) o ON true
    GROUP BY n.queue_id
)
SELECT q.id AS number, q.name, q.state,
       ARRAY(SELECT b.pattern FROM {schema}.bindings b WHERE b.queue_id = q.id ORDER BY b.pattern) AS patterns,
       l.kind, l.lanes, l.lane_from > (SELECT min(x.lane_from) FROM {schema}.layouts x WHERE x.queue_id = q.id)
           AS changing,
       q.tracking, q.when_exhausted, f.filled, s.waiting, s.running, s.retrying, s.parked,
       (SELECT count(*) FROM {schema}.dead_letters l WHERE l.queue_id = q.id) AS dead,
       CASE WHEN s.oldest IS NOT NULL THEN greatest(EXTRACT(EPOCH FROM clock_timestamp() - s.oldest), 0)
            END::double precision AS oldest_age
FROM {schema}.queues q JOIN sums s ON s.queue_id = q.id
CROSS JOIN LATERAL (
    SELECT l.kind, l.lanes, l.lane_from FROM {schema}.layouts l WHERE l.queue_id = q.id
    ORDER BY l.lane_from DESC LIMIT 1) l
LEFT JOIN LATERAL (
    SELECT least(1, greatest(f.ids_upto, f.last_id)::double precision
                    / greatest(1, t.ids_upto, coalesce(t.last_id, 0))) AS filled
    FROM {schema}.fillings f
    CROSS JOIN (SELECT k.* FROM {schema}.ticks k ORDER BY k.id DESC LIMIT 1) t WHERE f.queue_id = q.id) f ON true
ORDER BY q.name

-- name: blocked
-- The keys of ordered queues whose later events wait, and for what; the most parked first.
WITH parked AS MATERIALIZED (
    SELECT e.queue_id, e.lane, e.key, count(*) AS parked FROM {schema}.exceptions e
    WHERE e.state = 'parked' GROUP BY e.queue_id, e.lane, e.key
), letters AS MATERIALIZED (
    SELECT l.queue_id, l.lane, l.key, min(l.seq) AS seq FROM {schema}.dead_letters l
    WHERE l.blocks GROUP BY l.queue_id, l.lane, l.key
), keys AS MATERIALIZED (
    SELECT coalesce(p.queue_id, l.queue_id) AS queue_id, coalesce(p.lane, l.lane) AS lane,
           coalesce(p.key, l.key) AS key, coalesce(p.parked, 0) AS parked
    FROM parked p FULL JOIN letters l ON l.queue_id = p.queue_id AND l.lane = p.lane AND l.key = p.key
    ORDER BY parked DESC, 1, 3 LIMIT %(limit)s
)
SELECT q.name AS queue, k.key, b.by, b.event_id, b.dead_letter, b.reason, b.attempts, b.due_in, b.since, k.parked,
       b.error
FROM keys k
JOIN {schema}.queues q ON q.id = k.queue_id
CROSS JOIN LATERAL (
    (SELECT CASE WHEN e.state = 'claimed' THEN 'running' ELSE 'retry' END AS by, o.event_id,
            NULL::bigint AS dead_letter, NULL AS reason, e.attempts,
            CASE WHEN e.state <> 'claimed' THEN EXTRACT(EPOCH FROM e.due_at - clock_timestamp()) END::double precision
                AS due_in,
            CASE WHEN e.state = 'claimed' THEN greatest(e.created_at, least(e.due_at, clock_timestamp()))
                 ELSE e.created_at END AS since, e.last_error AS error, e.seq
     FROM {schema}.exceptions e LEFT JOIN {schema}.outbox o ON o.id = e.outbox_id
     WHERE e.queue_id = k.queue_id AND e.lane = k.lane AND e.key = k.key AND e.state <> 'parked'
     ORDER BY e.seq LIMIT 1)
    UNION ALL
    (SELECT 'dead letter', l.event_id, l.id, l.reason, l.attempts, NULL, l.died_at, l.last_error, l.seq
     FROM {schema}.dead_letters l
     WHERE l.queue_id = k.queue_id AND l.lane = k.lane AND l.key = k.key AND l.blocks
     ORDER BY l.seq, l.id LIMIT 1)
    ORDER BY 9 LIMIT 1
) b
ORDER BY k.parked DESC, q.name, k.key

-- name: newest_layout
-- Into which lanes a queue gets what is relayed.
SELECT l.kind, l.lanes FROM {schema}.layouts l WHERE l.queue_id = %(queue)s ORDER BY l.lane_from DESC LIMIT 1

-- name: change_lanes
-- Gives a queue another number of lanes. Under the tick lock.
SELECT {schema}.change_layout(%(queue)s, NULL, %(lanes)s)

-- name: find
-- Number of one queue, and how many lanes it has or had.
SELECT q.id, (SELECT max(y.lane_from + y.lanes) FROM {schema}.layouts y WHERE y.queue_id = q.id) AS lanes
FROM {schema}.queues q WHERE q.name = %(name)s

-- name: lanes
-- How many lanes a queue has or had.
SELECT max(y.lane_from + y.lanes) FROM {schema}.layouts y WHERE y.queue_id = %(queue)s GROUP BY y.queue_id

-- name: names
-- The names of all queues.
SELECT q.name FROM {schema}.queues q ORDER BY q.name

-- name: unbind
-- Ends everything that feeds a queue: routing, filling and replays. Under the tick lock.
WITH unrouted AS (
    DELETE FROM {schema}.routes r WHERE r.queue_id = %(queue)s
), unbound AS (
    DELETE FROM {schema}.bindings b WHERE b.queue_id = %(queue)s
), unfilled AS (
    DELETE FROM {schema}.fillings f WHERE f.queue_id = %(queue)s
), activated AS (
    UPDATE {schema}.queues q SET state = 'active' WHERE q.id = %(queue)s AND q.state <> 'active'
), unplayed AS (
    DELETE FROM {schema}.replays r WHERE r.queue_id = %(queue)s
)
UPDATE {schema}.bus SET bindings_version = bindings_version + 1

-- name: lock_lanes
-- Keeps every worker from claiming in this queue until the end of the transaction.
SELECT pg_advisory_xact_lock({schema}.lock_key('lane', %(queue)s, l.lane))
FROM generate_series(0, %(lanes)s - 1) AS l (lane)

-- name: end_claims
-- Takes the open claims of a queue away from their workers, so that they can settle nothing. Under the lane locks.
WITH open AS MATERIALIZED (
    SELECT c.id, c.lo, c.hi FROM {schema}.workers w
    CROSS JOIN LATERAL (
        SELECT c.id, c.lo, c.hi FROM {schema}.claims c
        WHERE c.worker_id = w.id AND c.id >= w.open_from AND c.queue_id = %(queue)s
          AND NOT EXISTS (SELECT 1 FROM {schema}.settlements s WHERE s.claim_id = c.id) OFFSET 0) c
    WHERE w.state = 'live'
), ended AS (
    INSERT INTO {schema}.settlements (claim_id, kind) SELECT o.id, 'lost' FROM open o ORDER BY o.id
    ON CONFLICT DO NOTHING RETURNING claim_id
)
INSERT INTO {schema}.progress (claim_id, seq, outcome)
SELECT o.id, g.seq, 'lost' FROM ended e JOIN open o ON o.id = e.claim_id
CROSS JOIN LATERAL generate_series(o.lo, o.hi) AS g (seq)
ORDER BY o.id, g.seq
ON CONFLICT DO NOTHING

-- name: cover_waiting
-- Claims what waits in a queue for nobody, so that nobody else does. Under the lane locks, in a new statement.
WITH covered AS (
    INSERT INTO {schema}.claims (token, worker_id, lo, hi, queue_id, lane)
    SELECT gen_random_uuid(), gen_random_uuid(), p.position + 1, p.newest, %(queue)s, l.lane
    FROM generate_series(0, %(lanes)s - 1) AS l (lane)
    CROSS JOIN LATERAL (SELECT
        (SELECT d.seq FROM {schema}.deliveries d WHERE d.queue_id = %(queue)s AND d.lane = l.lane
         ORDER BY d.seq DESC LIMIT 1) AS newest,
        coalesce((SELECT c.hi FROM {schema}.claims c WHERE c.queue_id = %(queue)s AND c.lane = l.lane
                  ORDER BY c.lo DESC LIMIT 1), 0) AS position) p
    WHERE p.newest > p.position
    RETURNING id
)
INSERT INTO {schema}.settlements (claim_id, kind) SELECT c.id, 'lost' FROM covered c

-- name: delete_exceptions
-- Removes the next exceptions of a queue, whoever holds them; how far it came.
WITH batch AS MATERIALIZED (
    SELECT e.id FROM {schema}.exceptions e WHERE e.queue_id = %(queue)s AND e.id > %(after)s
    ORDER BY e.id LIMIT %(limit)s FOR UPDATE
), gone AS (
    DELETE FROM {schema}.exceptions e USING batch b WHERE e.id = b.id RETURNING e.id
)
SELECT max(g.id) FROM gone g

-- name: delete_letters
-- Removes the next dead letters of a queue; how far it came.
WITH batch AS MATERIALIZED (
    SELECT l.id FROM {schema}.dead_letters l WHERE l.queue_id = %(queue)s AND l.id > %(after)s
    ORDER BY l.id LIMIT %(limit)s FOR UPDATE
), gone AS (
    DELETE FROM {schema}.dead_letters l USING batch b WHERE l.id = b.id RETURNING l.id
)
SELECT max(g.id) FROM gone g

-- name: delete_executions
-- Removes the next executions of a queue; how far it came, and the event of the last one.
WITH batch AS MATERIALIZED (
    SELECT p.event_id, p.replay_id FROM {schema}.processed_events p
    WHERE p.queue_id = %(queue)s AND (p.event_id, p.replay_id) > (%(event)s::uuid, %(replay)s)
    ORDER BY p.event_id, p.replay_id LIMIT %(limit)s
), gone AS (
    DELETE FROM {schema}.processed_events p USING batch b
    WHERE p.queue_id = %(queue)s AND p.event_id = b.event_id AND p.replay_id = b.replay_id
)
SELECT b.event_id, b.replay_id FROM batch b ORDER BY b.event_id DESC, b.replay_id DESC LIMIT 1

-- name: delete_deliveries
-- Removes the next deliveries of a lane but its newest; how far it came.
WITH batch AS MATERIALIZED (
    SELECT d.seq FROM {schema}.deliveries d
    WHERE d.queue_id = %(queue)s AND d.lane = %(lane)s AND d.seq > %(after)s AND d.seq < (
        SELECT n.seq FROM {schema}.deliveries n WHERE n.queue_id = %(queue)s AND n.lane = %(lane)s
        ORDER BY n.seq DESC LIMIT 1)
    ORDER BY d.seq LIMIT %(limit)s
), gone AS (
    DELETE FROM {schema}.deliveries d USING batch b
    WHERE d.queue_id = %(queue)s AND d.lane = %(lane)s AND d.seq = b.seq RETURNING d.seq
)
SELECT max(g.seq) FROM gone g

-- name: delete_claims
-- Removes the next claims of a lane but its newest, with all that belongs to them; how far it came.
WITH batch AS MATERIALIZED (
    SELECT c.id, c.lo FROM {schema}.claims c
    WHERE c.queue_id = %(queue)s AND c.lane = %(lane)s AND c.lo > %(after)s AND c.lo < (
        SELECT n.lo FROM {schema}.claims n WHERE n.queue_id = %(queue)s AND n.lane = %(lane)s
        ORDER BY n.lo DESC LIMIT 1)
    ORDER BY c.lo LIMIT %(limit)s FOR UPDATE
), progress AS (
    DELETE FROM {schema}.progress p USING batch b WHERE p.claim_id = b.id
), settlements AS (
    DELETE FROM {schema}.settlements s USING batch b WHERE s.claim_id = b.id
), gone AS (
    DELETE FROM {schema}.claims c USING batch b WHERE c.id = b.id RETURNING c.lo
)
SELECT max(g.lo) FROM gone g

-- name: leftover
-- What stands in the way of removing an emptied queue. Under the tick lock and the lane locks.
SELECT EXISTS (SELECT 1 FROM {schema}.bindings b WHERE b.queue_id = %(queue)s) AS bound,
       EXISTS (SELECT 1 FROM {schema}.exceptions e WHERE e.queue_id = %(queue)s)
       OR EXISTS (SELECT 1 FROM {schema}.dead_letters l WHERE l.queue_id = %(queue)s)
       OR EXISTS (SELECT 1 FROM {schema}.processed_events p WHERE p.queue_id = %(queue)s) AS refilled

-- name: finish
-- Removes an emptied queue with its layouts and its newest delivery and claim of each lane. Under the tick lock and the
-- lane locks.
WITH deliveries AS (
    DELETE FROM {schema}.deliveries d WHERE d.queue_id = %(queue)s
), claims AS (
    DELETE FROM {schema}.claims c WHERE c.queue_id = %(queue)s RETURNING c.id
), progress AS (
    DELETE FROM {schema}.progress p USING claims c WHERE p.claim_id = c.id
), settlements AS (
    DELETE FROM {schema}.settlements s USING claims c WHERE s.claim_id = c.id
)
DELETE FROM {schema}.queues q WHERE q.id = %(queue)s
