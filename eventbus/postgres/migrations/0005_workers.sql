-- Workers: they register, beat and leave.
-- SQLSTATE EB001: this worker is not live (taken over); register anew. EB002: the bus is paused.

CREATE FUNCTION {schema}.register_worker(p_id uuid, p_host text, p_pid integer) RETURNS void
LANGUAGE sql VOLATILE
BEGIN ATOMIC
    INSERT INTO {schema}.workers (id, host, pid) VALUES (p_id, p_host, p_pid);
END;

-- One heartbeat. p_started: {"claim id": highest started seq} of every open claim; p_open_from: as far as the worker
-- remembers, no open claim has a lower id. Its memory outlives a server crash that loses settlements and repeats ids,
-- so open_from follows it only past claims that are settled in this database, and not while a claim is in flight.
-- alive is false when the worker was taken over; expired counts the others whose last heartbeat is older than p_lease
-- seconds.
CREATE FUNCTION {schema}.beat(p_id uuid, p_lease double precision, p_open_from bigint, p_started json,
                              OUT alive boolean, OUT expired integer)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    v_from bigint;
    v_open bigint;
BEGIN
    PERFORM {schema}.require_read_committed();
    PERFORM set_config('synchronous_commit', 'off', true);
    SELECT w.open_from INTO v_from FROM {schema}.workers w
    WHERE w.id = p_id AND w.state = 'live' AND w.open_from < p_open_from FOR UPDATE SKIP LOCKED;
    IF FOUND THEN
        SELECT least(
            (SELECT c.id FROM {schema}.claims c
             WHERE c.worker_id = p_id AND c.id >= v_from AND c.id < p_open_from
               AND NOT EXISTS (SELECT 1 FROM {schema}.settlements s WHERE s.claim_id = c.id)
             ORDER BY c.id LIMIT 1),
            coalesce((
                SELECT c.id + 1 FROM {schema}.claims c WHERE c.worker_id = p_id ORDER BY c.id DESC LIMIT 1), v_from),
            p_open_from)
        INTO v_open;
    END IF;
    UPDATE {schema}.workers w
    SET heartbeat_at = clock_timestamp(), started = p_started, open_from = greatest(w.open_from, v_open)
    WHERE w.id = p_id AND w.state = 'live';
    alive := FOUND;
    SELECT count(*) INTO expired FROM {schema}.workers w
    WHERE w.state = 'live' AND w.heartbeat_at < clock_timestamp() - make_interval(secs => p_lease);
END
$body$;

-- A worker leaves. Its peers are told, because nobody else knows when the retries that it was waiting for are due.
CREATE FUNCTION {schema}.unregister_worker(p_id uuid) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    DELETE FROM {schema}.workers w WHERE w.id = p_id AND w.state = 'live'
        AND NOT EXISTS (SELECT 1 FROM {schema}.exceptions e WHERE e.worker_id = p_id AND e.state = 'claimed')
        AND NOT EXISTS (
            SELECT 1 FROM {schema}.claims c WHERE c.worker_id = p_id AND c.id >= w.open_from
            AND NOT EXISTS (SELECT 1 FROM {schema}.settlements s WHERE s.claim_id = c.id));
    UPDATE {schema}.workers w SET heartbeat_at = '-infinity' WHERE w.id = p_id AND w.state = 'live';
    PERFORM pg_notify('{name}.work', '*') WHERE pg_notification_queue_usage() < 0.5;
END
$body$;

-- The share lock makes take-over wait for this transaction, and this transaction see a take-over.
CREATE FUNCTION {schema}.require_live_worker(p_worker uuid) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    PERFORM 1 FROM {schema}.workers w WHERE w.id = p_worker AND w.state = 'live' FOR KEY SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'eventbus: worker % lost its lease', p_worker USING ERRCODE = 'EB001';
    END IF;
    PERFORM 1 FROM {schema}.bus b WHERE b.state = 'running';
    IF NOT FOUND THEN
        RAISE EXCEPTION 'eventbus: the bus is paused' USING ERRCODE = 'EB002';
    END IF;
END
$body$;

-- What this worker holds, by the database: open claims and exceptions. Claims are looked for from the open_from of its
-- last heartbeat on, which has been checked; p_open_from counts only for a worker that is not registered any more.
CREATE FUNCTION {schema}.held(p_worker uuid, p_open_from bigint) RETURNS TABLE (kind text, id bigint, token uuid)
LANGUAGE sql STABLE SET enable_seqscan = off SET enable_bitmapscan = off
BEGIN ATOMIC
    SELECT 'claim', c.id, c.token FROM {schema}.claims c
    WHERE c.worker_id = p_worker
      AND c.id >= coalesce((SELECT w.open_from FROM {schema}.workers w WHERE w.id = p_worker), p_open_from)
      AND NOT EXISTS (SELECT 1 FROM {schema}.settlements s WHERE s.claim_id = c.id)
    UNION ALL
    SELECT 'exception', e.id, e.token FROM {schema}.exceptions e
    WHERE e.worker_id = p_worker AND e.state = 'claimed';
END;
