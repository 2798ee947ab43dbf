-- Claiming: ranges of lanes, and exceptions that are due.

-- The place of a lane among those of its layout, from 0: which one comes first changes with the turn. Of ordered lanes
-- each in turn; of prioritized ones the most urgent, but in every tenth turn one of the others.
CREATE FUNCTION {schema}.rank_in_turn(p_kind text, p_lanes integer, p_lane integer, p_turn integer) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (p_lane + p_lanes - CASE
    WHEN p_lanes = 1 THEN 0
    WHEN p_kind = 'ordered' THEN p_turn % p_lanes
    WHEN p_turn % 10 = 9 THEN 1 + (p_turn / 10) % (p_lanes - 1)
    ELSE 0 END) % p_lanes;

-- Claims the next range of each queue that has one, in the order given: at most p_limits[i] events of p_queues[i], at
-- most p_bytes of payload in all (at least one event). p_turn counts the claims of this worker.
--
-- One row per delivery that is to be handled, in order; event_id is null where the outbox no longer has the event. A
-- row without claim_id tells of queue_id that it has more: with seq above 0, deliveries up to seq are left; with seq
-- null, another worker is claiming from it at this moment; with seq 0, what is left waits for a claim that is open.
-- With a topic it tells of a pause (see 0014_pauses.sql). paused: ask again in size milliseconds, null if only a resume
-- ends it; seq is 0 if nothing waits in it. probe: the one event of this queue is the probe, and others wait for so
-- long. probing: a probe may be taken, and nothing fresh is there to be one.
--
-- A plain queue has one lane. Of an ordered queue a lane has one open claim at most, and deliveries whose key waits
-- behind an earlier event are parked here; one call takes half of the lanes at most, so that a worker can handle some
-- while others are settled. Of a prioritized queue the most urgent lane comes first, but every tenth
-- claim starts with one of the others in turn, so that none starves.
CREATE FUNCTION {schema}.claim(p_worker uuid, p_token uuid, p_queues integer[], p_limits integer[], p_bytes bigint,
                               p_turn integer DEFAULT 0)
RETURNS TABLE (claim_id bigint, queue_id integer, lane integer, seq bigint, size integer, event_id text, topic text,
               key text, payload text, headers text, published_at timestamptz, replay_id integer, ordered boolean,
               twin text)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET enable_memoize = off SET jit = off SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    v_lane record;
    v_live boolean := false;
    v_left bigint := p_bytes;
    v_queue integer := 0;
    v_room integer;
    v_most integer;
    v_count integer;
    v_bytes bigint;
    v_claim bigint;
    v_any boolean := false;
    v_first bigint;
    v_lo bigint;
    v_hi bigint;
    v_parked integer;
    v_sifted bigint[] := '{}';
    v_tracked bigint[] := '{}';
    v_twins boolean := false;
    v_pause record;
    v_probing integer[] := '{}';
    v_probed integer[] := '{}';
BEGIN
    PERFORM {schema}.require_read_committed();
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM {schema}.retire_layout(u.queue_id) FROM unnest(p_queues) AS u (queue_id)
    WHERE EXISTS (SELECT 1 FROM {schema}.layouts l WHERE l.queue_id = u.queue_id OFFSET 1);
    IF EXISTS (SELECT 1 FROM {schema}.pauses p WHERE p.queue_id = ANY (p_queues)) THEN
        FOR v_lane IN
            SELECT u.queue_id, u.place FROM unnest(p_queues) WITH ORDINALITY AS u (queue_id, place)
            WHERE EXISTS (SELECT 1 FROM {schema}.pauses p WHERE p.queue_id = u.queue_id)
        LOOP
            v_pause := {schema}.heed_pauses(v_lane.queue_id);
            IF v_pause.state = 'paused' THEN
                p_limits[v_lane.place] := 0;
                queue_id := v_lane.queue_id;
                seq := {schema}.is_waiting(v_lane.queue_id)::integer;
                size := ceil(v_pause.seconds * 1000);
                topic := 'paused';
                RETURN NEXT;
            ELSIF v_pause.state = 'probe' THEN
                p_limits[v_lane.place] := least(p_limits[v_lane.place], 1);
                v_probing := v_probing || v_lane.queue_id;
            END IF;
        END LOOP;
        size := NULL;
        topic := NULL;
    END IF;
    FOR v_lane IN
        SELECT f.*, row_number() OVER (ORDER BY f.place, f.turn) AS n,
               least(count(*) OVER (PARTITION BY f.queue_id), (f.lanes + 1) / 2) AS shares
        FROM (
            SELECT u.queue_id, u.most, u.place, q.tracking, l.kind, l.lanes, g.lane,
                   {schema}.rank_in_turn(l.kind, l.lanes, g.lane - l.lane_from, p_turn) AS turn,
                   (SELECT d.seq FROM {schema}.deliveries d WHERE d.queue_id = u.queue_id AND d.lane = g.lane
                    ORDER BY d.seq DESC LIMIT 1) AS newest,
                   (SELECT c.hi FROM {schema}.claims c WHERE c.queue_id = u.queue_id AND c.lane = g.lane
                    ORDER BY c.lo DESC LIMIT 1) AS claimed
            FROM unnest(p_queues, p_limits) WITH ORDINALITY AS u (queue_id, most, place)
            CROSS JOIN LATERAL (
                SELECT q.tracking FROM {schema}.queues q WHERE q.id = u.queue_id OFFSET 0) q
            CROSS JOIN LATERAL (
                SELECT l.kind, l.lane_from, l.lanes FROM {schema}.layouts l
                WHERE l.queue_id = u.queue_id ORDER BY l.lane_from LIMIT 1) l
            CROSS JOIN LATERAL generate_series(l.lane_from, l.lane_from + l.lanes - 1) AS g (lane)
        ) f
        WHERE f.most > 0 AND f.newest > coalesce(f.claimed, 0)
        ORDER BY n
    LOOP
        queue_id := v_lane.queue_id;
        lane := v_lane.lane;
        seq := v_lane.newest;
        IF v_lane.queue_id <> v_queue THEN
            v_queue := v_lane.queue_id;
            v_room := v_lane.most;
        END IF;
        IF v_left <= 0 OR v_room <= 0 OR v_lane.n > 64 THEN
            RETURN NEXT;
            CONTINUE;
        END IF;
        IF NOT v_live THEN
            PERFORM {schema}.require_live_worker(p_worker);
            v_live := true;
        END IF;
        IF NOT pg_try_advisory_xact_lock({schema}.lock_key('lane', v_lane.queue_id, v_lane.lane)) THEN
            seq := NULL;
            RETURN NEXT;
            CONTINUE;
        END IF;
        SELECT c.id, c.hi INTO v_claim, v_lo FROM {schema}.claims c
        WHERE c.queue_id = v_lane.queue_id AND c.lane = v_lane.lane ORDER BY c.lo DESC LIMIT 1;
        IF v_lane.kind = 'ordered' AND v_claim IS NOT NULL
           AND NOT EXISTS (SELECT 1 FROM {schema}.settlements s WHERE s.claim_id = v_claim) THEN
            seq := 0;
            RETURN NEXT;
            CONTINUE;
        END IF;
        v_lo := coalesce(v_lo, 0);
        v_most := v_room;
        IF v_lane.kind = 'ordered' THEN
            v_most := least(v_room, (v_lane.most - 1) / v_lane.shares + 1)::integer;
        END IF;
        SELECT min(d.seq), max(d.seq), sum(d.size), count(*) INTO v_first, v_hi, v_bytes, v_count
        FROM {schema}.deliveries d
        WHERE d.queue_id = v_lane.queue_id AND d.lane = v_lane.lane AND d.seq > v_lo AND d.seq <= v_lo + v_most;
        IF v_bytes > v_left THEN
            SELECT max(r.seq), max(r.bytes), count(*) INTO v_hi, v_bytes, v_count FROM (
                SELECT d.seq, sum(d.size) OVER (ORDER BY d.seq ROWS UNBOUNDED PRECEDING) AS bytes
                FROM {schema}.deliveries d
                WHERE d.queue_id = v_lane.queue_id AND d.lane = v_lane.lane AND d.seq BETWEEN v_first AND v_hi
            ) r
            WHERE r.bytes <= v_left OR (r.seq = v_first AND NOT v_any);
        END IF;
        IF v_hi IS NULL THEN
            RETURN NEXT;
            CONTINUE;
        END IF;
        v_lo := v_first;
        INSERT INTO {schema}.claims (token, worker_id, lo, hi, queue_id, lane)
        VALUES (p_token, p_worker, v_lo, v_hi, v_lane.queue_id, v_lane.lane)
        RETURNING id INTO v_claim;
        v_parked := 0;
        IF v_lane.kind = 'ordered' THEN
            v_parked := {schema}.park_blocked(v_claim);
            IF v_parked = v_count THEN
                INSERT INTO {schema}.settlements (claim_id, kind) VALUES (v_claim, 'settled');
                RETURN NEXT;
                CONTINUE;
            END IF;
        END IF;
        v_any := true;
        v_left := v_left - v_bytes;
        v_room := v_room - v_count + v_parked;
        IF v_lane.queue_id = ANY (v_probing) THEN
            v_probed := v_probed || v_lane.queue_id;
        END IF;
        IF v_parked > 0 OR v_lane.tracking <> 'none' THEN
            v_sifted := v_sifted || v_claim;
            IF v_lane.tracking = 'idempotent' THEN
                v_tracked := v_tracked || v_claim;
            END IF;
        ELSE
            RETURN QUERY
                SELECT v_claim, v_lane.queue_id, v_lane.lane, d.seq, o.size, o.event_id::text, o.topic, o.key,
                       o.payload::text, o.headers::text, o.published_at, d.replay_id, v_lane.kind = 'ordered',
                       NULL::text
                FROM {schema}.deliveries d
                LEFT JOIN LATERAL (SELECT o.* FROM {schema}.outbox o WHERE o.id = d.outbox_id OFFSET 0) o ON true
                WHERE d.queue_id = v_lane.queue_id AND d.lane = v_lane.lane AND d.seq BETWEEN v_lo AND v_hi
                ORDER BY d.seq;
        END IF;
        IF v_hi < v_lane.newest THEN
            RETURN NEXT;
        END IF;
    END LOOP;
    FOREACH queue_id IN ARRAY v_probing LOOP
        seq := 1;
        size := NULL;
        topic := 'probing';
        IF queue_id = ANY (v_probed) THEN
            size := ceil({schema}.take_probe(queue_id, p_worker, p_token) * 1000);
            topic := 'probe';
        END IF;
        RETURN NEXT;
    END LOOP;
    IF cardinality(v_tracked) > 0 THEN
        v_twins := {schema}.begin_claims(v_tracked);
    END IF;
    FOR v_lane IN
        SELECT c.id, c.queue_id, c.lane, c.lo, c.hi, {schema}.is_ordered(c.queue_id, c.lane) AS ordered,
               (v_twins AND q.tracking = 'idempotent') OR q.tracking = 'transactional' AS looked_for,
               q.tracking = 'idempotent' AS owned,
               EXISTS (SELECT 1 FROM {schema}.progress g WHERE g.claim_id = c.id OFFSET 0) AS parked
        FROM unnest(v_sifted) WITH ORDINALITY AS u (id, n)
        CROSS JOIN LATERAL (SELECT c.* FROM {schema}.claims c WHERE c.id = u.id OFFSET 0) c
        CROSS JOIN LATERAL (SELECT q.tracking FROM {schema}.queues q WHERE q.id = c.queue_id OFFSET 0) q
        ORDER BY u.n
    LOOP
        RETURN QUERY
            SELECT v_lane.id, v_lane.queue_id, v_lane.lane, d.seq, o.size, o.event_id::text, o.topic, o.key,
                   o.payload::text, o.headers::text, o.published_at, d.replay_id, v_lane.ordered, p.twin
            FROM {schema}.deliveries d
            LEFT JOIN LATERAL (SELECT o.* FROM {schema}.outbox o WHERE o.id = d.outbox_id OFFSET 0) o ON true
            LEFT JOIN LATERAL (
                SELECT {schema}.twin_of(p.completed_at, p.owner, d.outbox_id, v_lane.owned) AS twin
                FROM {schema}.processed_events p
                WHERE p.queue_id = v_lane.queue_id AND p.event_id = o.event_id AND p.replay_id = d.replay_id OFFSET 0
            ) p ON v_lane.looked_for
            WHERE d.queue_id = v_lane.queue_id AND d.lane = v_lane.lane AND d.seq BETWEEN v_lane.lo AND v_lane.hi
              AND (NOT v_lane.parked OR NOT EXISTS (
                SELECT 1 FROM {schema}.progress g WHERE g.claim_id = v_lane.id AND g.seq = d.seq OFFSET 0))
            ORDER BY d.seq;
    END LOOP;
END
$body$;

-- Parks the deliveries of a new claim whose key waits behind an earlier event. Returns how many. The caller has locked
-- the lane.
CREATE FUNCTION {schema}.park_blocked(p_claim bigint) RETURNS integer
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET enable_memoize = off SET jit = off SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    c {schema}.claims%ROWTYPE;
    v_count integer;
BEGIN
    SELECT * INTO STRICT c FROM {schema}.claims k WHERE k.id = p_claim;
    IF NOT EXISTS (
            SELECT 1 FROM {schema}.exceptions e
            WHERE e.queue_id = c.queue_id AND e.lane = c.lane AND e.key IS NOT NULL)
       AND NOT EXISTS (
            SELECT 1 FROM {schema}.dead_letters l WHERE l.queue_id = c.queue_id AND l.lane = c.lane AND l.blocks) THEN
        RETURN 0;
    END IF;
    WITH blocked AS MATERIALIZED (
        SELECT d.seq, d.outbox_id, d.replay_id, o.key
        FROM {schema}.deliveries d
        CROSS JOIN LATERAL (SELECT o.key FROM {schema}.outbox o WHERE o.id = d.outbox_id OFFSET 0) o
        WHERE d.queue_id = c.queue_id AND d.lane = c.lane AND d.seq BETWEEN c.lo AND c.hi AND o.key IS NOT NULL
          AND (EXISTS (
                SELECT 1 FROM {schema}.exceptions e
                WHERE e.queue_id = c.queue_id AND e.lane = c.lane AND e.key = o.key OFFSET 0)
            OR EXISTS (
                SELECT 1 FROM {schema}.dead_letters l
                WHERE l.queue_id = c.queue_id AND l.lane = c.lane AND l.key = o.key AND l.blocks OFFSET 0))
    ), recorded AS (
        INSERT INTO {schema}.progress (claim_id, seq, outcome)
        SELECT c.id, b.seq, 'parked' FROM blocked b ORDER BY b.seq
    )
    INSERT INTO {schema}.exceptions (due_at, seq, outbox_id, queue_id, lane, replay_id, state, key)
    SELECT clock_timestamp(), b.seq, b.outbox_id, c.queue_id, c.lane, b.replay_id, 'parked', b.key
    FROM blocked b ORDER BY b.seq;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END
$body$;

-- Phase 1 for the deliveries of new claims that are to be handled. Returns whether some of them may have a twin.
CREATE FUNCTION {schema}.begin_claims(p_claims bigint[]) RETURNS boolean
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET enable_memoize = off SET jit = off SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    v_queues integer[];
    v_events uuid[];
    v_replays integer[];
    v_outbox bigint[];
    v_parked boolean := EXISTS (SELECT 1 FROM {schema}.progress g WHERE g.claim_id = ANY (p_claims));
BEGIN
    SELECT array_agg(d.queue_id), array_agg(o.event_id), array_agg(d.replay_id), array_agg(d.outbox_id)
    INTO v_queues, v_events, v_replays, v_outbox
    FROM unnest(p_claims) AS u (id)
    CROSS JOIN LATERAL (SELECT c.* FROM {schema}.claims c WHERE c.id = u.id OFFSET 0) c
    CROSS JOIN LATERAL (
        SELECT d.* FROM {schema}.deliveries d
        WHERE d.queue_id = c.queue_id AND d.lane = c.lane AND d.seq BETWEEN c.lo AND c.hi
          AND (NOT v_parked OR NOT EXISTS (
            SELECT 1 FROM {schema}.progress g WHERE g.claim_id = c.id AND g.seq = d.seq OFFSET 0))
        ORDER BY d.seq) d
    CROSS JOIN LATERAL (SELECT o.event_id FROM {schema}.outbox o WHERE o.id = d.outbox_id OFFSET 0) o;
    RETURN v_events IS NOT NULL AND {schema}.begin_executions(v_queues, v_events, v_replays, v_outbox);
END
$body$;

-- Claims exceptions that are due: at most p_limits[i] of p_queues[i], at most p_bytes of payload in all (at least
-- one). p_from[i] is where to start looking; the low end of the index is where the dead rows are. p_alone: only one,
-- and only one that must run alone. With an event of an ordered queue come those that are parked behind it, in order:
-- each may start when the one before it is done.
-- A row without exception_id tells of queue_id: due_in, seconds until its next exception is due (negative: more are
-- due now; null: none waits), and crashed_in, the same for those that must run alone. With a topic it tells of a pause,
-- as those of claim do: paused and probe, with the seconds in due_in, and size 0 if nothing waits; probing, beside the
-- rest.
CREATE FUNCTION {schema}.claim_due(p_worker uuid, p_token uuid, p_queues integer[], p_limits integer[],
                                   p_from timestamptz[], p_bytes bigint, p_alone boolean, p_turn integer DEFAULT 0)
RETURNS TABLE (exception_id bigint, queue_id integer, due_in double precision, crashed_in double precision,
               attempts integer, crashes integer, due_at timestamptz, size integer, event_id text, topic text,
               key text, payload text, headers text, published_at timestamptz, replay_id integer, redriven boolean,
               ordered boolean, twin text)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET enable_memoize = off SET jit = off SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    v_queue record;
    v_live boolean := false;
    v_left bigint := p_bytes;
    v_found integer[];
    v_taken boolean := false;
    v_locked bigint[];
    v_ids bigint[];
    v_bytes bigint;
    v_lanes integer[];
    v_probing boolean;
BEGIN
    PERFORM {schema}.require_read_committed();
    PERFORM set_config('synchronous_commit', 'off', true);
    FOR v_queue IN
        SELECT u.id, u.most, u.start, EXISTS (SELECT 1 FROM {schema}.pauses p WHERE p.queue_id = u.id OFFSET 0) AS paused
        FROM unnest(p_queues, p_limits, p_from) AS u (id, most, start) ORDER BY u.id
    LOOP
        v_probing := false;
        IF v_queue.paused THEN
            queue_id := v_queue.id;
            SELECT h.state, h.seconds INTO topic, due_in FROM {schema}.heed_pauses(v_queue.id) h;
            IF topic = 'paused' THEN
                size := {schema}.is_waiting(v_queue.id)::integer;
                RETURN NEXT;
                CONTINUE;
            END IF;
            v_probing := topic = 'probe';
            IF v_probing THEN
                v_queue.most := least(v_queue.most, 1);
            END IF;
        END IF;
        v_lanes := {schema}.lanes_in_turn(v_queue.id, p_turn);
        IF p_alone THEN
            v_found := ARRAY(
                SELECT 0 WHERE EXISTS (
                    SELECT 1 FROM {schema}.exceptions e WHERE e.queue_id = v_queue.id AND e.state = 'waiting'
                    AND e.alone AND e.due_at <= clock_timestamp()));
        ELSE
            v_found := ARRAY(
                SELECT g.lane FROM unnest(v_lanes) WITH ORDINALITY AS g (lane, n)
                WHERE EXISTS (
                    SELECT 1 FROM {schema}.exceptions e
                    WHERE e.queue_id = v_queue.id AND e.lane = g.lane AND e.state = 'waiting' AND NOT e.alone
                      AND e.due_at >= v_queue.start AND e.due_at <= clock_timestamp() OFFSET 0)
                ORDER BY g.n);
        END IF;
        IF cardinality(v_found) > 0 AND v_queue.most > 0 AND v_left > 0 THEN
            IF NOT v_live THEN
                PERFORM {schema}.require_live_worker(p_worker);
                v_live := true;
            END IF;
            IF p_alone THEN
                v_locked := {schema}.lock_alone(v_queue.id);
            ELSE
                v_locked := {schema}.lock_due(p_worker, p_token, v_queue.id, v_queue.most, v_queue.start, v_found);
            END IF;
            SELECT coalesce(array_agg(r.id ORDER BY r.n), '{}'), max(r.bytes) INTO v_ids, v_bytes FROM (
                SELECT u.id, u.n, sum(coalesce((
                    SELECT (SELECT o.size FROM {schema}.outbox o WHERE o.id = e.outbox_id)
                    FROM {schema}.exceptions e WHERE e.id = u.id), 0)) OVER (ORDER BY u.n) AS bytes
                FROM unnest(v_locked) WITH ORDINALITY AS u (id, n)
            ) r WHERE r.bytes <= v_left OR (r.n = 1 AND NOT v_taken);
            v_left := v_left - coalesce(v_bytes, 0);
            v_taken := v_taken OR cardinality(v_ids) > 0;
            UPDATE {schema}.exceptions e SET state = 'claimed', token = p_token, worker_id = p_worker
            WHERE e.id = ANY (v_ids) AND e.token IS NULL;
            IF cardinality(v_ids) < cardinality(v_locked) THEN
                UPDATE {schema}.exceptions e SET state = 'waiting', token = NULL, worker_id = NULL
                WHERE e.id = ANY (v_locked) AND e.id <> ALL (v_ids) AND e.token IS NOT NULL;
            END IF;
            RETURN QUERY SELECT * FROM {schema}.taken(v_ids);
            IF v_probing AND cardinality(v_ids) > 0 THEN
                due_in := {schema}.take_probe(v_queue.id, p_worker, p_token);
                size := 1;
                RETURN NEXT;
                EXIT WHEN p_alone;
                CONTINUE;
            END IF;
            EXIT WHEN p_alone AND cardinality(v_ids) > 0;
        END IF;
        RETURN QUERY
            SELECT NULL::bigint, v_queue.id,
                   (SELECT min(EXTRACT(EPOCH FROM n.due_at - clock_timestamp()))::double precision
                    FROM unnest(v_lanes) AS g (lane)
                    CROSS JOIN LATERAL (
                        SELECT e.due_at FROM {schema}.exceptions e
                        WHERE e.queue_id = v_queue.id AND e.lane = g.lane AND e.state = 'waiting' AND NOT e.alone
                          AND e.due_at >= v_queue.start
                        ORDER BY e.due_at, e.id LIMIT 1) n),
                   (SELECT EXTRACT(EPOCH FROM e.due_at - clock_timestamp())::double precision
                    FROM {schema}.exceptions e
                    WHERE e.queue_id = v_queue.id AND e.state = 'waiting' AND e.alone
                    ORDER BY e.due_at, e.id LIMIT 1),
                   NULL::integer, NULL::integer, NULL::timestamptz, NULL::integer, NULL::text,
                   CASE WHEN v_probing THEN 'probing' END, NULL::text, NULL::text, NULL::text, NULL::timestamptz,
                   NULL::integer, NULL::boolean, NULL::boolean, NULL::text;
    END LOOP;
END
$body$;

-- The lanes of a queue, of all its layouts, in the order in which their exceptions are looked for.
CREATE FUNCTION {schema}.lanes_in_turn(p_queue integer, p_turn integer) RETURNS integer[]
LANGUAGE sql STABLE SET enable_seqscan = off
BEGIN ATOMIC
    SELECT COALESCE(pg_catalog.array_agg(
        g.lane ORDER BY l.lane_from, {schema}.rank_in_turn(l.kind, l.lanes, g.lane - l.lane_from, p_turn)), '{}')
    FROM {schema}.layouts l, LATERAL pg_catalog.generate_series(l.lane_from, l.lane_from + l.lanes - 1) AS g (lane)
    WHERE l.queue_id = p_queue;
END;

-- Claimed exceptions with their events; phase 1 of their executions.
CREATE FUNCTION {schema}.taken(p_ids bigint[])
RETURNS TABLE (exception_id bigint, queue_id integer, due_in double precision, crashed_in double precision,
               attempts integer, crashes integer, due_at timestamptz, size integer, event_id text, topic text,
               key text, payload text, headers text, published_at timestamptz, replay_id integer, redriven boolean,
               ordered boolean, twin text)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET enable_memoize = off SET jit = off SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    v_queues integer[];
    v_outbox bigint[];
    v_replays integer[];
    v_events uuid[];
BEGIN
    SELECT array_agg(e.queue_id), array_agg(e.outbox_id), array_agg(e.replay_id), array_agg(o.event_id)
    INTO v_queues, v_outbox, v_replays, v_events
    FROM unnest(p_ids) AS u (id)
    CROSS JOIN LATERAL (SELECT e.* FROM {schema}.exceptions e WHERE e.id = u.id OFFSET 0) e
    CROSS JOIN LATERAL (
        SELECT 1 FROM {schema}.queues q WHERE q.id = e.queue_id AND q.tracking = 'idempotent' OFFSET 0) q
    CROSS JOIN LATERAL (SELECT o.event_id FROM {schema}.outbox o WHERE o.id = e.outbox_id OFFSET 0) o;
    IF v_outbox IS NOT NULL THEN
        PERFORM {schema}.begin_executions(v_queues, v_events, v_replays, v_outbox);
    END IF;
    RETURN QUERY
        SELECT e.id, e.queue_id, NULL::double precision, NULL::double precision, e.attempts, e.crashes, e.due_at,
               o.size, o.event_id::text, o.topic, o.key, o.payload::text, o.headers::text, o.published_at,
               e.replay_id, e.redriven_from IS NOT NULL, e.key IS NOT NULL, p.twin
        FROM unnest(p_ids) WITH ORDINALITY AS u (id, n)
        CROSS JOIN LATERAL (SELECT e.* FROM {schema}.exceptions e WHERE e.id = u.id OFFSET 0) e
        CROSS JOIN LATERAL (SELECT q.tracking FROM {schema}.queues q WHERE q.id = e.queue_id OFFSET 0) q
        LEFT JOIN LATERAL (SELECT o.* FROM {schema}.outbox o WHERE o.id = e.outbox_id OFFSET 0) o ON true
        LEFT JOIN LATERAL (
            SELECT {schema}.twin_of(p.completed_at, p.owner, e.outbox_id, q.tracking = 'idempotent') AS twin
            FROM {schema}.processed_events p
            WHERE p.queue_id = e.queue_id AND p.event_id = o.event_id AND p.replay_id = e.replay_id OFFSET 0
        ) p ON q.tracking <> 'none'
        ORDER BY u.n;
END
$body$;

-- Locks one exception that must run alone, and its lane if it has a key; none if somebody else has the lane.
CREATE FUNCTION {schema}.lock_alone(p_queue integer) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    v_row record;
BEGIN
    SELECT e.id, e.lane, e.key INTO v_row FROM {schema}.exceptions e
    WHERE e.queue_id = p_queue AND e.state = 'waiting' AND e.alone AND e.due_at <= clock_timestamp()
    ORDER BY e.due_at, e.id LIMIT 1 FOR UPDATE SKIP LOCKED;
    IF v_row.id IS NULL OR (v_row.key IS NOT NULL
            AND NOT pg_try_advisory_xact_lock({schema}.lock_key('lane', p_queue, v_row.lane))) THEN
        RETURN '{}';
    END IF;
    RETURN ARRAY[v_row.id];
END
$body$;

-- Locks due exceptions of a queue, lane by lane. A released range is taken apart: the part that is taken becomes rows
-- of its own, held by this worker. What follows an event in its key is taken along, up to one that must run alone. One
-- that was redriven waits while an event of its key is in an open claim: that one did not know of it.
CREATE FUNCTION {schema}.lock_due(p_worker uuid, p_token uuid, p_queue integer, p_limit integer, p_from timestamptz,
                                  p_lanes integer[])
RETURNS bigint[]
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    v_lane integer;
    v_row record;
    v_ids bigint[] := '{}';
    v_part bigint[];
    v_hi bigint;
    v_left integer;
BEGIN
    FOREACH v_lane IN ARRAY p_lanes LOOP
        v_left := p_limit - cardinality(v_ids);
        EXIT WHEN v_left <= 0;
        FOR v_row IN
            SELECT e.id, e.lane, e.seq, e.range_hi, e.due_at, e.key, e.redriven_from FROM {schema}.exceptions e
            WHERE e.queue_id = p_queue AND e.lane = v_lane AND e.state = 'waiting' AND NOT e.alone
              AND e.due_at >= p_from AND e.due_at <= clock_timestamp()
            ORDER BY e.due_at, e.id LIMIT v_left FOR UPDATE SKIP LOCKED
        LOOP
            v_left := p_limit - cardinality(v_ids);
            EXIT WHEN v_left <= 0;
            IF v_row.range_hi IS NULL THEN
                IF v_row.key IS NOT NULL THEN
                    CONTINUE WHEN NOT pg_try_advisory_xact_lock({schema}.lock_key('lane', p_queue, v_lane));
                    IF v_row.redriven_from IS NOT NULL AND {schema}.is_claimed(p_queue, v_lane, v_row.key) THEN
                        UPDATE {schema}.exceptions e SET due_at = clock_timestamp() + interval '100 ms'
                        WHERE e.id = v_row.id;
                        CONTINUE;
                    END IF;
                    v_ids := v_ids || v_row.id || ARRAY(
                        SELECT b.id FROM (
                            SELECT f.id, f.seq, bool_or(f.alone) OVER (ORDER BY f.seq) AS stays FROM (
                                SELECT e.id, e.seq, e.alone FROM {schema}.exceptions e
                                WHERE e.queue_id = p_queue AND e.lane = v_lane AND e.key = v_row.key
                                  AND e.seq > v_row.seq AND e.state = 'parked'
                                  AND NOT EXISTS (
                                    SELECT 1 FROM {schema}.dead_letters l
                                    WHERE l.queue_id = p_queue AND l.lane = v_lane AND l.key = v_row.key AND l.blocks
                                      AND l.seq < e.seq OFFSET 0)
                                ORDER BY e.seq LIMIT v_left - 1) f) b
                        WHERE NOT b.stays ORDER BY b.seq);
                ELSE
                    v_ids := v_ids || v_row.id;
                END IF;
                CONTINUE;
            END IF;
            v_hi := least(v_row.range_hi, v_row.seq + v_left - 1);
            WITH part AS (
                INSERT INTO {schema}.exceptions (due_at, seq, outbox_id, queue_id, lane, replay_id, state, token,
                                                 worker_id)
                SELECT v_row.due_at, d.seq, d.outbox_id, d.queue_id, d.lane, d.replay_id, 'claimed', p_token, p_worker
                FROM {schema}.deliveries d
                WHERE d.queue_id = p_queue AND d.lane = v_row.lane AND d.seq BETWEEN v_row.seq AND v_hi
                ORDER BY d.seq
                RETURNING id
            )
            SELECT array_agg(p.id ORDER BY p.id) INTO v_part FROM part p;
            v_ids := v_ids || v_part;
            IF v_hi = v_row.range_hi THEN
                DELETE FROM {schema}.exceptions e WHERE e.id = v_row.id;
            ELSE
                UPDATE {schema}.exceptions e SET seq = v_hi + 1 WHERE e.id = v_row.id;
            END IF;
        END LOOP;
    END LOOP;
    RETURN v_ids;
END
$body$;

-- Whether the open claim of an ordered lane has an event of this key.
CREATE FUNCTION {schema}.is_claimed(p_queue integer, p_lane integer, p_key text) RETURNS boolean
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $body$
DECLARE
    c {schema}.claims%ROWTYPE;
BEGIN
    SELECT * INTO c FROM {schema}.claims k WHERE k.queue_id = p_queue AND k.lane = p_lane ORDER BY k.lo DESC LIMIT 1;
    RETURN c.id IS NOT NULL
        AND NOT EXISTS (SELECT 1 FROM {schema}.settlements s WHERE s.claim_id = c.id)
        AND EXISTS (
            SELECT 1 FROM {schema}.deliveries d
            WHERE d.queue_id = p_queue AND d.lane = p_lane AND d.seq BETWEEN c.lo AND c.hi
              AND (SELECT o.key FROM {schema}.outbox o WHERE o.id = d.outbox_id) = p_key
              AND NOT EXISTS (
                SELECT 1 FROM {schema}.progress g WHERE g.claim_id = c.id AND g.seq = d.seq));
END
$body$;
