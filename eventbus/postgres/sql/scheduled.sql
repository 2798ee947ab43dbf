-- Delayed events that have not fired yet. Moments are text, so that no year and no time zone is beyond a client.

-- name: topics
-- The topics among them.
SELECT DISTINCT s.topic FROM {schema}.scheduled s ORDER BY s.topic

-- name: list
-- The next ones; topics null: of every topic.
SELECT s.event_id, s.topic, s.key, s.priority, s.size,
       to_char(s.created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') AS created_at,
       to_char(s.due_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') AS due_at,
       EXTRACT(EPOCH FROM s.due_at - clock_timestamp())::double precision AS due_in
FROM {schema}.scheduled s WHERE %(topics)s::text[] IS NULL OR s.topic = ANY (%(topics)s)
ORDER BY s.due_at, s.id LIMIT %(limit)s
