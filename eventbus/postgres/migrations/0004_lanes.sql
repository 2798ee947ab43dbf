-- Lanes: keys that wait behind an earlier event, deliveries that give up, executions, and queues whose lanes change.
--
-- In an ordered queue a key has at most one exception that is not parked. Whoever changes the exceptions or the dead
-- letters of a key holds the lock of its lane before it reads them, and reads in a new statement; otherwise a row stays
-- parked behind nothing.

-- What is under way of a key, however many are parked behind it.
CREATE INDEX exceptions_front ON {schema}.exceptions (queue_id, lane, key) WHERE key IS NOT NULL AND state <> 'parked';

CREATE FUNCTION {schema}.is_ordered(p_queue integer, p_lane integer) RETURNS boolean
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT l.kind = 'ordered' FROM {schema}.layouts l
    WHERE l.queue_id = p_queue AND l.lane_from <= p_lane ORDER BY l.lane_from DESC LIMIT 1;
END;

-- Locks lanes until the end of the transaction, all of a transaction by one call and in one order.
CREATE FUNCTION {schema}.lock_lanes(p_queues integer[], p_lanes integer[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    v_lane record;
BEGIN
    FOR v_lane IN
        SELECT DISTINCT u.queue_id, u.lane FROM unnest(p_queues, p_lanes) AS u (queue_id, lane) ORDER BY 1, 2
    LOOP
        PERFORM pg_advisory_xact_lock({schema}.lock_key('lane', v_lane.queue_id, v_lane.lane));
    END LOOP;
END
$body$;

-- Lets the first parked event of each key run, where nothing of the key is under way and no dead letter blocks it. Where
-- more than one is not parked, because one was redriven while a claim had another, all but the first are parked.
CREATE FUNCTION {schema}.advance_keys(p_queue integer, p_lane integer, p_keys text[]) RETURNS integer
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_memoize = off
SET jit = off SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    v_count integer;
BEGIN
    UPDATE {schema}.exceptions e SET state = 'parked'
    WHERE e.state = 'waiting' AND e.id = ANY (ARRAY(
        SELECT f.id FROM (SELECT DISTINCT k.key FROM unnest(p_keys) AS k (key) WHERE k.key IS NOT NULL) k
        CROSS JOIN LATERAL (
            SELECT x.id, x.state,
                   row_number() OVER (ORDER BY x.state, x.seq) AS place  -- claimed before waiting
            FROM {schema}.exceptions x
            WHERE x.queue_id = p_queue AND x.lane = p_lane AND x.key = k.key AND x.state <> 'parked') f
        WHERE f.place > 1 AND f.state = 'waiting'));
    UPDATE {schema}.exceptions e SET state = 'waiting', due_at = clock_timestamp()
    WHERE e.id = ANY (ARRAY(
        SELECT f.id FROM (SELECT DISTINCT k.key FROM unnest(p_keys) AS k (key) WHERE k.key IS NOT NULL) k
        CROSS JOIN LATERAL (
            SELECT x.id, x.seq FROM {schema}.exceptions x
            WHERE x.queue_id = p_queue AND x.lane = p_lane AND x.key = k.key
            ORDER BY x.seq LIMIT 1) f
        WHERE NOT EXISTS (
            SELECT 1 FROM {schema}.exceptions x
            WHERE x.queue_id = p_queue AND x.lane = p_lane AND x.key = k.key AND x.state <> 'parked' OFFSET 0)
          AND NOT EXISTS (
            SELECT 1 FROM {schema}.dead_letters l
            WHERE l.queue_id = p_queue AND l.lane = p_lane AND l.key = k.key AND l.blocks
              AND l.seq < f.seq OFFSET 0)));
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END
$body$;

-- Makes dead letters of exceptions, each with its reason. Nobody runs them any more, so that another delivery of the
-- same event may. The caller has locked the lanes, and advances the keys.
CREATE FUNCTION {schema}.bury(p_ids bigint[], p_reasons text[]) RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_memoize = off SET jit = off SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
    IF coalesce(cardinality(p_ids), 0) = 0 THEN
        RETURN;
    END IF;
    INSERT INTO {schema}.dead_letters (published_at, queue_id, lane, seq, outbox_id, redriven_from, replay_id, attempts,
                                       crashes, blocks, event_id, topic, key, payload, headers, reason, first_error,
                                       last_error)
    SELECT o.published_at, e.queue_id, e.lane, e.seq, e.outbox_id, e.redriven_from, e.replay_id, e.attempts,
           e.crashes, e.key IS NOT NULL AND q.when_exhausted = 'park', o.event_id, o.topic, o.key, o.payload, o.headers,
           u.reason, e.first_error, e.last_error
    FROM unnest(p_ids, p_reasons) AS u (id, reason)
    CROSS JOIN LATERAL (SELECT e.* FROM {schema}.exceptions e WHERE e.id = u.id OFFSET 0) e
    CROSS JOIN LATERAL (SELECT q.when_exhausted FROM {schema}.queues q WHERE q.id = e.queue_id OFFSET 0) q
    LEFT JOIN LATERAL (SELECT o.* FROM {schema}.outbox o WHERE o.id = e.outbox_id OFFSET 0) o ON true
    ORDER BY e.id;
    UPDATE {schema}.processed_events p SET owner = NULL
    WHERE p.completed_at IS NULL AND p.ctid = ANY (ARRAY(
        SELECT x.ctid FROM unnest(p_ids) AS u (id)
        CROSS JOIN LATERAL (SELECT e.* FROM {schema}.exceptions e WHERE e.id = u.id OFFSET 0) e
        CROSS JOIN LATERAL (SELECT o.event_id FROM {schema}.outbox o WHERE o.id = e.outbox_id OFFSET 0) o
        CROSS JOIN LATERAL (
            SELECT x.ctid FROM {schema}.processed_events x
            WHERE x.queue_id = e.queue_id AND x.event_id = o.event_id AND x.replay_id = e.replay_id
              AND x.owner = e.outbox_id OFFSET 0) x));
    DELETE FROM {schema}.exceptions e WHERE e.id = ANY (p_ids);
END
$body$;

-- Phase 1: what is claimed gets a pending row, owned by its delivery; one that nobody owns changes hands. The rows of
-- completed executions and of those that another delivery owns stay as they are. In the order of the key, so that two
-- claims with the same events do not wait for each other in turn. False when none of them was there before, which is
-- the rule: so a plain INSERT is tried first, which costs less than one that expects conflicts.
CREATE FUNCTION {schema}.begin_executions(p_queues integer[], p_events uuid[], p_replays integer[],
                                          p_outbox_ids bigint[])
RETURNS boolean
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_memoize = off SET jit = off SET lock_timeout = '5s'
SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
    BEGIN
        INSERT INTO {schema}.processed_events (queue_id, event_id, replay_id, owner)
        SELECT u.queue_id, u.event_id, u.replay_id, u.outbox_id
        FROM unnest(p_queues, p_events, p_replays, p_outbox_ids) AS u (queue_id, event_id, replay_id, outbox_id)
        WHERE u.event_id IS NOT NULL
        ORDER BY u.queue_id, u.event_id, u.replay_id;
        RETURN false;
    EXCEPTION WHEN unique_violation THEN
        NULL;
    END;
    INSERT INTO {schema}.processed_events (queue_id, event_id, replay_id, owner)
    SELECT DISTINCT ON (u.queue_id, u.event_id, u.replay_id) u.queue_id, u.event_id, u.replay_id, u.outbox_id
    FROM unnest(p_queues, p_events, p_replays, p_outbox_ids)
        WITH ORDINALITY AS u (queue_id, event_id, replay_id, outbox_id, place)
    WHERE u.event_id IS NOT NULL
    ORDER BY u.queue_id, u.event_id, u.replay_id, u.place
    ON CONFLICT DO NOTHING;
    UPDATE {schema}.processed_events p SET owner = f.outbox_id
    FROM (
        SELECT DISTINCT ON (x.ctid) x.ctid, u.outbox_id
        FROM unnest(p_queues, p_events, p_replays, p_outbox_ids)
            WITH ORDINALITY AS u (queue_id, event_id, replay_id, outbox_id, place)
        CROSS JOIN LATERAL (
            SELECT x.ctid FROM {schema}.processed_events x
            WHERE x.queue_id = u.queue_id AND x.event_id = u.event_id AND x.replay_id = u.replay_id
              AND x.owner IS NULL AND x.completed_at IS NULL OFFSET 0) x
        ORDER BY x.ctid, u.place
    ) f
    WHERE p.ctid = f.ctid AND p.owner IS NULL AND p.completed_at IS NULL;
    RETURN true;
END
$body$;

-- What other deliveries of the same event have come to: completed, pending, or null when this one is to run it.
-- p_owned: only if it is the owner. One that became free after phase 1 had looked is taken by the next claim.
CREATE FUNCTION {schema}.twin_of(p_completed_at timestamptz, p_owner bigint, p_outbox_id bigint, p_owned boolean)
RETURNS text
LANGUAGE sql IMMUTABLE
RETURN CASE
    WHEN p_completed_at IS NOT NULL THEN 'completed'
    WHEN p_owner IS NOT NULL AND p_owner <> p_outbox_id THEN 'pending'
    WHEN p_owner IS NULL AND p_owned THEN 'pending'
END;

-- Phase 2: executions that their owners have brought to an end.
CREATE FUNCTION {schema}.complete_executions(p_queues integer[], p_outbox_ids bigint[], p_replays integer[])
RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_memoize = off SET jit = off SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
    UPDATE {schema}.processed_events p SET completed_at = clock_timestamp(), owner = NULL
    WHERE p.completed_at IS NULL AND p.ctid = ANY (ARRAY(
        SELECT x.ctid FROM unnest(p_queues, p_outbox_ids, p_replays) AS u (queue_id, outbox_id, replay_id)
        CROSS JOIN LATERAL (SELECT o.event_id FROM {schema}.outbox o WHERE o.id = u.outbox_id OFFSET 0) o
        CROSS JOIN LATERAL (
            SELECT x.ctid FROM {schema}.processed_events x
            WHERE x.queue_id = u.queue_id AND x.event_id = o.event_id AND x.replay_id = u.replay_id
              AND x.owner = u.outbox_id AND x.completed_at IS NULL OFFSET 0) x));
END
$body$;

-- The same for deliveries of one claim: those in p_seqs, or all that have no other outcome.
CREATE FUNCTION {schema}.complete_claim(p_claim bigint, p_seqs bigint[]) RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_memoize = off SET jit = off SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    c {schema}.claims%ROWTYPE;
    v_outbox bigint[];
    v_replays integer[];
    v_recorded boolean := EXISTS (SELECT 1 FROM {schema}.progress g WHERE g.claim_id = p_claim);
BEGIN
    SELECT * INTO STRICT c FROM {schema}.claims k WHERE k.id = p_claim;
    PERFORM 1 FROM {schema}.queues q WHERE q.id = c.queue_id AND q.tracking <> 'none';
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT array_agg(d.outbox_id), array_agg(d.replay_id) INTO v_outbox, v_replays
    FROM {schema}.deliveries d
    WHERE d.queue_id = c.queue_id AND d.lane = c.lane AND d.seq BETWEEN c.lo AND c.hi
      AND (p_seqs IS NULL OR d.seq = ANY (p_seqs))
      AND (NOT v_recorded OR NOT EXISTS (
        SELECT 1 FROM {schema}.progress g WHERE g.claim_id = c.id AND g.seq = d.seq AND g.outcome <> 'done' OFFSET 0));
    PERFORM {schema}.complete_executions(array_fill(c.queue_id, ARRAY[cardinality(v_outbox)]), v_outbox, v_replays)
    WHERE v_outbox IS NOT NULL;
END
$body$;

CREATE FUNCTION {schema}.lanes_wanted(p_kind text, p_lanes integer, p_present integer) RETURNS integer
LANGUAGE sql IMMUTABLE
RETURN CASE p_kind
    WHEN 'plain' THEN 1
    WHEN 'ordered' THEN COALESCE(p_lanes, p_present, 16)
    ELSE COALESCE(p_lanes, p_present, 3)
END;

-- Changes how a queue is split into lanes; null leaves as it is. True when something changes: then a new layout gets
-- what is relayed, numbered above everything that the queue has, and is claimed from once the old one is empty. The
-- caller holds the tick lock.
CREATE FUNCTION {schema}.change_layout(p_queue integer, p_kind text, p_lanes integer) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    l {schema}.layouts%ROWTYPE;
    v_kind text;
    v_lanes integer;
    v_upto bigint;
BEGIN
    SELECT * INTO STRICT l FROM {schema}.layouts x WHERE x.queue_id = p_queue ORDER BY x.lane_from DESC LIMIT 1;
    v_kind := coalesce(p_kind, l.kind);
    v_lanes := {schema}.lanes_wanted(v_kind, p_lanes, CASE WHEN v_kind = l.kind THEN l.lanes END);
    IF (v_kind, v_lanes) = (l.kind, l.lanes) THEN
        RETURN false;
    END IF;
    SELECT coalesce(max(n.seq), 0) INTO v_upto
    FROM generate_series(0, l.lane_from + l.lanes - 1) AS g (lane)
    CROSS JOIN LATERAL (
        SELECT greatest(
            (SELECT d.seq FROM {schema}.deliveries d WHERE d.queue_id = p_queue AND d.lane = g.lane
             ORDER BY d.seq DESC LIMIT 1),
            (SELECT c.hi FROM {schema}.claims c WHERE c.queue_id = p_queue AND c.lane = g.lane
             ORDER BY c.lo DESC LIMIT 1)) AS seq) n;
    INSERT INTO {schema}.layouts (queue_id, lane_from, lanes, kind)
    VALUES (p_queue, l.lane_from + l.lanes, v_lanes, v_kind);
    IF v_upto > 0 THEN  -- a settled claim by nobody makes the position
        WITH covered AS (
            INSERT INTO {schema}.claims (token, worker_id, lo, hi, queue_id, lane)
            SELECT gen_random_uuid(), '00000000-0000-0000-0000-000000000000', 1, v_upto, p_queue, g.lane
            FROM generate_series(l.lane_from + l.lanes, l.lane_from + l.lanes + v_lanes - 1) AS g (lane)
            RETURNING id
        )
        INSERT INTO {schema}.settlements (claim_id, kind) SELECT c.id, 'settled' FROM covered c ORDER BY c.id;
    END IF;
    PERFORM pg_notify('{name}.work', '*') WHERE pg_notification_queue_usage() < 0.5;
    RETURN true;
END
$body$;

-- Changes what is recorded of executions, and what happens to later events of a key; null leaves as it is.
CREATE FUNCTION {schema}.change_rules(p_queue integer, p_tracking text, p_when_exhausted text) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    v_lane record;
BEGIN
    UPDATE {schema}.queues q
    SET tracking = coalesce(p_tracking, q.tracking), when_exhausted = coalesce(p_when_exhausted, q.when_exhausted)
    WHERE q.id = p_queue AND (q.tracking <> p_tracking OR q.when_exhausted <> p_when_exhausted);
    IF NOT FOUND OR p_when_exhausted IS DISTINCT FROM 'skip' THEN
        RETURN;
    END IF;
    PERFORM {schema}.lock_lanes(array_agg(p_queue), array_agg(g.lane))
    FROM {schema}.layouts l, generate_series(l.lane_from, l.lane_from + l.lanes - 1) AS g (lane)
    WHERE l.queue_id = p_queue;
    UPDATE {schema}.dead_letters l SET blocks = false WHERE l.queue_id = p_queue AND l.blocks;
    FOR v_lane IN
        SELECT e.lane, array_agg(DISTINCT e.key) AS keys FROM {schema}.exceptions e
        WHERE e.queue_id = p_queue AND e.state = 'parked' GROUP BY e.lane ORDER BY e.lane
    LOOP
        PERFORM {schema}.advance_keys(p_queue, v_lane.lane, v_lane.keys);
    END LOOP;
END
$body$;

-- Whether something of the lanes below p_upto waits in line or is in a claim; p_from: the first that may have something
-- in line.
CREATE FUNCTION {schema}.has_line(p_queue integer, p_from integer, p_upto integer) RETURNS boolean
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $body$
BEGIN
    RETURN EXISTS (
        SELECT 1 FROM generate_series(p_from, p_upto - 1) AS g (lane)
        WHERE coalesce((SELECT d.seq FROM {schema}.deliveries d WHERE d.queue_id = p_queue AND d.lane = g.lane
                        ORDER BY d.seq DESC LIMIT 1), 0)
            > coalesce((SELECT c.hi FROM {schema}.claims c WHERE c.queue_id = p_queue AND c.lane = g.lane
                        ORDER BY c.lo DESC LIMIT 1), 0)
    ) OR EXISTS (
        SELECT 1 FROM {schema}.workers w
        CROSS JOIN LATERAL (
            SELECT c.id FROM {schema}.claims c
            WHERE c.worker_id = w.id AND c.id >= w.open_from AND c.queue_id = p_queue AND c.lane < p_upto
              AND NOT EXISTS (SELECT 1 FROM {schema}.settlements s WHERE s.claim_id = c.id) OFFSET 0) c
        WHERE w.state = 'live');
END
$body$;

-- Ends the oldest layout of a queue that has a newer one, if nothing of it waits in line or is in a claim: what left its
-- happy path moves to the lanes of the next layout. True when it is gone.
--
-- It looks without locks first, because every claim of a queue with two layouts asks; what is empty stays empty. Then it
-- locks all whom it could surprise: by the tick lock those who give something back to a lane (redrive), by the lane
-- locks those who change keys, and by the rows those who take released ranges apart and who settle. An exception that a
-- worker holds does not get a key: who settles it has not locked the lane.
CREATE FUNCTION {schema}.retire_layout(p_queue integer) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $body$
DECLARE
    l {schema}.layouts%ROWTYPE;
    n {schema}.layouts%ROWTYPE;
    v_lane integer;
BEGIN
    SELECT * INTO l FROM {schema}.layouts x WHERE x.queue_id = p_queue ORDER BY x.lane_from LIMIT 1;
    SELECT * INTO n FROM {schema}.layouts x WHERE x.queue_id = p_queue ORDER BY x.lane_from LIMIT 1 OFFSET 1;
    IF n.queue_id IS NULL OR {schema}.has_line(p_queue, l.lane_from, n.lane_from)
       OR {schema}.would_get_keys(p_queue, l.kind, n.kind, n.lane_from)
       OR NOT pg_try_advisory_xact_lock({schema}.lock_key('tick')) THEN
        RETURN false;
    END IF;
    FOR v_lane IN l.lane_from .. n.lane_from + n.lanes - 1 LOOP
        IF NOT pg_try_advisory_xact_lock({schema}.lock_key('lane', p_queue, v_lane)) THEN
            RETURN false;
        END IF;
    END LOOP;
    PERFORM 1 FROM {schema}.layouts x WHERE x.queue_id = p_queue AND x.lane_from = l.lane_from;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM 1 FROM {schema}.exceptions e WHERE e.queue_id = p_queue AND e.lane < n.lane_from ORDER BY e.id FOR UPDATE;
    IF {schema}.would_get_keys(p_queue, l.kind, n.kind, n.lane_from) THEN
        RETURN false;
    END IF;
    INSERT INTO {schema}.exceptions (due_at, seq, outbox_id, queue_id, lane, replay_id)
    SELECT e.due_at, d.seq, d.outbox_id, d.queue_id, d.lane, d.replay_id
    FROM {schema}.exceptions e JOIN {schema}.deliveries d
        ON d.queue_id = e.queue_id AND d.lane = e.lane AND d.seq BETWEEN e.seq AND e.range_hi
    WHERE e.queue_id = p_queue AND e.lane < n.lane_from AND e.range_hi IS NOT NULL
    ORDER BY d.lane, d.seq;
    DELETE FROM {schema}.exceptions e
    WHERE e.queue_id = p_queue AND e.lane < n.lane_from AND e.range_hi IS NOT NULL;
    UPDATE {schema}.exceptions e SET
        lane = n.lane_from + {schema}.lane_of(n.kind, n.lanes, coalesce(o.key, x.key), coalesce(o.priority, 0),
                                              e.outbox_id),
        key = CASE WHEN n.kind = 'ordered' THEN coalesce(o.key, x.key) END,
        state = CASE WHEN e.state = 'parked' AND n.kind <> 'ordered' THEN 'waiting' ELSE e.state END
    FROM {schema}.exceptions x LEFT JOIN {schema}.outbox o ON o.id = x.outbox_id
    WHERE x.id = e.id AND e.queue_id = p_queue AND e.lane < n.lane_from;
    UPDATE {schema}.dead_letters d SET
        lane = n.lane_from + {schema}.lane_of(n.kind, n.lanes, d.key, coalesce(o.priority, 0), d.outbox_id),
        blocks = d.blocks AND n.kind = 'ordered'
    FROM {schema}.dead_letters x LEFT JOIN {schema}.outbox o ON o.id = x.outbox_id
    WHERE x.id = d.id AND d.queue_id = p_queue AND d.lane < n.lane_from;
    DELETE FROM {schema}.layouts x WHERE x.queue_id = p_queue AND x.lane_from = l.lane_from;
    IF n.kind = 'ordered' THEN
        FOR v_lane IN n.lane_from .. n.lane_from + n.lanes - 1 LOOP
            PERFORM {schema}.settle_order(p_queue, v_lane);
        END LOOP;
    END IF;
    RETURN true;
END
$body$;

-- Whether exceptions that workers hold would get a key by a change of layouts.
CREATE FUNCTION {schema}.would_get_keys(p_queue integer, p_from text, p_to text, p_upto integer) RETURNS boolean
LANGUAGE sql STABLE SET enable_seqscan = off
BEGIN ATOMIC
    SELECT p_from <> 'ordered' AND p_to = 'ordered' AND EXISTS (
        SELECT 1 FROM {schema}.workers w
        JOIN {schema}.exceptions e ON e.worker_id = w.id AND e.state = 'claimed'
        WHERE e.queue_id = p_queue AND e.lane < p_upto);
END;

-- Brings the exceptions of a lane into the order of their keys after they came from elsewhere: of each key one at most
-- is not parked, and not before an earlier one.
CREATE FUNCTION {schema}.settle_order(p_queue integer, p_lane integer) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $body$
BEGIN
    UPDATE {schema}.exceptions e SET state = 'parked'
    WHERE e.queue_id = p_queue AND e.lane = p_lane AND e.key IS NOT NULL AND e.state = 'waiting'
      AND EXISTS (
        SELECT 1 FROM {schema}.exceptions x
        WHERE x.queue_id = p_queue AND x.lane = p_lane AND x.key = e.key AND x.id <> e.id
          AND ((x.seq, x.id) < (e.seq, e.id) OR x.state = 'claimed'));
    PERFORM {schema}.advance_keys(p_queue, p_lane, ARRAY(
        SELECT DISTINCT e.key FROM {schema}.exceptions e
        WHERE e.queue_id = p_queue AND e.lane = p_lane AND e.key IS NOT NULL AND e.state = 'parked'));
END
$body$;
