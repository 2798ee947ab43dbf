-- Retained events played into a queue once more.

-- name: queue
-- A queue by name, with its patterns.
SELECT q.id, q.state, ARRAY(SELECT b.pattern FROM {schema}.bindings b WHERE b.queue_id = q.id ORDER BY b.pattern)
FROM {schema}.queues q WHERE q.name = %(queue)s

-- name: topics
-- The topics that the relay has seen.
SELECT t.topic FROM {schema}.topics t ORDER BY t.topic

-- name: preview
-- How many retained and relayed events of each topic there are in a period, and the first and the last moment of them.
WITH t AS MATERIALIZED (
    SELECT k.* FROM {schema}.ticks k ORDER BY k.id DESC LIMIT 1
), r AS MATERIALIZED (
    SELECT r.after_id, r.upto_id FROM {schema}.replay_range(%(since)s, %(until)s) r
)
SELECT o.topic, count(*) AS events, {schema}.shown(min(o.published_at)) AS first,
       {schema}.shown(max(o.published_at)) AS last
FROM t CROSS JOIN r CROSS JOIN LATERAL (
    SELECT o.id, o.xid, o.topic, o.published_at FROM {schema}.outbox o
    WHERE o.id > r.after_id AND o.id <= r.upto_id OFFSET 0) o
WHERE o.topic = ANY (%(topics)s)
  AND (%(since)s::timestamptz IS NULL OR o.published_at >= %(since)s)
  AND (%(until)s::timestamptz IS NULL OR o.published_at < %(until)s)
  AND ((o.id <= t.ids_upto AND pg_visible_in_snapshot(o.xid, t.snapshot))
       OR coalesce(o.id <= t.last_id AND pg_visible_in_snapshot(o.xid, t.window_snapshot), false))
GROUP BY o.topic ORDER BY o.topic

-- name: begin
-- Begins a replay.
SELECT {schema}.begin_replay(%(queue)s, %(since)s, %(until)s, %(topics)s)

-- name: find
-- A replay by its number.
SELECT r.id, q.name AS queue, r.topics, {schema}.shown(r.since) AS since, {schema}.shown(r.until) AS until,
       r.deliveries, r.last_id, r.upto_id, r.state, r.created_at
FROM {schema}.replays r JOIN {schema}.queues q ON q.id = r.queue_id WHERE r.id = %(replay)s

-- name: unfinished
-- The replays of a queue that were begun and did not come to their end.
SELECT r.id FROM {schema}.replays r JOIN {schema}.queues q ON q.id = r.queue_id
WHERE q.name = %(queue)s AND r.state = 'running' ORDER BY r.id

-- name: step
-- Plays the next events of a replay.
SELECT s.state, s.deliveries, s.at_id FROM {schema}.replay_step(%(replay)s, %(limit)s, %(look)s) s
