-- Take-over: what a worker held that is gone, or that does not know of it, comes back.

-- Whether a delivery with so many crashes must have a process for itself: from the second one on, so that a single kill
-- of a worker costs no speed, and in time for the innocent ones, which run well alone and so never reach the last.
CREATE FUNCTION {schema}.must_run_alone(p_crashes integer, p_max_crashes integer) RETURNS boolean
LANGUAGE sql IMMUTABLE
RETURN p_crashes > 0 AND p_crashes >= least(2, p_max_crashes - 1);

-- Ends a claim on behalf of a worker that no longer works on it. Deliveries up to p_started come back as crashed, or
-- die at the p_max_crashes-th crash; the rest comes back as ranges that never started. p_started null: as if all had
-- started. Deliveries that the worker has recorded stay as recorded. Of an ordered lane each comes back by itself: the
-- first of its key waits, and the others are parked behind it. Any of those that had started may have been running, for
-- those before it may have been done; but only the first can die of it. Returns how many came back or died. The caller
-- has locked the lane if it is ordered.
CREATE FUNCTION {schema}.give_back(p_claim bigint, p_started bigint, p_max_crashes integer) RETURNS integer
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_memoize = off
SET jit = off SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    c {schema}.claims%ROWTYPE;
    v_lost bigint[];
    v_ordered boolean;
    v_started bigint;
    v_crashed bigint[];
    v_keys text[];
BEGIN
    SELECT * INTO STRICT c FROM {schema}.claims k WHERE k.id = p_claim;
    INSERT INTO {schema}.settlements (claim_id, kind) VALUES (c.id, 'lost') ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    v_ordered := {schema}.is_ordered(c.queue_id, c.lane);
    v_started := coalesce(p_started, c.hi);
    WITH lost AS (
        INSERT INTO {schema}.progress (claim_id, seq, outcome)
        SELECT c.id, g.seq, 'lost' FROM generate_series(c.lo, c.hi) AS g (seq) ORDER BY g.seq
        ON CONFLICT DO NOTHING
        RETURNING seq
    )
    SELECT coalesce(array_agg(l.seq ORDER BY l.seq), '{}') INTO v_lost FROM lost l;
    WITH back AS (
        SELECT d.seq, d.outbox_id, d.replay_id, k.key,
               CASE WHEN d.seq > v_started THEN 0
                    WHEN k.key IS NULL OR row_number() OVER (PARTITION BY k.key ORDER BY d.seq) = 1 THEN 1
                    ELSE least(1, p_max_crashes - 1) END AS crashes
        FROM unnest(v_lost) AS l (seq)
        CROSS JOIN LATERAL (
            SELECT d.seq, d.outbox_id, d.replay_id FROM {schema}.deliveries d
            WHERE d.queue_id = c.queue_id AND d.lane = c.lane AND d.seq = l.seq OFFSET 0) d
        CROSS JOIN LATERAL (
            SELECT CASE WHEN v_ordered THEN (SELECT o.key FROM {schema}.outbox o WHERE o.id = d.outbox_id) END AS key
        ) k
        WHERE v_ordered OR d.seq <= v_started
    ), inserted AS (
        INSERT INTO {schema}.exceptions (due_at, seq, outbox_id, queue_id, lane, replay_id, crashes, alone, state, key)
        SELECT clock_timestamp(), b.seq, b.outbox_id, c.queue_id, c.lane, b.replay_id, b.crashes,
               {schema}.must_run_alone(b.crashes, p_max_crashes),
               CASE WHEN b.key IS NULL THEN 'waiting' ELSE 'parked' END, b.key
        FROM back b ORDER BY b.seq
        RETURNING id, key, crashes
    )
    SELECT ARRAY(SELECT DISTINCT i.key FROM inserted i WHERE i.key IS NOT NULL),
           ARRAY(SELECT i.id FROM inserted i WHERE i.crashes >= p_max_crashes ORDER BY i.id)
    INTO v_keys, v_crashed;
    PERFORM {schema}.bury(v_crashed, array_fill('worker died'::text, ARRAY[cardinality(v_crashed)]))
    WHERE cardinality(v_crashed) > 0;
    IF cardinality(v_keys) > 0 THEN
        PERFORM {schema}.advance_keys(c.queue_id, c.lane, v_keys);
    END IF;
    INSERT INTO {schema}.exceptions (due_at, seq, range_hi, queue_id, lane)
    SELECT clock_timestamp(), min(r.seq), max(r.seq), c.queue_id, c.lane
    FROM (SELECT l.seq, l.seq - row_number() OVER (ORDER BY l.seq) AS island
          FROM unnest(v_lost) AS l (seq) WHERE NOT v_ordered AND l.seq > v_started) r
    GROUP BY r.island ORDER BY 3;
    RETURN cardinality(v_lost);
END
$body$;

-- Gives back exceptions on behalf of a worker that no longer works on them, each as crashed; of those of one key only
-- the first can die of it, and the others are parked behind it. One whose transactional handler has committed is done.
-- The caller has locked the lanes.
CREATE FUNCTION {schema}.give_back_exceptions(p_ids bigint[], p_crashes integer, p_max_crashes integer)
RETURNS integer
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_memoize = off
SET jit = off SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    v_lanes json := {schema}.lanes_of_keys(p_ids);
    v_dead bigint[];
BEGIN
    PERFORM {schema}.complete_executions(array_agg(e.queue_id), array_agg(e.outbox_id), array_agg(e.replay_id))
    FROM {schema}.exceptions e WHERE e.id = ANY (p_ids) AND e.finished HAVING count(*) > 0;
    DELETE FROM {schema}.exceptions e WHERE e.id = ANY (p_ids) AND e.finished;
    UPDATE {schema}.exceptions e SET token = NULL, worker_id = NULL, due_at = clock_timestamp(),
        state = CASE WHEN e.key IS NULL THEN 'waiting' ELSE 'parked' END,
        crashes = b.crashes, alone = {schema}.must_run_alone(b.crashes, p_max_crashes)
    FROM (
        SELECT x.id, CASE WHEN x.key IS NULL
                OR row_number() OVER (PARTITION BY x.queue_id, x.lane, x.key ORDER BY x.seq) = 1
            THEN x.crashes + p_crashes
            ELSE greatest(x.crashes, least(x.crashes + p_crashes, p_max_crashes - 1)) END AS crashes
        FROM {schema}.exceptions x WHERE x.id = ANY (p_ids)
    ) b
    WHERE e.id = b.id;
    v_dead := ARRAY(
        SELECT e.id FROM {schema}.exceptions e
        WHERE e.id = ANY (p_ids) AND p_crashes > 0 AND e.crashes >= p_max_crashes ORDER BY e.id);
    PERFORM {schema}.bury(v_dead, array_fill('worker died'::text, ARRAY[cardinality(v_dead)]))
    WHERE cardinality(v_dead) > 0;
    PERFORM {schema}.advance_lanes(v_lanes);
    RETURN cardinality(p_ids);
END
$body$;

-- A worker releases what the database says it holds and it does not know: claims whose reply was lost. None of it
-- has started.
CREATE FUNCTION {schema}.release_unknown(p_worker uuid, p_claims bigint[], p_exceptions bigint[]) RETURNS integer
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_memoize = off
SET jit = off SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    v_id bigint;
    v_held bigint[];
    v_count integer := 0;
BEGIN
    PERFORM {schema}.require_read_committed();
    PERFORM {schema}.lock_lanes_of(p_claims, p_exceptions);
    FOR v_id IN
        SELECT c.id FROM {schema}.claims c WHERE c.id = ANY (p_claims) AND c.worker_id = p_worker ORDER BY c.id
    LOOP
        v_count := v_count + {schema}.give_back(v_id, 0, 2147483647);
    END LOOP;
    v_held := ARRAY(
        SELECT e.id FROM {schema}.exceptions e
        WHERE e.id = ANY (p_exceptions) AND e.worker_id = p_worker AND e.state = 'claimed'
        ORDER BY e.id FOR UPDATE);
    RETURN v_count + {schema}.give_back_exceptions(v_held, 0, 2147483647);
END
$body$;

-- Takes over the workers whose last heartbeat is older than p_lease seconds by this server's clock. Returns how
-- many workers and deliveries. Nothing happens within half a lease of the server's start: then everybody is silent.
-- A worker that was stopped between the end of a handler's transaction and its commit holds what we need: it is left
-- for the next time, so that the one who takes over does not go silent itself.
CREATE FUNCTION {schema}.take_over(p_worker uuid, p_lease double precision, p_max_crashes integer,
                                   OUT workers integer, OUT deliveries integer)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_memoize = off
SET jit = off SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    v_silent uuid[];
    v_dead uuid;
    v_count integer;
BEGIN
    workers := 0;
    deliveries := 0;
    PERFORM {schema}.require_read_committed();
    IF clock_timestamp() - pg_postmaster_start_time() < make_interval(secs => p_lease / 2) THEN
        RETURN;
    END IF;
    PERFORM set_config('lock_timeout', '1s', true);
    v_silent := ARRAY(
        SELECT x.id FROM {schema}.workers x
        WHERE x.state = 'live' AND x.id <> p_worker
          AND x.heartbeat_at < clock_timestamp() - make_interval(secs => p_lease)
        ORDER BY x.id LIMIT 16 FOR UPDATE SKIP LOCKED);
    IF cardinality(v_silent) = 0 THEN
        RETURN;
    END IF;
    BEGIN
        PERFORM {schema}.lock_lanes_of(
            array_agg(h.id) FILTER (WHERE h.kind = 'claim'), array_agg(h.id) FILTER (WHERE h.kind = 'exception'))
        FROM {schema}.workers w, LATERAL {schema}.held(w.id, w.open_from) h WHERE w.id = ANY (v_silent);
        FOREACH v_dead IN ARRAY v_silent LOOP
            BEGIN
                v_count := {schema}.bring_back(v_dead, p_max_crashes);
                workers := workers + 1;
                deliveries := deliveries + v_count;
            EXCEPTION WHEN lock_not_available THEN
                NULL;
            END;
        END LOOP;
    EXCEPTION WHEN lock_not_available THEN
        workers := 0;
        deliveries := 0;
    END;
    IF workers > 0 THEN
        PERFORM pg_notify('{name}.work', '*') WHERE pg_notification_queue_usage() < 0.5;
    END IF;
END
$body$;

-- Marks one worker dead and gives back what it held.
CREATE FUNCTION {schema}.bring_back(p_dead uuid, p_max_crashes integer) RETURNS integer
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $body$
DECLARE
    w {schema}.workers%ROWTYPE;
    v_claim bigint;
    v_count integer := 0;
BEGIN
    UPDATE {schema}.workers SET state = 'dead' WHERE id = p_dead RETURNING * INTO STRICT w;
    FOR v_claim IN
        SELECT h.id FROM {schema}.held(w.id, w.open_from) h WHERE h.kind = 'claim' ORDER BY h.id
    LOOP
        v_count := v_count + {schema}.give_back(v_claim, (w.started ->> v_claim::text)::bigint, p_max_crashes);
    END LOOP;
    RETURN v_count + {schema}.give_back_exceptions(ARRAY(
        SELECT e.id FROM {schema}.exceptions e WHERE e.worker_id = w.id AND e.state = 'claimed'
        ORDER BY e.id FOR UPDATE), 1, p_max_crashes);
END
$body$;
