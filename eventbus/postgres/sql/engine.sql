-- Calls of the engine's functions, which the migrations install and explain.

-- name: tick
-- Relays the next rows.
SELECT state, more, events, deliveries, fed, unknown, due_in, counts FROM {schema}.tick(%s, %s)

-- name: bindings
-- Every queue's patterns, with the version that they belong to.
SELECT b.bindings_version, d.queue_id, d.pattern FROM {schema}.bus b LEFT JOIN {schema}.bindings d ON true

-- name: resolve
-- Stores where topics go.
SELECT {schema}.resolve_topics(%s, %s::json)

-- name: filling
-- The queues that are filled with what was relayed before they began.
SELECT f.queue_id, q.name
FROM {schema}.fillings f JOIN {schema}.queues q ON q.id = f.queue_id
ORDER BY f.queue_id

-- name: fill
-- The next step of a filling queue.
SELECT state, events, deliveries, unknown FROM {schema}.fill(%s, %s)

-- name: fall_asleep
-- Asks publishers to wake the relay.
SELECT {schema}.fall_asleep(%s)

-- name: fire_due
-- Moves due scheduled events to the outbox.
SELECT fired, upto FROM {schema}.fire_due(%s, %s)

-- name: is_foreign
-- Whether this database was restored from another one.
SELECT {schema}.is_foreign()

-- name: lock_for_attach
-- Keeps publishers and relays out while a new position is taken.
LOCK TABLE {schema}.outbox, {schema}.ticks IN SHARE ROW EXCLUSIVE MODE

-- name: attach
-- Takes a new position after a restore.
SELECT {schema}.attach(%s)

-- name: declare
-- Creates or changes queues.
SELECT name, id FROM {schema}.declare_queues(%s::json)

-- name: register
-- Makes a live worker.
SELECT {schema}.register_worker(%s::uuid, %s, %s)

-- name: unregister
-- Lets a worker leave.
SELECT {schema}.unregister_worker(%s::uuid)

-- name: beat
-- One heartbeat.
SELECT alive, expired FROM {schema}.beat(%s::uuid, %s, %s, %s::json)

-- name: take_over
-- Takes over workers that went silent.
SELECT workers, deliveries FROM {schema}.take_over(%s::uuid, %s, %s)

-- name: claim
-- Claims the next range of each queue.
SELECT claim_id, queue_id, lane, seq, size, event_id, topic, key, payload, headers, published_at, replay_id, ordered,
       twin
FROM {schema}.claim(%s::uuid, %s::uuid, %s::integer[], %s::integer[], %s, %s)

-- name: claim_due
-- Claims exceptions that are due.
SELECT exception_id, queue_id, due_in, crashed_in, attempts, crashes, due_at, size, event_id, topic, key, payload,
       headers, published_at, replay_id, redriven, ordered, twin
FROM {schema}.claim_due(%s::uuid, %s::uuid, %s::integer[], %s::integer[], %s::timestamptz[], %s, %s, %s)

-- name: settle
-- Settles whole claims.
SELECT settle FROM {schema}.settle(%s::bigint[], %s::uuid[], %s::json, %s::bigint[])

-- name: settle_exceptions
-- Settles exceptions.
SELECT settle_exceptions FROM {schema}.settle_exceptions(%s::bigint[], %s::uuid[], %s::json)

-- name: record_progress
-- Records finished deliveries of a claim that stays open.
SELECT {schema}.record_progress(%s, %s::uuid, %s::bigint[], %s::json)

-- name: detach
-- Settles an ordered claim while some of it still runs.
SELECT seq, exception_id FROM {schema}.detach(%s, %s::uuid, %s::bigint[], %s::json, %s::bigint[])

-- name: purge_executions
-- Removes completed executions that are old enough.
SELECT {schema}.purge_executions(%s, %s)

-- name: held
-- What a worker holds by the database.
SELECT kind, id, token FROM {schema}.held(%s::uuid, %s)

-- name: release_unknown
-- Gives back what a worker holds without knowing.
SELECT {schema}.release_unknown(%s::uuid, %s::bigint[], %s::bigint[])

-- name: pause_queue
-- Pauses a queue for one source.
SELECT {schema}.pause_queue(%s, %s, %s, %s::double precision, %s::double precision)

-- name: resume_queue
-- Ends the pause of one source.
SELECT {schema}.resume_queue(%s, %s)

-- name: end_probe
-- Ends the pause that a probe has tried with success.
SELECT {schema}.end_probe(%s, %s)

-- name: free_probe
-- Lets another probe be taken.
SELECT {schema}.free_probe(%s, %s, %s::uuid)

-- name: undone
-- Whether anybody holds or waits for deliveries of these queues, or publishes in a transaction that is still open.
SELECT EXISTS (SELECT 1 FROM {schema}.exceptions e WHERE e.queue_id = ANY (%s::integer[]) AND e.state <> 'parked')
    OR EXISTS (SELECT 1 FROM {schema}.queues q WHERE q.id = ANY (%s::integer[]) AND q.state <> 'active')
    OR EXISTS (
        SELECT 1 FROM {schema}.workers w JOIN {schema}.claims c ON c.worker_id = w.id AND c.id >= w.open_from
        WHERE w.state = 'live' AND c.queue_id = ANY (%s::integer[])
          AND NOT EXISTS (SELECT 1 FROM {schema}.settlements s WHERE s.claim_id = c.id))
    OR EXISTS (
        SELECT 1 FROM pg_catalog.pg_locks l
        WHERE l.locktype = 'relation' AND l.mode = 'RowExclusiveLock' AND l.granted
          AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())
          AND l.relation = '{schema}.outbox'::regclass)
