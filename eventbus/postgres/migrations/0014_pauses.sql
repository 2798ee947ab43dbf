-- Pausing queues. Of a paused queue nobody claims anything; what arrives waits, and what runs goes on.
--
-- A queue is paused while it has a row in pauses; each source has one, and nobody else removes it. Without until it lasts
-- until its source resumes. With until and without probe_seconds it ends then. With both it does not end by itself: once
-- no pause of the queue is left whose until lies ahead, the next claim takes one event as a probe, and all others wait for
-- probe_seconds. The source resumes after a good probe and pauses again after a bad one; if it does neither in time, its
-- worker may be dead, and the pause begins again.
--
-- Whoever changes pauses has locked the row of the queue. A claim only tries to: it waits for nobody.

-- Pauses a queue for one source, or anew: the times begin now, since stays, and a probe that is out is none any more.
-- p_seconds is null for a pause without end, p_probe_seconds for one that nobody probes. False: there is no such queue.
CREATE FUNCTION {schema}.pause_queue(p_queue integer, p_source text, p_reason text, p_seconds double precision,
                                     p_probe_seconds double precision) RETURNS boolean
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off AS $body$
BEGIN
    PERFORM {schema}.require_read_committed();
    PERFORM 1 FROM {schema}.queues q WHERE q.id = p_queue FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO {schema}.pauses AS p (queue_id, source, reason, until, seconds, probe_seconds)
    VALUES (p_queue, p_source, p_reason, clock_timestamp() + make_interval(secs => p_seconds), p_seconds,
            p_probe_seconds)
    ON CONFLICT (queue_id, source) DO UPDATE
    SET reason = excluded.reason, until = excluded.until, seconds = excluded.seconds,
        probe_seconds = excluded.probe_seconds, probe_by = NULL, probe_token = NULL, probe_until = NULL;
    PERFORM pg_notify('{name}.work', '*') WHERE pg_notification_queue_usage() < 0.5;
    RETURN true;
END
$body$;

-- Ends the pause of one source. The queue goes on if it was the last one. False: this source had not paused it.
CREATE FUNCTION {schema}.resume_queue(p_queue integer, p_source text) RETURNS boolean
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off AS $body$
BEGIN
    PERFORM {schema}.require_read_committed();
    PERFORM 1 FROM {schema}.queues q WHERE q.id = p_queue FOR NO KEY UPDATE;
    DELETE FROM {schema}.pauses p WHERE p.queue_id = p_queue AND p.source = p_source;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM pg_notify('{name}.work', '*') WHERE pg_notification_queue_usage() < 0.5;
    RETURN true;
END
$body$;

-- The probe has told nothing: its event was skipped, or given back. The next claim may take another one at once. False:
-- this probe counts no more.
CREATE FUNCTION {schema}.free_probe(p_queue integer, p_source text, p_token uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off AS $body$
BEGIN
    PERFORM {schema}.require_read_committed();
    PERFORM 1 FROM {schema}.queues q WHERE q.id = p_queue FOR NO KEY UPDATE;
    UPDATE {schema}.pauses p SET probe_by = NULL, probe_token = NULL, probe_until = NULL
    WHERE p.queue_id = p_queue AND p.source = p_source AND p.probe_token = p_token;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM pg_notify('{name}.work', '*') WHERE pg_notification_queue_usage() < 0.5;
    RETURN true;
END
$body$;

-- The probe was handled well, and whoever paused the queue has not decided what follows, perhaps because it is not there
-- any more: the pause is over. False: it has decided, or this probe counts no more.
CREATE FUNCTION {schema}.end_probe(p_queue integer, p_token uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off AS $body$
BEGIN
    PERFORM {schema}.require_read_committed();
    PERFORM 1 FROM {schema}.queues q WHERE q.id = p_queue FOR NO KEY UPDATE;
    DELETE FROM {schema}.pauses p WHERE p.queue_id = p_queue AND p.probe_token = p_token;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM pg_notify('{name}.work', '*') WHERE pg_notification_queue_usage() < 0.5;
    RETURN true;
END
$body$;

-- What the pauses of a queue leave to a claim. paused: nothing; ask again in so many seconds, null if only a resume ends
-- it. probe: one event, if the caller finds one and calls take_probe; it has locked the queue's row. free: everything,
-- because the last pause was over.
CREATE FUNCTION {schema}.heed_pauses(p_queue integer, OUT state text, OUT seconds double precision)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off
SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    v_now timestamptz;
    v_endless boolean;
    v_locked boolean := false;
BEGIN
    LOOP
        v_now := clock_timestamp();
        SELECT bool_or(p.until IS NULL), EXTRACT(EPOCH FROM max(greatest(p.until, p.probe_until)) - v_now)
        INTO v_endless, seconds FROM {schema}.pauses p WHERE p.queue_id = p_queue;
        state := 'paused';
        IF v_endless THEN
            seconds := NULL;
            RETURN;
        ELSIF seconds > 0 THEN
            RETURN;
        END IF;
        EXIT WHEN v_locked;
        PERFORM 1 FROM {schema}.queues q WHERE q.id = p_queue FOR NO KEY UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
            seconds := 0.05;  -- somebody takes the probe, pauses or resumes at this moment
            RETURN;
        END IF;
        v_locked := true;
    END LOOP;
    UPDATE {schema}.pauses p
    SET until = v_now + make_interval(secs => p.seconds), probe_by = NULL, probe_token = NULL, probe_until = NULL
    WHERE p.queue_id = p_queue AND p.probe_until IS NOT NULL;
    IF FOUND THEN
        SELECT EXTRACT(EPOCH FROM max(p.until) - v_now) INTO seconds FROM {schema}.pauses p WHERE p.queue_id = p_queue;
        RETURN;
    END IF;
    DELETE FROM {schema}.pauses p WHERE p.queue_id = p_queue AND p.probe_seconds IS NULL;
    seconds := NULL;
    state := CASE WHEN EXISTS (SELECT 1 FROM {schema}.pauses p WHERE p.queue_id = p_queue) THEN 'probe' ELSE 'free' END;
END
$body$;

-- Notes that this worker has just claimed the probe of all pauses of a queue. Returns for how many seconds others wait.
CREATE FUNCTION {schema}.take_probe(p_queue integer, p_worker uuid, p_token uuid) RETURNS double precision
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off AS $body$
BEGIN
    UPDATE {schema}.pauses p
    SET probe_by = p_worker, probe_token = p_token,
        probe_until = clock_timestamp() + make_interval(secs => p.probe_seconds)
    WHERE p.queue_id = p_queue;
    RETURN (SELECT max(p.probe_seconds) FROM {schema}.pauses p WHERE p.queue_id = p_queue);
END
$body$;

-- Whether anything waits in a queue, retries that are not due yet included; what is parked has something before it.
CREATE FUNCTION {schema}.is_waiting(p_queue integer) RETURNS boolean
LANGUAGE sql STABLE SET enable_seqscan = off SET enable_bitmapscan = off
BEGIN ATOMIC
    SELECT EXISTS (
            SELECT 1 FROM {schema}.exceptions e WHERE e.queue_id = p_queue AND e.state = 'waiting' AND NOT e.alone)
        OR EXISTS (SELECT 1 FROM {schema}.exceptions e WHERE e.queue_id = p_queue AND e.state = 'waiting' AND e.alone)
        OR EXISTS (
            SELECT 1 FROM {schema}.layouts l, LATERAL pg_catalog.generate_series(l.lane_from, l.lane_from + l.lanes - 1)
                AS g (lane)
            WHERE l.queue_id = p_queue
              AND (SELECT d.seq FROM {schema}.deliveries d WHERE d.queue_id = p_queue AND d.lane = g.lane
                   ORDER BY d.seq DESC LIMIT 1)
                  > COALESCE((SELECT c.hi FROM {schema}.claims c WHERE c.queue_id = p_queue AND c.lane = g.lane
                              ORDER BY c.lo DESC LIMIT 1), 0));
END;
