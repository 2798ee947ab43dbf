-- Retention: what is removed when it is old enough.

-- Removes completed executions that are older than p_retention seconds, at most p_limit. Returns how many; null when
-- another worker is at it.
--
-- An execution is what keeps its event from running once more, so it stays while a delivery of that event in that queue
-- may still come to a handler:
--   * as a dead letter, which may be redriven, or as an exception;
--   * in a claim that is open since then;
--   * because the event was published more than once: in a delivery that waits or is claimed, or not relayed yet, or
--     delayed; or by a replay or a filling that goes on.
-- An event that was published once has one delivery for each execution. That one was claimed before it was completed, so
-- neither the line nor the outbox need be searched for it.
CREATE FUNCTION {schema}.purge_executions(p_retention double precision, p_limit integer) RETURNS integer
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET jit = off SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    v_before timestamptz := clock_timestamp() - make_interval(secs => p_retention);
    v_count integer;
BEGIN
    PERFORM {schema}.require_read_committed();
    IF NOT pg_try_advisory_xact_lock({schema}.lock_key('purge')) THEN
        RETURN NULL;
    END IF;
    PERFORM set_config('synchronous_commit', 'off', true);
    WITH held AS MATERIALIZED (  -- hashed once, not searched for each row
        SELECT e.queue_id, e.outbox_id FROM {schema}.exceptions e WHERE e.outbox_id IS NOT NULL
        UNION ALL
        SELECT d.queue_id, d.outbox_id FROM {schema}.workers w
        CROSS JOIN LATERAL (
            SELECT c.queue_id, c.lane, c.lo, c.hi FROM {schema}.claims c
            WHERE c.worker_id = w.id AND c.id >= w.open_from AND c.claimed_at < v_before
              AND NOT EXISTS (SELECT 1 FROM {schema}.settlements s WHERE s.claim_id = c.id) OFFSET 0) c
        CROSS JOIN LATERAL (
            SELECT d.queue_id, d.outbox_id FROM {schema}.deliveries d
            WHERE d.queue_id = c.queue_id AND d.lane = c.lane AND d.seq BETWEEN c.lo AND c.hi OFFSET 0) d
        WHERE w.state = 'live'
    )
    DELETE FROM {schema}.processed_events p WHERE p.completed_at < v_before AND p.ctid = ANY (ARRAY(
        SELECT x.ctid FROM {schema}.processed_events x
        CROSS JOIN LATERAL (
            SELECT array_agg(o.id) AS ids FROM {schema}.outbox o WHERE o.event_id = x.event_id OFFSET 0) o
        WHERE x.claimed_at < v_before AND x.completed_at < v_before
          AND NOT EXISTS (
            SELECT 1 FROM {schema}.dead_letters l WHERE l.event_id = x.event_id AND l.queue_id = x.queue_id OFFSET 0)
          AND NOT EXISTS (SELECT 1 FROM {schema}.scheduled s WHERE s.event_id = x.event_id OFFSET 0)
          AND NOT coalesce((
            SELECT bool_or((x.queue_id, i.id) IN (SELECT h.queue_id, h.outbox_id FROM held h))
            FROM unnest(o.ids) AS i (id)), false)
          AND CASE WHEN cardinality(o.ids) > 1
                THEN NOT {schema}.is_delivered_again(x.queue_id, o.ids, x.replay_id) ELSE true END
        LIMIT p_limit));
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END
$body$;

-- Whether one of several outbox rows with the same event is, or will be, a delivery of this queue that is not done.
CREATE FUNCTION {schema}.is_delivered_again(p_queue integer, p_outbox_ids bigint[], p_replay integer) RETURNS boolean
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    t {schema}.ticks%ROWTYPE;
BEGIN
    SELECT * INTO STRICT t FROM {schema}.ticks ORDER BY id DESC LIMIT 1;
    PERFORM 1 FROM {schema}.outbox o WHERE o.id = ANY (p_outbox_ids)
        AND NOT (o.id <= t.ids_upto AND pg_visible_in_snapshot(o.xid, t.snapshot))
        AND NOT coalesce(o.id <= t.last_id AND pg_visible_in_snapshot(o.xid, t.window_snapshot), false);
    IF FOUND
       OR EXISTS (SELECT 1 FROM {schema}.fillings f WHERE f.queue_id = p_queue)
       OR EXISTS (SELECT 1 FROM {schema}.replays r WHERE r.id = p_replay AND r.state = 'running') THEN
        RETURN true;
    END IF;
    RETURN EXISTS (
        SELECT 1 FROM (SELECT d.* FROM {schema}.deliveries d WHERE d.outbox_id = ANY (p_outbox_ids) OFFSET 0) d
        LEFT JOIN LATERAL (
            SELECT c.id, c.hi FROM {schema}.claims c
            WHERE c.queue_id = d.queue_id AND c.lane = d.lane AND c.lo <= d.seq
            ORDER BY c.lo DESC LIMIT 1) c ON true
        WHERE d.queue_id = p_queue AND d.replay_id = p_replay
          AND (c.id IS NULL OR c.hi < d.seq
            OR NOT EXISTS (SELECT 1 FROM {schema}.settlements s WHERE s.claim_id = c.id)
            OR EXISTS (
                SELECT 1 FROM {schema}.exceptions e
                WHERE e.queue_id = d.queue_id AND e.lane = d.lane AND d.seq BETWEEN e.seq AND e.range_hi)));
END
$body$;

-- Whether the caller is to do this duty now: then nobody else does for p_seconds. Whoever dies with it loses that turn.
CREATE FUNCTION {schema}.take_duty(p_name text, p_seconds double precision) RETURNS boolean
LANGUAGE sql VOLATILE
SET search_path = pg_catalog, pg_temp AS $body$
    WITH taken AS (
        INSERT INTO {schema}.duties AS d (name, taken_until)
        VALUES (p_name, clock_timestamp() + make_interval(secs => p_seconds))
        ON CONFLICT (name) DO UPDATE SET taken_until = excluded.taken_until WHERE d.taken_until <= clock_timestamp()
        RETURNING 1
    )
    SELECT EXISTS (SELECT 1 FROM taken)
$body$;
