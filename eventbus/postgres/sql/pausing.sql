-- Pauses of queues, as the command line shows and changes them.

-- name: list
-- Every pause, the oldest of each queue first. ends_in is 0 for one that is over and has not been removed.
SELECT q.name AS queue, p.source, p.reason, p.since, p.until,
       CASE WHEN p.until IS NOT NULL THEN greatest(EXTRACT(EPOCH FROM p.until - clock_timestamp()), 0)
            END::double precision AS ends_in,
       p.probe_seconds IS NOT NULL AS probed, coalesce(p.probe_until > clock_timestamp(), false) AS probing
FROM {schema}.pauses p JOIN {schema}.queues q ON q.id = p.queue_id
ORDER BY q.name, p.since, p.source

-- name: pause
-- Pauses a queue for the operator.
SELECT {schema}.pause_queue(q.id, %(source)s, %(reason)s, %(seconds)s::double precision, NULL)
FROM {schema}.queues q WHERE q.name = %(queue)s

-- name: resume
-- Ends the pause of one source.
SELECT {schema}.resume_queue(q.id, %(source)s) FROM {schema}.queues q WHERE q.name = %(queue)s
